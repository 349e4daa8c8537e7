"""Filter samples by a condition: `where="aesthetic >= 6 and width >= 768"`.

Conditions are those of `wdsprep.dataset.condition_syntax`. They apply to the json of samples and to
the columns of joined tables. What the json of a sample lacks is taken from the json of the samples
that are joined to it, in the order of `join=`.

For a condition, all json of the dataset is read once (`sample_metadata`). The samples that meet it
are kept (`kept_file`), by the contents of the dataset and the condition, so the next run finds
them there.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wdsprep.dataset.condition_syntax import EVALUATOR, Condition, format_path
from wdsprep.dataset.kept_file import KeptWriter, open_or_make
from wdsprep.dataset.random_numbers import key_of
from wdsprep.dataset.sample_selection import Numbers, SampleSelection, ShardSamples, keep_selection
from wdsprep.dataset.samples import META, PathParts, value_at_path
from wdsprep.errors import UsageError
from wdsprep.loading.sample_metadata import (
    JoinedMetadata,
    MetadataBlock,
    read_metadata,
    scan_metadata,
)
from wdsprep.loading.served_datasets import Dataset, JoinedDataset
from wdsprep.loading.shard_access.sample_cache import CacheDir, cache_folder
from wdsprep.loading.subsets import select
from wdsprep.sources.patterns import is_table
from wdsprep.text import examples, human_bytes, nearest_name, plural

if TYPE_CHECKING:
    from wdsprep.tables.laid_out import LaidOut

SHOWN = 200
"""The longest condition, in characters, that a state has in full; a longer one is shortened."""
_log = logging.getLogger("wdsprep")


class Where(Condition):
    """A condition of `where=`, which is tested on the values that `Subset` finds."""

    option = "where="


@dataclass(frozen=True, slots=True)
class _SelectedBlock:
    """The samples of one piece of a shard that meet a condition.

    `seen` says for which names any sample has a value. `damaged` counts the damaged samples,
    and `lacking` the others that have no row in a table.
    """

    numbers: Numbers
    seen: NDArray[np.bool_]
    damaged: int
    lacking: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Subset:
    """A selection of samples, by a condition, by tables in which they need a row, or by both."""

    whole: Dataset
    condition: Where | None
    tables: "tuple[LaidOut, ...]"
    joined: tuple[JoinedDataset, ...] = ()

    @property
    def shown(self) -> str:
        return shorten_for_state(self.condition.plain) if self.condition else ""

    @property
    def cache_key(self) -> tuple[str, ...]:
        """The key under which the selection is kept: everything that it depends on."""
        files, tables = self.whole.files, [table.digest for table in self.tables]
        if self.condition is None:
            return "where", *files.names, *files.contents, "", *tables
        joined = [joined.dataset.whole.digest for joined in self.joined]
        plain = self.condition.plain
        return f"where {EVALUATOR}", *files.names, *files.contents, plain, *tables, *joined

    @cached_property
    def names(self) -> tuple[PathParts, ...]:
        return self.condition.names if self.condition else ()

    @cached_property
    def _joined_metadata(self) -> tuple[JoinedMetadata, ...]:
        return tuple(map(JoinedMetadata, self.joined))

    def select_block(self, some: MetadataBlock) -> _SelectedBlock:
        count = len(some.keys)
        has_rows = np.ones(count, np.bool_)
        for table in self.tables:
            has_rows &= table.has_row[self._rows(table, some)]
        keep, is_sound = has_rows, np.ones(count, np.bool_)
        is_sound[some.damaged] = False
        seen = np.zeros(len(self.names), np.bool_)
        if self.condition is not None:
            columns = [self._column(name, some) for name in self.names]
            seen[:] = [any(value is not None for value in column) for column in columns]
            samples = zip(*columns, strict=True) if columns else repeat((), count)
            meets = np.fromiter(map(self.condition.holds, samples), np.bool_, count)
            keep = meets & is_sound & has_rows
        numbers = (np.flatnonzero(keep) + some.first).astype(np.uint32)
        return _SelectedBlock(
            numbers, seen, int((~is_sound).sum()), int((is_sound & ~has_rows).sum())
        )

    def _rows(self, table: "LaidOut", some: MetadataBlock) -> slice:
        start = table.rows_of(some.shard).start + some.first
        return slice(start, start + len(some.keys))

    def _column(self, name: PathParts, some: MetadataBlock) -> Sequence[Any]:
        """Return the values of a name: from a table with that column, or else from the json.

        If the json of the first dataset lacks a value, it comes from the first joined
        dataset which has it.
        """
        for table in self.tables:
            if len(name) == 1 and name[0] in (*table.numbers, *table.texts):
                rows = table.table(self._rows(table, some), [str(name[0])])
                values: list[Any] = rows.column(0).to_pylist()
                return values
        found = [value_at_path(one, name) for one in some.facts]
        for source in self._joined_metadata:
            lacking = [n for n, one in enumerate(found) if one is None]
            if not lacking:
                break
            others = source.read(some.shard, np.array(lacking) + some.first)
            for number, other in zip(lacking, others, strict=True):
                found[number] = value_at_path(other, name)
        return found

    def selection(self, cache: CacheDir | None) -> SampleSelection:
        """Return the selection, which is searched for once and then kept on this machine.

        Log how many samples are left out because they are damaged or have no row in a table.
        """
        found = open_or_make(cache_folder(cache), self.cache_key, self._search)
        url = self.whole.store.url
        if damaged := found.facts["damaged"]:
            what = plural(damaged, "sample")
            _log.warning("%s: left out %s whose json is damaged or missing", url, what)
        if lacking := found.facts["lacking"]:
            what = plural(lacking, "sample")
            places = examples([table.url for table in self.tables])
            _log.warning("%s: left out %s without a row in %s", url, what, places)
        return SampleSelection.from_file(found)

    def _search(self, writer: KeptWriter, path: Path) -> None:
        files = self.whole.files
        what = "json" if self.condition else "keys"
        _log.info(
            "%s: reading the %s of %s (%s of shards) for where=%r and %s; the selection is kept "
            "in %s",
            files.store.url,
            what,
            plural(files.samples, "sample"),
            human_bytes(files.nbytes),
            self.shown,
            plural(len(self.tables), "table"),
            path,
        )
        seen, others = np.zeros(len(self.names), np.bool_), np.zeros(2, np.int64)

        def select_shards() -> Iterator[ShardSamples]:
            parses = self.condition is not None
            for shard, pieces in scan_metadata(self.whole, self.select_block, parses=parses):
                for piece in pieces:
                    seen[:] |= piece.seen
                    others[:] += piece.damaged, piece.lacking
                    yield ShardSamples(shard, piece.numbers)

        keep_selection(writer, len(files.names), select_shards())
        unknown = [name for name, is_known in zip(self.names, seen, strict=True) if not is_known]
        if unknown:
            looked_in = ", ".join([files.store.url, *(j.dataset.store.url for j in self.joined)])
            raise UsageError(
                f"{looked_in}: no sample has {format_path(unknown[0])}, which "
                f"where={self.shown!r} asks for; {self._way_on(unknown[0])}"
            )
        writer.facts["damaged"], writer.facts["lacking"] = others.tolist()

    def _way_on(self, unknown: PathParts) -> str:
        """Return what to do about a name that no sample has."""
        names = {name for table in self.tables for name in table.offered}
        for one in self._first_facts():
            names.update(one)
            names.update(one[META] if isinstance(one.get(META), dict) else ())
        wrong = next(part for part in reversed(unknown) if isinstance(part, str))
        if near := nearest_name(wrong, names):
            return f"did you mean {near}?"
        if self.whole.files.kind == "latents":
            return (
                "latents do not keep the columns of their images: join a table that has it, or "
                "load the images with encode="
            )
        return '"wdsprep inspect DATASET KEY" shows the json of a sample'

    def _first_facts(self) -> list[dict[str, Any]]:
        """Return the json of the first samples."""
        shards = range(len(self.whole.files.names))
        blocks = (block for shard in shards for block in read_metadata(self.whole.files, shard))
        return [one for block in islice(blocks, 1) for one in block.facts if one is not None]


def select_where(
    datasets: Sequence[Dataset], where: str | None, cache: CacheDir | None
) -> tuple[Dataset, ...]:
    """Return datasets with only the samples that meet their conditions and have rows in all tables.

    A sample must meet both `where` and the condition of its own stream. The joined tables are
    opened and set in the datasets. Raise UsageError if a dataset has no sample left.
    """
    subsets: dict[Dataset, Subset | None] = {}
    known: dict[Subset, SampleSelection] = {}
    found = []
    for dataset in datasets:
        if dataset.whole not in subsets:
            subsets[dataset.whole] = find_subset(dataset, where, cache)
        subset = subsets[dataset.whole]
        if subset is None:
            found.append(dataset)
            continue
        if subset not in known:
            known[subset] = subset.selection(cache)
        if (left := select(dataset, known[subset])) is not None:
            found.append(replace(left, where=subset.shown, tables=subset.tables))
    for whole, subset in subsets.items():
        if subset is not None and all(dataset.whole is not whole for dataset in found):
            raise UsageError(
                f"no sample of {whole.store.url} meets where={subset.shown!r}: ask for less"
                if subset.condition
                else f"{whole.store.url}: no sample has a row in each of the joined tables "
                f"({examples([table.url for table in subset.tables])}), so compare their keys"
            )
    return tuple(found)


def find_subset(
    dataset: Dataset,
    where: str | None,
    cache: CacheDir | None,
    *,
    columns: Sequence[str] | None = None,
) -> Subset | None:
    """Return the subset that conditions and joined tables select, or None if there are neither.

    The tables are opened; the samples are not searched yet. If `columns` are given, the tables have
    only the columns that these or the conditions name; else they have all that batches take.
    """
    given = [Where(text) for text in (dataset.where, where) if text is not None and text != ""]
    condition = join_conditions(given) if given else None
    names = [str(name[0]) for name in condition.names if len(name) == 1] if condition else []
    tables: tuple[LaidOut, ...] = ()
    if any(map(is_table, dataset.join)) or any(o.dataset.has_columns for o in dataset.joined):
        from wdsprep.loading.joined_columns import lay_out_joined  # DuckDB, which few need

        named = {*names, *(columns or ())}
        tables = lay_out_joined(dataset, cache, named=named, for_batches=columns is None)
    if condition is None and not tables:
        return None
    return Subset(whole=dataset.whole, condition=condition, tables=tables, joined=dataset.joined)


def join_conditions(conditions: Sequence[Where]) -> Where:
    """Return one condition, which is met if all of these are."""
    if len(conditions) == 1:
        return conditions[0]
    return Where(" and ".join(f"({condition.plain})" for condition in conditions))


def shorten_for_state(plain: str) -> str:
    """Return a condition for a saved state; a long one as its beginning and a digest."""
    return plain if len(plain) <= SHOWN else f"{plain[:60]}... {key_of(plain):016x}"
