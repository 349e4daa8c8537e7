"""Groups of copies side by side, as `wdsprep duplicates --table` has written them down.

Those come first whose copies differ most from the one that stays: who sees that these are copies
need not doubt the others.
"""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from wdsprep.dataset.read_ahead import read_each
from wdsprep.errors import FormatError, UsageError
from wdsprep.reporting.facts.datasets import Datasets, ReportDataset
from wdsprep.reporting.sheet.items import SheetItem, facts_of_image, opened_image, unread
from wdsprep.reporting.sheet.picking import SheetSample, place_of, read_sample
from wdsprep.store import split_url
from wdsprep.text import command

GROUPS, COPIES = 8, 3
"""The groups that are shown, and the copies of each beside the one that stays."""
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyGroup:
    """The one that stays, with some of its copies, of which there are so many."""

    items: tuple[SheetItem, ...]
    copies: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownCopies:
    """The groups that are shown, of so many in which one of these images stays."""

    groups: tuple[CopyGroup, ...]
    total: int
    table: str


def copies_shown(
    datasets: Datasets, table: str, max_area: int, heard: Callable[[str], None]
) -> ShownCopies:
    images = datasets.images
    if images is None:
        raise UsageError("--duplicates shows images: name the dataset of images, too")
    heard(f"reading {table}")
    found = _Table(table, images)
    groups = tuple(_group(images, found, rows, max_area) for rows in found.chosen())
    return ShownCopies(groups=groups, total=len(found.stays), table=table)


class _Table:
    """The numbers of rows that are in groups, with what is said of them."""

    def __init__(self, url: str, images: ReportDataset) -> None:
        self._url, self._images = url, images
        parts = [
            (first, *(batch.column(name).to_numpy() for name in ("group", "duplicate", "distance")))
            for first, batch in self._batches("group", "duplicate", "distance")
        ]
        of_all = [np.concatenate([part[at] for part in parts]) for at in (1, 2, 3)]
        if len(of_all[0]) != images.samples:
            raise self._other()
        self.rows = np.flatnonzero(of_all[0])
        self._group, self._duplicate, self.distance = (column[self.rows] for column in of_all)
        is_copy = self._duplicate > 0
        self.stays = self.rows[~is_copy & np.isin(self._group, self._group[is_copy])]

    def chosen(self) -> Iterator[Ints]:
        """Yield the rows of some groups of copies. In each the one that stays comes first."""
        order = np.lexsort((self.rows, -self.distance, self._duplicate > 0, self._group))
        starts = np.flatnonzero(np.diff(self._group[order], prepend=-1))
        every = [some for some in np.split(order, starts[1:]) if self._has_both(some)]
        every.sort(key=lambda some: -int(self.distance[some].max()))
        yield from every[:GROUPS]

    def _has_both(self, some: Ints) -> bool:
        """Return whether a group has its original here. It may be in another dataset."""
        return len(some) > 1 and not self._duplicate[some[0]]

    def how(self, place: int) -> str:
        if not self._duplicate[place]:
            return "it stays"
        is_equal = self._duplicate[place] == 2
        return "equal to the byte" if is_equal else f"{self.distance[place]} of 64 bits differ"

    def key(self, row: int) -> str:
        for first, batch in self._batches("key"):
            if row < first + len(batch):
                return str(batch.column("key")[row - first])
        raise self._other()

    def check(self, row: int, sample: SheetSample) -> None:
        if not sample.problem and sample.key != self.key(row):
            raise self._other()

    def _batches(self, *names: str) -> Iterator[tuple[int, pa.RecordBatch]]:
        first = 0
        store, name = split_url(self._url)
        try:
            # a file of ours: Arrow opens no path that is not UTF-8
            root = store.root
            given = (root / name).open("rb") if root else io.BytesIO(store.read(name))
            with given, pq.ParquetFile(given) as file:
                for batch in file.iter_batches(columns=list(names), use_threads=False):
                    if batch.schema.names != list(names):
                        raise KeyError(names)
                    yield first, batch
                    first += len(batch)
        except (pa.ArrowException, KeyError, OSError) as error:
            raise FormatError(
                f"--duplicates {self._url}: no table of copies: give the file that wdsprep "
                "duplicates --table has written"
            ) from error

    def _other(self) -> UsageError:
        again = command("duplicates", self._images.shown)
        return UsageError(
            f"--duplicates {self._url} is of other samples than {self._images.shown} has now: "
            f"run {again} with --table again"
        )


def _group(images: ReportDataset, table: _Table, places: Ints, max_area: int) -> CopyGroup:
    some = places[: 1 + COPIES].tolist()
    shards = images.manifest.shards
    ends = list(accumulate(shard.samples for shard in shards))
    rows = [int(table.rows[place]) for place in some]
    where = [place_of(shards, ends, row) for row in rows]
    store = images.store
    samples = read_each(lambda place: read_sample(store, place), where, store.readers)
    for row, sample in zip(rows, samples, strict=True):
        table.check(row, sample)
    items = (
        _item(sample, table.how(place), max_area)
        for sample, place in zip(samples, some, strict=True)
    )
    return CopyGroup(items=tuple(items), copies=len(places) - 1)


def _item(sample: SheetSample, how: str, max_area: int) -> SheetItem:
    if sample.problem:
        return unread("copies", sample)
    _, picture = opened_image(sample, max_area)
    return SheetItem(
        group="copies",
        key=sample.key,
        caption=sample.member("txt").decode("utf-8", "replace"),
        facts=facts_of_image(sample.facts),
        pictures=(replace(picture, title=how),),
    )
