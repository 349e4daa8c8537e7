"""The samples that `duplicates` compares, and the values by which it chooses between copies.

Both may come from columns of scores and tables. Values are found by the keys that are kept beside
the hashes, so no image shard is read for them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from wdsprep.changes.image_hashes import ImagesLooked
from wdsprep.changes.joined_columns import match_places, select_samples
from wdsprep.dataset.random_numbers import Ints
from wdsprep.errors import UsageError
from wdsprep.loading.table_keys import LACKING
from wdsprep.loading.tables import KeyedTable
from wdsprep.loading.where import Subset
from wdsprep.text import examples


@dataclass(frozen=True, kw_only=True)
class ComparedSamples:
    """A choice among the samples of all datasets, in their order.

    `is_compared` says which samples are compared; it is None if all are. `tables` are those that
    have the column `keep`, one for each dataset.
    """

    images: Sequence[ImagesLooked] = ()
    is_compared: NDArray[np.bool_] | None = None
    keep: str = ""
    tables: tuple[KeyedTable, ...] = ()

    @cached_property
    def ranks(self) -> NDArray[np.int64] | None:
        """Return each sample's rank by the column `keep`, or None if no column was asked for.

        Equal values have equal ranks, a higher value a higher rank, and no value has rank 0.
        """
        if not self.keep:
            return None
        pairs = zip(self.images, self.tables, strict=True)
        rows = [(table, places) for one, table in pairs for places in _find_rows(one, table)]
        has_value = np.concatenate([places != LACKING for _, places in rows])
        values = [table.column(self.keep)[places[places != LACKING]] for table, places in rows]
        if len({each.dtype for each in values}) > 1:  # Python compares them without rounding
            values = [each.astype(object) for each in values]
        ranks = np.zeros(len(has_value), np.int64)
        ranks[has_value] = np.unique(np.concatenate(values), return_inverse=True)[1] + 1
        return ranks


def find_compared(
    images: Sequence[ImagesLooked], join: Sequence[str], where: str, keep: str
) -> ComparedSamples:
    """Return the samples that meet `where`, and the joined tables with the column `keep`.

    Without `where` all samples are compared. Raise UsageError if a dataset has no joined table with
    the column `keep`.
    """
    if not (where or keep):
        return ComparedSamples()
    places = match_places([(one.place, one.manifest) for one in images], join)
    pairs = [*zip(images, places, strict=True)]
    tables = tuple(_find_table(keep, one, own) for one, own in pairs if keep)
    masks: list[NDArray[np.bool_]] = []
    for one, own in pairs if where else ():
        if subset := select_samples(one.place, own, where):
            masks += _mark_compared(one, subset)
    return ComparedSamples(
        images=images,
        is_compared=np.concatenate(masks) if where else None,
        keep=keep,
        tables=tables,
    )


def _mark_compared(images: ImagesLooked, subset: Subset) -> Iterator[NDArray[np.bool_]]:
    """Yield a mask for each shard: which of its samples meet the condition."""
    per_shard = subset.selection(None).per_shard()
    names = subset.whole.files.names
    numbers = {name: samples.numbers for name, samples in zip(names, per_shard, strict=True)}
    for unit in images.units:
        mask = np.zeros(unit.shard.samples, np.bool_)
        mask[numbers[unit.shard.name]] = True
        yield mask


def _find_table(column: str, images: ImagesLooked, places: Sequence[str]) -> KeyedTable:
    """Return the one of the joined tables that has a column, with no other column."""
    subset = select_samples(images.place, places, "", columns=[column])
    tables = subset.tables if subset else ()
    found = next((table for table in tables if column in table.columns), None)
    if found is None:
        there = examples([name for table in tables for name in table.offered]) or "none"
        raise UsageError(
            f"--join has no column of numbers {column} for {images.shown}, only {there}: give "
            "--keep one of these, or --join another place"
        )
    return found


def _find_rows(images: ImagesLooked, table: KeyedTable) -> Iterator[Ints]:
    """Yield for each shard the rows that its samples have in the table."""
    for keys in images.each("key"):
        yield table.find_rows(keys["key"].to_pylist())
