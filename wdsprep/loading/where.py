"""Filter samples by a condition: `where="aesthetic >= 6 and width >= 768"`.

Conditions are those of `wdsprep.dataset.condition_syntax`. They are asked of the tables beside the
shards and of what is joined to them (`dataset_tables`). The samples that meet one are kept
(`kept_file`), by the contents of the dataset and the condition, so the next run finds them there.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from wdsprep.dataset.condition_syntax import EVALUATOR, Condition
from wdsprep.dataset.kept_file import KeptWriter, open_or_make
from wdsprep.dataset.random_numbers import key_of
from wdsprep.dataset.sample_selection import SampleSelection, ShardSamples, keep_selection
from wdsprep.errors import UsageError
from wdsprep.loading.open_datasets import select
from wdsprep.loading.sample_cache import CacheDir, cache_folder
from wdsprep.loading.served_datasets import Dataset, JoinedDataset
from wdsprep.sources.patterns import is_table
from wdsprep.text import examples, plural

if TYPE_CHECKING:
    from wdsprep.loading.dataset_tables import SampleSearch
    from wdsprep.tables.joined_columns import LaidOut

SHOWN = 200
"""The longest condition, in characters, that a state has in full; a longer one is shortened."""
_log = logging.getLogger("wdsprep")


class Where(Condition):
    """A condition of `where=`."""

    option = "where="


@dataclass(frozen=True, kw_only=True, eq=False)
class Subset:
    """A selection of samples, by a condition, by tables in which they need a row, or by both."""

    whole: Dataset
    condition: Where | None
    tables: "tuple[LaidOut, ...]"
    joined: tuple[JoinedDataset, ...] = ()

    @property
    def is_whole(self) -> bool:
        return self.condition is None and not self.tables

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

    def selection(self, cache: CacheDir | None) -> SampleSelection:
        """Return the selection, which is searched for once and then kept on this machine.

        Log how many samples are left out because they are damaged or have no row in a table.
        """
        kept = open_or_make(cache_folder(cache), self.cache_key, self._search)
        url = self.whole.store.url
        if damaged := kept.facts["damaged"]:
            what = plural(damaged, "sample")
            _log.warning("%s: left out %s whose json is damaged or missing", url, what)
        if lacking := kept.facts["lacking"]:
            what = plural(lacking, "sample")
            places = examples([table.url for table in self.tables])
            _log.warning("%s: left out %s without a row in %s", url, what, places)
        return SampleSelection.from_file(kept)

    def search(self) -> "SampleSearch":
        from wdsprep.loading.dataset_tables import (
            SampleSearch,  # pyarrow and DuckDB, which few need
        )

        return SampleSearch(
            self.whole.files,
            self.condition or Where("True"),
            shown=self.shown,
            laid_out=self.tables,
            joined=self.joined,
        )

    def _search(self, writer: KeptWriter, path: Path) -> None:
        files = self.whole.files
        _log.info(
            "%s: asking the tables of %s for where=%r and %s; the selection is kept in %s",
            files.store.url,
            plural(files.samples, "sample"),
            self.shown,
            plural(len(self.tables), "table"),
            path,
        )
        left_out = {"damaged": 0, "lacking": 0}

        def select_shards() -> Iterator[ShardSamples]:
            for number, selected in enumerate(self.search().run()):
                left_out["damaged"] += selected.damaged
                left_out["lacking"] += selected.lacking
                yield ShardSamples(number, np.flatnonzero(selected.mask).astype(np.uint32))

        keep_selection(writer, len(files.names), select_shards())
        writer.facts |= left_out


def select_where(
    datasets: Sequence[Dataset], where: str | None, cache: CacheDir | None
) -> tuple[Dataset, ...]:
    """Return datasets with only the samples that meet their conditions and have rows in all tables.

    A sample must meet both `where` and the condition of its own stream. The joined tables are
    opened and set in the datasets. Raise UsageError if a dataset has no sample left.
    """
    subsets: dict[Dataset, Subset] = {}
    known: dict[Subset, SampleSelection] = {}
    found = []
    for dataset in datasets:
        if dataset.whole not in subsets:
            subsets[dataset.whole] = find_subset(dataset, where, cache)
        subset = subsets[dataset.whole]
        if subset.is_whole:
            found.append(dataset)
            continue
        if subset not in known:
            known[subset] = subset.selection(cache)
        if (left := select(dataset, known[subset])) is not None:
            found.append(replace(left, where=subset.shown, tables=subset.tables))
    for whole, subset in subsets.items():
        if not subset.is_whole and all(dataset.whole is not whole for dataset in found):
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
) -> Subset:
    """Return the subset that conditions and joined tables select.

    The tables are opened; the samples are not searched yet. If `columns` are given, the tables have
    only the columns that these or the conditions name; else they have all that batches take.
    """
    given = [Where(text) for text in (dataset.where, where) if text is not None and text != ""]
    condition = join_conditions(given) if given else None
    tables: tuple[LaidOut, ...] = ()
    if any(map(is_table, dataset.join)) or any(o.dataset.has_columns for o in dataset.joined):
        from wdsprep.loading.dataset_tables import lay_out_joined  # DuckDB, which few need

        paths = condition.names if condition else ()
        named = {*(columns or ()), *(str(name[0]) for name in paths if len(name) == 1)}
        tables = lay_out_joined(dataset, cache, named=named, for_batches=columns is None)
    return Subset(whole=dataset.whole, condition=condition, tables=tables, joined=dataset.joined)


def join_conditions(conditions: Sequence[Where]) -> Where:
    """Return one condition, which is met if all of these are."""
    if len(conditions) == 1:
        return conditions[0]
    return Where(" and ".join(f"({condition.plain})" for condition in conditions))


def shorten_for_state(plain: str) -> str:
    """Return a condition for a saved state; a long one as its beginning and a digest."""
    return plain if len(plain) <= SHOWN else f"{plain[:60]}... {key_of(plain):016x}"
