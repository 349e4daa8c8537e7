"""The samples that `duplicates` compares, and the values by which it chooses between copies.

Both may come from columns of scores and tables, which are laid out in the order of the samples, so
no image shard is read for them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsprep.changes.image_hashes import ImagesLooked
from wdsprep.changes.joined_columns import match_places, select_samples
from wdsprep.errors import UsageError
from wdsprep.loading.where import Subset
from wdsprep.text import examples


@dataclass(frozen=True, kw_only=True)
class ComparedSamples:
    """A choice among the samples of all datasets, in their order.

    `is_compared` says which samples are compared; it is None if all are. For each dataset, `kept`
    says which samples have a value in the column `keep`, and has these values.
    """

    is_compared: NDArray[np.bool_] | None = None
    keep: str = ""
    kept: tuple[tuple[NDArray[np.bool_], NDArray[Any]], ...] = ()

    @cached_property
    def ranks(self) -> NDArray[np.int64] | None:
        """Return each sample's rank by the column `keep`, or None if no column was asked for.

        Equal values have equal ranks, a higher value a higher rank, and no value has rank 0.
        """
        if not self.keep:
            return None
        has_value = np.concatenate([has_row for has_row, _ in self.kept])
        values = [values for _, values in self.kept]
        if len({each.dtype for each in values}) > 1:  # Python compares them without rounding
            values = [each.astype(object) for each in values]
        ranks = np.zeros(len(has_value), np.int64)
        ranks[has_value] = np.unique(np.concatenate(values), return_inverse=True)[1] + 1
        return ranks


def find_compared(
    images: Sequence[ImagesLooked], join: Sequence[str], where: str, keep: str
) -> ComparedSamples:
    """Return the samples that meet `where`, and the values of the joined column `keep`.

    Without `where` all samples are compared. Raise UsageError if a dataset has no joined table with
    the column `keep`.
    """
    if not (where or keep):
        return ComparedSamples()
    places = match_places([(one.place, one.manifest) for one in images], join)
    pairs = [*zip(images, places, strict=True)]
    kept = tuple(_find_values(keep, one, own) for one, own in pairs if keep)
    masks: list[NDArray[np.bool_]] = []
    for one, own in pairs if where else ():
        masks += _mark_compared(one, select_samples(one.place, own, where))
    return ComparedSamples(
        is_compared=np.concatenate(masks) if where else None,
        keep=keep,
        kept=kept,
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


def _find_values(
    column: str, images: ImagesLooked, places: Sequence[str]
) -> tuple[NDArray[np.bool_], NDArray[Any]]:
    """Return which samples have a value in a column of a joined table, and these values."""
    subset = select_samples(images.place, places, "", columns=[column])
    table = next((table for table in subset.tables if column in table.numbers), None)
    if table is None:
        there = examples([name for table in subset.tables for name in table.offered]) or "none"
        raise UsageError(
            f"--join has no column of numbers {column} for {images.shown}, only {there}: give "
            "--keep one of these, or --join another place"
        )
    shards = {name: shard for shard, name in enumerate(subset.whole.files.names)}
    rows = [table.rows_of(shards[unit.shard.name]) for unit in images.units]
    has_row = np.concatenate([np.empty(0, np.bool_), *(table.has_row[some] for some in rows)])
    values = np.concatenate(
        [table.column(column)[:0], *(table.column(column)[some] for some in rows)]
    )
    return has_row, values[has_row]
