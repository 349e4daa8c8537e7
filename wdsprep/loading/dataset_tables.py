"""Read and search the tables of samples of opened datasets, and of what is joined to one.

`open_tables` opens them shard by shard, and `lay_out_joined` lays out the columns of tables and
scores that are joined to a dataset (`tables.join_columns`). `SampleSearch` finds the samples that
meet a condition. A name in a condition has the value that the first of these has for a sample: the
columns that are laid out, the rows of the dataset, and those of joined datasets, in the order of
`join=`.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wdsprep.dataset.condition_syntax import Condition, format_path
from wdsprep.dataset.file_names import MANIFEST
from wdsprep.dataset.kept_file import release_pages
from wdsprep.dataset.manifest import Shard
from wdsprep.dataset.sample_table import KEY, NO_OBJECT, REST, table_schema
from wdsprep.dataset.samples import PathParts, nearest_field
from wdsprep.dataset.settings import TEXT, columns_of
from wdsprep.dataset.shard_reader import ShardReader
from wdsprep.dataset.stored_dataset import read_manifest, rewritten_error
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.errors import UsageError
from wdsprep.loading.served_datasets import Dataset
from wdsprep.sources.patterns import is_table
from wdsprep.sources.tables.parquet import OpenParquet
from wdsprep.tables.column_conditions import Mask, mask_of, whole_numbers
from wdsprep.tables.join_columns import JoinedSamples, lay_out_scores, lay_out_table
from wdsprep.tables.joined_columns import LaidOut
from wdsprep.tables.key_join import NAMES
from wdsprep.tables.other_tables import encode_names
from wdsprep.tables.query import Query, lacking_names, open_engine, read_named, read_texts
from wdsprep.tables.stored_tables import ShardTables

if TYPE_CHECKING:
    from wdsprep.loading.join import JoinedDataset
    from wdsprep.loading.subsets import Subset


class TablesBeside:
    """The tables of a joined dataset, read by the shards of the dataset that it is joined to."""

    def __init__(self, joined: "JoinedDataset") -> None:
        self.tables, self._joined = open_tables(joined.dataset.whole), joined

    def read(
        self, read_table: Callable[[OpenParquet], pa.Table], shard: int, count: int
    ) -> pa.Table | None:
        """Return the rows of the joined dataset for the `count` samples of a shard, in their order.

        `read_table` reads those of one of its tables. The row of a sample that the joined dataset
        lacks is null; if it has none for the whole shard, None is returned.
        """
        shards, places = self._joined.locate(np.full(count, shard), np.arange(count))
        if not count or shards[0] < 0:
            return None
        table = self.tables.read_shard(read_table, self.tables.shards[int(shards[0])])
        if np.array_equal(places, np.arange(len(table))):
            return table
        is_lacking = places >= len(table)
        return table.take(whole_numbers(np.where(is_lacking, 0, places), is_lacking))


def open_tables(dataset: Dataset) -> ShardTables:
    """Return the tables of the shards of an opened dataset."""
    store = dataset.store
    if dataset.kind == "tars":
        sizes = zip(dataset.names, dataset.sizes.tolist(), strict=True)
        return ShardTables(store, [Shard(name, count) for name, count in sizes])
    manifest = read_manifest(store)
    if manifest is None:
        raise rewritten_error(store, MANIFEST)
    shards = {shard.name: shard for shard in manifest.shards}
    for name, content in zip(dataset.names, dataset.contents, strict=True):
        if name not in shards or shards[name].digest != content:
            raise rewritten_error(store, name)
    return ShardTables(store, [shards[name] for name in dataset.names], manifest)


def lay_out_joined(
    dataset: Dataset, folder: Path | None, *, named: Collection[str], for_batches: bool
) -> tuple[LaidOut, ...]:
    """Return the columns of all tables, and datasets of scores, that are joined to a dataset.

    They are the columns that are `named`, and `for_batches` all columns of numbers. The files of
    the latter are opened here, once for all processes that make batches.
    """
    files = dataset.whole.files
    samples = JoinedSamples(
        url=files.store.url,
        sizes=files.sizes,
        contents=(*files.names, *files.contents),
        read_names=partial(_read_names, files),
    )
    places = dict.fromkeys(place for place in dataset.join if is_table(place))
    wanted = named, for_batches
    laid_out = [lay_out_table(place, samples, folder, wanted=wanted) for place in places]
    for other in dataset.joined:
        if other.dataset.has_columns:
            whole = other.dataset.whole
            scores = lay_out_scores(
                whole.store.url,
                (*whole.names, *whole.contents),
                columns_of(whole.settings),
                samples,
                folder,
                wanted=wanted,
                read=partial(_read_scores, files, other),
            )
            laid_out.append(scores)
    for columns in laid_out if for_batches else ():
        columns.file  # noqa: B018
    there = Counter(name for columns in laid_out for name in columns.numbers)
    if twice := sorted(name for name, count in there.items() if count > 1):
        raise UsageError(f"two joined tables have a column {twice[0]}: leave one out")
    return tuple(laid_out)


def _read_names(files: Dataset, by: str) -> Iterator[pa.Array | pa.ChunkedArray]:
    """Yield a column of names of the samples of each shard."""
    tables = open_tables(files)
    columns = tables.read(partial(read_texts, name=by))
    for shard, names in zip(tables.shards, columns, strict=True):
        if by == KEY and pc.any(pc.match_substring(names, "?")).as_py():
            # Tables have it in place of bytes that are not UTF-8, which tell keys apart.
            with ShardReader(files.store, shard, is_foreign=files.kind == "tars") as reader:
                yield encode_names([*reader.keys()])
        else:
            yield names.cast(pa.large_string()).cast(NAMES)


def _read_scores(
    files: Dataset, other: "JoinedDataset", names: Collection[str]
) -> Iterator[pa.Table]:
    """Yield the scores of the samples of each shard, null for samples that have none."""
    kinds = {KEY: TEXT, **columns_of(other.dataset.settings)}
    columns = {name: kinds[name] for name in names or [KEY]}
    beside, lacking = TablesBeside(other), table_schema(columns).empty_table()

    def read(shard: int) -> pa.Table:
        count = int(files.sizes[shard])
        rows = beside.read(lambda file: file.read(columns), shard, count)
        return lacking.take(pa.nulls(count, pa.int64())) if rows is None else rows

    return map_ahead(read, range(len(files.names)), beside.tables.threads)


_ShardRows = tuple[Sequence[pa.Table], Mask, Mask]
"""The columns of the samples of a shard, in tables that stand side by side, and two masks.

These are of the samples with a readable json, and of those with a row in all that is laid out.
"""


class SampleSearch:
    """A search of the `tables` of a dataset, for samples that meet a condition.

    They must have a row in all tables of the subset.
    """

    def __init__(self, subset: "Subset", condition: Condition) -> None:
        self._subset, self._condition = subset, condition
        self._dataset, self._laid_out = subset.whole.files, subset.tables
        self.tables = open_tables(self._dataset)
        others = (o for o in subset.joined if not o.dataset.has_columns)  # these are laid out
        self._beside = [*map(TablesBeside, others)]

    def run(self) -> Iterator[tuple[Mask, int, int]]:
        """Yield for each shard a mask of its samples that are selected.

        With it come the number of samples without a readable json, and that of the others which
        have no row in a joined table. At the end, raise UsageError if the condition has a name that
        no sample has.
        """
        threads, shards = self.tables.threads, range(len(self._dataset.names))
        waiting: deque[tuple[Mask, Mask]] = deque()

        def sides(shards_read: Iterable[_ShardRows]) -> Iterator[Sequence[pa.Table]]:
            for sides, is_sound, has_rows in shards_read:
                waiting.append((is_sound, has_rows))
                yield sides

        with (
            open_engine() as engine,
            closing(map_ahead(self._read, shards, threads, most=threads)) as shards_read,
        ):
            query = Query(self._condition, engine)
            for mask in query.masks(sides(shards_read)):
                is_sound, has_rows = waiting.popleft()
                lacking = int((is_sound & ~has_rows).sum())
                yield mask & is_sound & has_rows, int((~is_sound).sum()), lacking
                for table in self._laid_out:
                    release_pages(table.has_row)
        for path in self._condition.names:
            if path in query.unseen:
                raise self._unknown_name(path)

    def _read(self, number: int) -> _ShardRows:
        """Return what is known of the samples of a shard, in any thread."""
        is_foreign, count = self.tables.is_foreign, int(self._dataset.sizes[number])
        is_sound, has_rows = np.ones((2, count), np.bool_)
        sides = []
        lacking: Sequence[PathParts] = self._condition.names
        names = {str(path[0]) for path in lacking}
        for table in self._laid_out:
            rows = table.rows_of(number)
            has_rows &= table.has_row[rows]
            sides.append(table.table(rows, names))
        if self._laid_out:
            columns = {name: side[name] for side in sides[::-1] for name in side.column_names}
            known = pa.table({**columns, "": has_rows})
            lacking = lacking_names(lacking, known.filter(known[""]))
            if not (lacking or is_foreign):
                return [*sides, known.select([""])], is_sound, has_rows
        read = partial(read_named, names=lacking)
        columns_read, rest = self.tables.read_shard(
            lambda file: (read(file), file.read([REST]) if is_foreign else pa.table({})),
            self.tables.shards[number],
        )
        if is_foreign:
            is_sound = ~mask_of(pc.equal(rest[REST], NO_OBJECT).fill_null(False))
        sides.append(columns_read)
        if lacking := lacking_names(lacking, columns_read):
            read = partial(read_named, names=lacking)
            beside = (others.read(read, number, count) for others in self._beside)
            sides += [rows for rows in beside if rows is not None]
        return sides, is_sound, has_rows

    def _unknown_name(self, path: PathParts) -> UsageError:
        tables = [self.tables, *(others.tables for others in self._beside)]
        looked_in = ", ".join(table.url for table in tables)
        names = {name for table in self._laid_out for name in table.offered}
        for searched in tables:
            names |= searched.field_names()
        where = f"{self._condition.option}{self._subset.shown!r}"
        way_on = (
            '"wdsprep inspect DATASET KEY" shows the json of a sample; for columns of the images, '
            "ask these, or join a table that has them"
        )
        if near := nearest_field(path, names):
            way_on = f"did you mean {near}?"
        return UsageError(
            f"{looked_in}: no sample has {format_path(path)}, which {where} asks for; {way_on}"
        )
