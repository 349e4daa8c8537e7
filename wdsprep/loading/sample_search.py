"""Search the tables of a dataset for the samples that meet a condition.

A name in a condition has the value that the first of these has for a sample: the columns that are
laid out, the rows of the dataset, and those of joined datasets, in the order of `join=`.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wdsprep.dataset.condition_syntax import Condition, format_path
from wdsprep.dataset.sample_table import NO_OBJECT, REST
from wdsprep.dataset.samples import PathParts
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.errors import UsageError
from wdsprep.loading.dataset_tables import TablesBeside, open_tables
from wdsprep.loading.served_datasets import Dataset, JoinedDataset
from wdsprep.sources.tables.parquet import OpenParquet
from wdsprep.tables.laid_out import LaidOut
from wdsprep.tables.query import Mask, Query, mask_of, open_engine
from wdsprep.tables.stored_tables import ForeignTables
from wdsprep.text import nearest_name


class SelectedSamples(NamedTuple):
    """Which samples of a shard are selected.

    `damaged` counts those without a readable json, and `lacking` the others that have no row in a
    joined table.
    """

    mask: Mask
    damaged: int
    lacking: int


class _ShardRows(NamedTuple):
    """What is known of the samples of a shard: tables that stand side by side, and two masks."""

    sides: Sequence[pa.Table]
    is_sound: Mask
    has_rows: Mask


class SampleSearch:
    """A search of the `tables` of a dataset, for samples that meet a condition.

    They must have a row in all that is laid out. `shown` is the condition as messages have it.
    """

    def __init__(
        self,
        dataset: Dataset,
        condition: Condition,
        *,
        shown: str,
        laid_out: Sequence[LaidOut],
        joined: Sequence[JoinedDataset],
    ) -> None:
        self._dataset, self._laid_out = dataset, laid_out
        self._condition, self._shown = condition, shown
        self.tables = open_tables(dataset)
        others = (other for other in joined if not other.dataset.has_columns)  # laid out
        self._beside = [*map(TablesBeside, others)]

    def run(self) -> Iterator[SelectedSamples]:
        """Yield for each shard which of its samples are selected.

        At the end, raise UsageError if the condition has a name that no sample has.
        """
        threads = self.tables.threads
        shards = range(len(self._dataset.names))
        waiting: deque[tuple[Mask, Mask]] = deque()
        with open_engine() as engine:
            query = Query(self._condition, engine)

            def sides() -> Iterator[Sequence[pa.Table]]:
                look = map_ahead(lambda n: self._read(query, n), shards, threads, most=threads)
                with closing(look) as found:
                    for rows in found:
                        waiting.append((rows.is_sound, rows.has_rows))
                        yield rows.sides

            for mask in query.masks(sides()):
                is_sound, has_rows = waiting.popleft()
                lacking = int((is_sound & ~has_rows).sum())
                yield SelectedSamples(mask & is_sound & has_rows, int((~is_sound).sum()), lacking)
        for path in self._condition.names:
            if path in query.unseen:
                raise self._unknown_name(path)

    def _read(self, query: Query, number: int) -> _ShardRows:
        """Return what is known of the samples of a shard, in any thread."""
        is_foreign = isinstance(self.tables, ForeignTables)

        def read(file: OpenParquet) -> tuple[pa.Table, pa.Table]:
            return query.read(file), file.read([REST]) if is_foreign else pa.table({})

        count = int(self._dataset.sizes[number])
        is_sound, has_rows = np.ones((2, count), np.bool_)
        sides = []
        names = {str(path[0]) for path in self._condition.names}
        for table in self._laid_out:
            rows = table.rows_of(number)
            has_rows &= table.has_row[rows]
            sides.append(table.table(rows, names))
        if self._laid_out and not is_foreign:
            columns = {name: side[name] for side in sides[::-1] for name in side.column_names}
            known = pa.table({**columns, "": has_rows})
            if not query.may_lack(known.filter(known[""])):
                return _ShardRows([*sides, known.select([""])], is_sound, has_rows)
        own, rest = self.tables.read_shard(read, self.tables.shards[number])
        if is_foreign:
            is_sound = ~mask_of(pc.equal(rest[REST], NO_OBJECT).fill_null(False))
        sides.append(own)
        if query.may_lack(own):
            beside = (others.read(query.read, number, count) for others in self._beside)
            sides += [rows for rows in beside if rows is not None]
        return _ShardRows(sides, is_sound, has_rows)

    def _unknown_name(self, path: PathParts) -> UsageError:
        tables = [self.tables, *(others.tables for others in self._beside)]
        looked_in = ", ".join(each.url for each in tables)
        names = {name for table in self._laid_out for name in table.offered}
        for each in tables:
            names |= each.field_names()
        wrong = next(part for part in reversed(path) if isinstance(part, str))
        where = f"{self._condition.option}{self._shown!r}"
        if near := nearest_name(wrong, names - {wrong}):
            way_on = f"did you mean {near}?"
        elif self._dataset.kind == "latents":
            way_on = (
                "latents do not keep the columns of their images: join a table that has it, or "
                "load the images with encode="
            )
        else:
            way_on = '"wdsprep inspect DATASET KEY" shows the json of a sample'
        return UsageError(
            f"{looked_in}: no sample has {format_path(path)}, which {where} asks for; {way_on}"
        )
