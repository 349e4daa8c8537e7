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
    def values(self) -> NDArray[np.float64] | None:
        """Return each sample's value in the column `keep`, or None if no column was asked for.

        A sample without a value has -inf.
        """
        if not self.keep:
            return None
        each = zip(self.images, self.tables, strict=True)
        found = (values for one, table in each for values in _read_values(one, table, self.keep))
        return np.concatenate([*found])


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
    each = [
        (one, select_samples(one.place, own, where))
        for one, own in zip(images, places, strict=True)
    ]
    tables = [_find_table(keep, one.shown, subset) for one, subset in each if keep]
    masks = [
        mask for one, subset in each if where and subset for mask in _mark_compared(one, subset)
    ]
    return ComparedSamples(
        images=images,
        is_compared=np.concatenate(masks) if where else None,
        keep=keep,
        tables=tuple(tables),
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


def _find_table(column: str, shown: str, subset: Subset | None) -> KeyedTable:
    tables = subset.tables if subset else ()
    found = next((table for table in tables if column in table.columns), None)
    if found is None:
        there = examples([name for table in tables for name in table.columns]) or "none"
        raise UsageError(
            f"--join has no column of numbers {column} for {shown}, only {there}: give --keep one "
            "of these, or --join another place"
        )
    return found


def _read_values(
    images: ImagesLooked, table: KeyedTable, column: str
) -> Iterator[NDArray[np.float64]]:
    """Yield for each shard the values that its samples have in a column of the table.

    Samples that are not in the table have -inf.
    """
    numbers = table.column(column)
    for keys in images.each("key"):
        places = table.find_rows(keys["key"].to_pylist())
        found = numbers[places].astype(np.float64)
        found[places == LACKING] = -np.inf
        yield found
