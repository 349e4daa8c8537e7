"""Groups of copies to show side by side, from the table that `wdsprep duplicates --table` wrote.

Groups whose copies differ most from the image that stays come first: whoever sees that these are
copies need not doubt the others.
"""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from wdsprep.dataset.thread_map import read_each
from wdsprep.errors import FormatError, UsageError
from wdsprep.reporting.facts.datasets import Datasets, ReportDataset
from wdsprep.reporting.sheet.items import SheetItem, facts_of_image, open_picture, unread_item
from wdsprep.reporting.sheet.picking import SheetSample, place_of, read_sample
from wdsprep.store import split_url
from wdsprep.text import command

GROUPS, COPIES = 8, 3
"""The most groups that are shown, and the most copies of each beside the image that stays."""
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyGroup:
    """A group of copies: the image that stays, then some of its copies.

    `copies` counts all of its copies, whether they are shown or not.
    """

    items: tuple[SheetItem, ...]
    copies: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownCopies:
    """The groups of copies that a report shows.

    `total` counts all groups whose remaining image is in the dataset.
    """

    groups: tuple[CopyGroup, ...]
    total: int
    table: str


def choose_copies(
    datasets: Datasets, table: str, max_area: int, heard: Callable[[str], None]
) -> ShownCopies:
    """Read a table of copies, and return up to 8 groups whose copies differ most, with pictures.

    A group shows the image that stays and up to 3 copies. An image of more than `max_area` pixels
    has a note in place of a picture. `heard` gets a line before the table is read. Raise UsageError
    if no dataset of images is given, or if the table lists other samples.
    """
    images = datasets.images
    if images is None:
        raise UsageError("--duplicates shows images: give the dataset of images too")
    heard(f"reading {table}")
    found = _Table(table, images)
    groups = tuple(_group(images, found, rows, max_area) for rows in found.choose_groups())
    return ShownCopies(groups=groups, total=len(found.stays), table=table)


class _Table:
    """A table of copies: the numbers of its rows that are in groups, and what it states of them."""

    def __init__(self, url: str, images: ReportDataset) -> None:
        self._url, self._images = url, images
        parts = [
            (first, *(batch.column(name).to_numpy() for name in ("group", "duplicate", "distance")))
            for first, batch in self._batches("group", "duplicate", "distance")
        ]
        of_all = [np.concatenate([part[at] for part in parts]) for at in (1, 2, 3)]
        if len(of_all[0]) != images.samples:
            raise self._mismatch()
        self.rows = np.flatnonzero(of_all[0])
        self._group, self._duplicate, self.distance = (column[self.rows] for column in of_all)
        is_copy = self._duplicate > 0
        self.stays = self.rows[~is_copy & np.isin(self._group, self._group[is_copy])]

    def choose_groups(self) -> Iterator[Ints]:
        """Yield up to 8 groups of copies as indices of `rows`, those that differ most first.

        The first index of a group is that of the image that stays. A group is left out unless this
        dataset has both that image and a copy of it.
        """
        order = np.lexsort((self.rows, -self.distance, self._duplicate > 0, self._group))
        starts = np.flatnonzero(np.diff(self._group[order], prepend=-1))
        every = [some for some in np.split(order, starts[1:]) if self._has_original(some)]
        every.sort(key=lambda some: -int(self.distance[some].max()))
        yield from every[:GROUPS]

    def _has_original(self, some: Ints) -> bool:
        """Return whether this dataset has the remaining image of a group, and a copy of it."""
        return len(some) > 1 and not self._duplicate[some[0]]

    def describe(self, place: int) -> str:
        if not self._duplicate[place]:
            return "it stays"
        is_equal = self._duplicate[place] == 2
        return "equal to the byte" if is_equal else f"{self.distance[place]} of 64 bits differ"

    def key(self, row: int) -> str:
        for first, batch in self._batches("key"):
            if row < first + len(batch):
                return str(batch.column("key")[row - first])
        raise self._mismatch()

    def check(self, row: int, sample: SheetSample) -> None:
        """Raise UsageError if a sample does not have the key that its row states."""
        if not sample.problem and sample.key != self.key(row):
            raise self._mismatch()

    def _batches(self, *names: str) -> Iterator[tuple[int, pa.RecordBatch]]:
        first = 0
        store, name = split_url(self._url)
        try:
            # opened by Python: Arrow opens no path that is not UTF-8
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
                f"--duplicates {self._url} is not a table of copies: give the file that wdsprep "
                "duplicates --table has written"
            ) from error

    def _mismatch(self) -> UsageError:
        """Return the error for a table of other samples than the dataset has."""
        again = command("duplicates", self._images.shown)
        return UsageError(
            f"--duplicates {self._url} lists other samples than {self._images.shown} has now: "
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
        _item(sample, table.describe(place), max_area)
        for sample, place in zip(samples, some, strict=True)
    )
    return CopyGroup(items=tuple(items), copies=len(places) - 1)


def _item(sample: SheetSample, describe: str, max_area: int) -> SheetItem:
    if sample.problem:
        return unread_item("copies", sample)
    _, picture = open_picture(sample, max_area)
    return SheetItem(
        group="copies",
        key=sample.key,
        caption=sample.member("txt").decode("utf-8", "replace"),
        facts=facts_of_image(sample.facts),
        pictures=(replace(picture, title=describe),),
    )
