"""`duplicates`: which images of datasets are copies of others, equal or nearly.

1. Each image shard is read once, on any number of workers, and what its pictures look like is kept
   in a file of its own (`image_hashes`): a run that was killed goes on, a later one reads these
   files alone, and a shard that was packed anew is looked at again.
2. Samples that do not meet `where` are left out (`select_and_rank`). The others stand in an order
   of who is to be kept: the highest value of the column `keep` first, then more pixels, then as the
   datasets are named and as they lie there, which is by key. Those of one hash are one thing, whose
   best sample stands for them. `near_duplicates` finds all pairs of things within a distance.
   Whole samples have a hash for each of their images, and are near if each of these is near its
   counterpart: of the pairs whose targets are near, those are left in which all others are too.
3. From the best thing on, each stays unless it is near one that stays already; if it is, it goes
   with the best such one. So a *group* is what is near the one that stays, not near each other: of
   a chain A~B~C, where A is the best, B goes with A, and C stays if it is not near A. No two that
   stay are near each other, and each that goes is near one that stays.
4. Pictures without a hash (next to no detail, or damaged) are copies only of what has the same
   bytes: the digest of these stands in place of the hash. A copy is *equal* if it has the bytes of
   the one that stays, else *near*.
5. What may go leaves as a list of keys, which `wdsprep remove --keys` takes, and as a table of all
   samples that were compared, which `join=` and `where=` of a loader take.

A sample is the number of its row: dataset after dataset, shard after shard, in the order of each.
All is done in arrays, since there may be 100 million of them. Memory is 12 bytes a sample for
hashes and sizes, 8 for their order, 8 for each hash that is there once, and as many for each sort
that is done at once: 5 GB in all for 100 million samples. Values of a column are 8 bytes more, and
further images of whole samples 25 each.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from wdsprep.changes.image_hashes import (
    HashedImages,
    HashUnit,
    hash_shard,
    hashes_folder,
    select_and_rank,
)
from wdsprep.changes.near_duplicates import Hashes, choose_kept, find_near_pairs
from wdsprep.changes.options import DuplicatesOptions
from wdsprep.dataset.damage import verify_step
from wdsprep.errors import NotFoundError, UsageError
from wdsprep.images.perceptual_hash import NO_HASH
from wdsprep.options import Place, as_places, takes_datasets
from wdsprep.runners.make_runner import Job
from wdsprep.store import split_url
from wdsprep.store.base import Sink, SinkFile, absolute, absolute_places
from wdsprep.store.schemes import place_scheme
from wdsprep.text import Counting

Rows = NDArray[numpy.int64]
Mask = NDArray[numpy.bool_]
MOST_PIXELS = 0xFFFFFFFF
PAIRS_AT_ONCE = 1 << 24
SHOWN_GROUPS, SHOWN_COPIES = 5, 10
NEAR, EQUAL = 1, 2
"""What the column `duplicate` has of a copy, and 0 of a sample that stays."""
NUMBER = "{number}"
START_NBYTES = 4096
LIST_OF_KEYS, PARQUET = re.compile(rb"(\S*\d\n)+"), re.compile(rb"PAR1")
"""How a list of copies and a table of them begin: other files are not replaced."""
_TABLE = pa.schema({
    "key": pa.string(), "duplicate": pa.int8(), "distance": pa.int8(),
    "group": pa.int64(), "hash": pa.int64(),
})  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedSample:
    """A sample of a group of copies.

    `distance` is the number of bits in which its hash differs from that of the sample that stays.
    `is_equal` is true if both have the same bytes.
    """

    dataset: str
    key: str
    width: int
    height: int
    distance: int
    is_equal: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DuplicateGroup:
    """A group of copies: the sample that stays, the number of its copies, and the first of them."""

    stays: CopiedSample
    count: int
    copies: tuple[CopiedSample, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Duplicates:
    """The result of a search: how many samples were compared, how many may go, the largest groups.

    `flat` have too little detail for a hash, and `damaged` cannot be read.
    """

    datasets: tuple[str, ...]
    distance: int
    samples: int
    equal: int
    near: int
    groups: int
    flat: int
    damaged: int
    largest: tuple[DuplicateGroup, ...]
    output: tuple[str, ...]
    table: tuple[str, ...]
    complete: bool

    def __repr__(self) -> str:
        return (
            f"<Duplicates {', '.join(map(repr, self.datasets))}: {self.equal:,} equal and "
            f"{self.near:,} near of {self.samples:,} samples>"
        )


@takes_datasets(DuplicatesOptions)
def duplicates(datasets: Sequence[Place], options: DuplicatesOptions) -> Duplicates:
    """Find images of `datasets` that are equal, or look alike within `distance` bits of 64.

        found = wdsprep.duplicates("shards/images", output="copies.txt")
        found.equal, found.near, found.largest

    The keys of the copies go into the file `output`, one a line; with several datasets `{number}`
    in it says of which, from 1 on. `table` is a Parquet file of all samples, for `join` and `where`
    of a loader. Of copies the one with the highest value in the column `keep` stays, and samples
    that do not meet `where` are not compared: both may name columns of `join`, such as scores.
    `role` names the image of each sample that is compared, in place of the target; with `all` whole
    samples are. What the pictures look like is kept in the folder `hashes`, beside each dataset
    unless given. The datasets are not changed.
    """
    listener = options.listener_or_mute
    places = [os.fspath(url) for url in datasets]
    images = _opened(places, os.fspath(options.hashes), options.role)
    join = [os.fspath(place) for place in as_places(options.join)]
    lists, tables = name_files(images, os.fspath(options.output), os.fspath(options.table))
    with ExitStack() as stack:
        # Opened before the search, so that a place that cannot be written to is known early.
        sinks = [stack.enter_context(store.write(name)) for store, name in map(split_url, lists)]
        writers = [
            stack.enter_context(pq.ParquetWriter(SinkFile(stack.enter_context(sink)), _TABLE))
            for sink in (store.write(name) for store, name in map(split_url, tables))
        ]
        is_compared, ranks = select_and_rank(images, join, options.where, options.keep)
        _look(images, options)
        copies = Copies(images, is_compared, ranks)
        copies.find(options.distance, listener.on_comparison)
        write_copies(images, copies, sinks, writers)
    return Duplicates(
        datasets=tuple(dataset.shown for dataset in images),
        distance=options.distance,
        samples=copies.samples,
        equal=int((copies.duplicate == EQUAL).sum()),
        near=int((copies.duplicate == NEAR).sum()),
        groups=len(copies.stays),
        flat=copies.flat,
        damaged=copies.damaged,
        largest=tuple(largest_groups(images, copies)),
        output=lists,
        table=tables,
        complete=all(dataset.manifest.complete for dataset in images),
    )


def _opened(shown: Sequence[str], hashes: str, role: str) -> list[HashedImages]:
    if not shown:
        raise UsageError("nothing to compare: give a dataset of images")
    places = absolute_places(shown)
    lasts = [url.rstrip("/").rpartition("/")[2] for url in places]
    if hashes and len(set(lasts)) < len(lasts):
        raise UsageError(
            f"--hashes {hashes}: two datasets have the same last name ({', '.join(lasts)}), and "
            "would be kept in one folder: leave --hashes out, or give it for one dataset at a time"
        )
    kept = [
        f"{absolute(hashes)}/{last}" if hashes else hashes_folder(place)
        for place, last in zip(places, lasts, strict=True)
    ]
    for url in kept:
        is_inside = any(f"{url}/".startswith(f"{place}/") for place in places)
        if is_inside or place_scheme(url) == "hf":
            why = "it is inside a dataset" if is_inside else "the hub is only read"
            raise UsageError(
                f"{url} cannot hold the hashes, as {why}: give another folder with --hashes"
            )
    return [HashedImages(*names, role) for names in zip(places, shown, kept, strict=True)]


def _look(images: Sequence[HashedImages], options: DuplicatesOptions) -> None:
    """Compute the hashes of each shard that has none yet, and keep them.

    Raise WorkError at the end if a shard failed.
    """
    units = [unit for dataset in images for unit in dataset.missing()]
    if not units:
        return
    samples = 0

    def counts() -> dict[str, int]:
        return {"samples": samples}

    job = Job(options, hash_shard, units, name="duplicates", counts=counts)
    with closing(job):
        for unit, _ in job.results():
            samples += unit.shard.samples
    step = f"run the same command again, or {verify_step(*(dataset.shown for dataset in images))}"
    job.check_all_done("looked at", step)


# --- the search
class Copies:
    """The copies among the samples of some datasets of images.

    `is_compared` says which samples are compared, or is None if all are. `ranks` decide first which
    of several copies stays, if there are any.

    After `find`, `rows` are the copies that may go, in rising order, and `stays` all rows that stay
    for others. The columns `duplicate`, `distance` and `group` of the table have a value for each
    sample.
    """

    def __init__(
        self, images: Sequence[HashedImages], is_compared: Mask | None, ranks: Rows | None
    ) -> None:
        self._images, self.is_compared, self._ranks = images, is_compared, ranks
        names = ("hash", "content", "width", "height")
        tables = [table for dataset in images for table in dataset.each(*names)]
        self._pixels = numpy.concatenate(list(map(_pixels, tables)))
        hashes = _by_image(tables, "hash")
        self._is_flat = [of_image == NO_HASH for of_image in hashes]
        by_image = zip(self._is_flat, _by_image(tables, "content"), hashes, strict=True)
        self._hashes = [numpy.where(*of_image).view(numpy.uint64) for of_image in by_image]
        chosen = slice(None) if is_compared is None else is_compared
        pixels = self._pixels[chosen]
        self.samples, self.damaged = len(pixels), int((pixels == 0).sum())
        self.flat = int(self._is_flat[0][chosen].sum()) - self.damaged

    def find(self, distance: int, on_count: Counting) -> None:
        """Find the samples that may go, each with the sample that stays for it.

        `distance` is the most bits in which two hashes of copies differ, and `on_count` gets the
        number of sorts done and of all. This can be called only once, as it frees the hashes.
        """
        order = numpy.lexsort((*self._sort_keys(), *reversed(self._hashes)))
        if self.is_compared is not None:
            order = order[self.is_compared[order]]
        starts = _run_starts(*(hashes[order] for hashes in self._hashes))
        best = order[starts]
        distinct = [hashes[best] for hashes in self._hashes]
        del self._hashes
        stays = self._choose_things(distinct, best, distance, on_count)
        goes = numpy.ones(len(order), bool)
        goes[starts[stays == numpy.arange(len(stays))]] = False  # the first rows of those that stay
        places = numpy.flatnonzero(goes)
        rows, at = order[places], numpy.searchsorted(starts, places, side="right") - 1
        stay = best[stays[at]]
        bits = numpy.zeros(len(at), numpy.uint8)
        for hashes in distinct:
            numpy.maximum(bits, numpy.bitwise_count(hashes[at] ^ hashes[stays[at]]), out=bits)
        del order, starts, best, distinct, stays, at, goes, places
        tables = [table for dataset in self._images for table in dataset.each("content")]
        is_equal = numpy.ones(len(rows), bool)
        for content in _by_image(tables, "content"):
            is_equal &= content[rows] == content[stay]
        self.rows, self.stays = numpy.sort(rows), numpy.unique(stay)
        self.duplicate, self.distance = numpy.zeros((2, len(self._pixels)), numpy.int8)
        self.duplicate[rows] = numpy.where(is_equal, EQUAL, NEAR)
        self.distance[rows] = bits
        self.group = numpy.zeros(len(self._pixels), numpy.int64)
        self.group[self.stays] = numpy.arange(len(self.stays)) + 1
        self.group[rows] = self.group[stay]

    def _choose_things(
        self, distinct: Sequence[Hashes], best: Rows, distance: int, on_count: Counting
    ) -> Rows:
        """Return for each thing the number of the thing that stays: this one, or a near one.

        `distinct` has the hashes of each role, first those of targets, by which things are sorted.
        `best` has the row of the best sample of each thing.
        """
        is_flat = [of_image[best] for of_image in self._is_flat]
        pairs = _find_near_things(distinct, is_flat, distance, on_count)
        paired, places = numpy.unique(numpy.concatenate(pairs), return_inverse=True)
        by_rank = numpy.lexsort((best[paired], *self._sort_keys(best[paired])))
        rank = numpy.empty(len(paired), numpy.int64)
        rank[by_rank] = numpy.arange(len(paired))
        better, worse = numpy.sort(rank[places].reshape(2, -1), axis=0)
        kept = choose_kept(better, worse, len(paired))
        stays = numpy.arange(len(best))
        stays[paired[by_rank]] = paired[by_rank[kept]]
        return stays

    def _sort_keys(self, rows: Rows | slice = slice(None)) -> tuple[NDArray[Any], ...]:
        """Return keys for `lexsort` that put the row to be kept first; the last key weighs most."""
        pixels, ranks = self._pixels[rows], self._ranks
        return (~pixels,) if ranks is None else (~pixels, -ranks[rows])


def _by_image(tables: Sequence[pa.Table], part: str) -> list[Rows]:
    """Return the columns of one `part`, `hash` or `content`, of all tables: the target's first.

    0 stands for an image that a sample does not have.
    """
    names = {name for table in tables for name in table.column_names}
    return [
        numpy.concatenate(
            [
                table[name].to_numpy()
                if name in table.column_names
                else numpy.zeros(len(table), numpy.int64)
                for table in tables
            ]
        )
        for name in sorted(names)
        if name.partition(".")[0] == part
    ]


def _find_near_things(
    distinct: Sequence[Hashes], is_flat: Sequence[Mask], distance: int, on_count: Counting
) -> tuple[Rows, Rows]:
    """Return the pairs of things (images, or samples of several) that are near in each role.

    `distinct` has the hashes of each role, first those of targets, by which things are sorted. An
    image that is flat is near only what has the same bytes.
    """
    targets = distinct[0]
    if len(distinct) == 1:
        candidates = iter([find_near_pairs(targets, distance, on_count)])
    else:
        starts = _run_starts(targets)
        pairs = find_near_pairs(targets[starts], distance, on_count)
        candidates = _pairs_in_runs(numpy.append(starts, len(targets)), *pairs)
    near = []
    for first, second in candidates:
        is_near = numpy.ones(len(first), bool)
        for hashes, flat in zip(distinct, is_flat, strict=True):
            most = numpy.where(flat[first] | flat[second], 0, distance)
            is_near &= numpy.bitwise_count(hashes[first] ^ hashes[second]) <= most
        near.append((first[is_near], second[is_near]))
    first, second = (numpy.concatenate(places) for places in zip(*near, strict=True))
    return first, second


def _pairs_in_runs(bounds: Rows, first: Rows, second: Rows) -> Iterator[tuple[Rows, Rows]]:
    """Yield the pairs of places in two runs that are a pair, or in one run. Yield many at a time.

    `bounds` are the starts of the runs, and the end of the last. `first` and `second` have the
    numbers of the runs of each pair.
    """
    sizes = numpy.diff(bounds)
    several = numpy.flatnonzero(sizes > 1)
    first, second = numpy.append(first, several), numpy.append(second, several)
    counts = sizes[first] * sizes[second]
    parts = numpy.array_split(numpy.arange(len(counts)), 1 + int(counts.sum()) // PAIRS_AT_ONCE)
    for part in parts:
        pair = numpy.repeat(part, counts[part])
        before = numpy.cumsum(counts[part]) - counts[part]
        number = numpy.arange(len(pair)) - numpy.repeat(before, counts[part])
        row, column = numpy.divmod(number, sizes[second[pair]])
        left, right = bounds[first[pair]] + row, bounds[second[pair]] + column
        is_new = (first != second)[pair] | (left < right)
        yield left[is_new], right[is_new]


def _pixels(table: pa.Table) -> NDArray[numpy.uint32]:
    area = table["width"].to_numpy().astype(numpy.int64) * table["height"].to_numpy()
    pixels: NDArray[numpy.uint32] = numpy.minimum(area, MOST_PIXELS).astype(numpy.uint32)
    return pixels


def _run_starts(*rising: Hashes) -> Rows:
    """Return the places at which runs of equal values begin, in any of the arrays."""
    is_first = numpy.zeros(len(rising[0]), bool)
    is_first[:1] = True
    for values in rising:
        is_first[1:] |= values[1:] != values[:-1]
    return numpy.flatnonzero(is_first)


def _spans(images: Sequence[HashedImages]) -> list[tuple[int, HashUnit, int, int]]:
    """Return each shard with the number of its dataset, its first row and the row behind it."""
    units = [(number, unit) for number, dataset in enumerate(images) for unit in dataset.units]
    ends = accumulate((unit.shard.samples for _, unit in units), initial=0)
    return [(*unit, *rows) for unit, rows in zip(units, pairwise(ends), strict=True)]


def largest_groups(images: Sequence[HashedImages], copies: Copies) -> Iterator[DuplicateGroup]:
    """Yield a few groups: those with the most copies, the largest first.

    Of the copies of a group only the first few are listed.
    """
    spans = _spans(images)

    def sample(row: int) -> CopiedSample:
        number, unit, start, _ = next(span for span in spans if row < span[3])
        dataset = images[number]
        facts = dataset.columns(unit, "key", "width", "height").slice(row - start, 1).to_pylist()[0]
        return CopiedSample(
            dataset=dataset.shown,
            distance=int(copies.distance[row]),
            is_equal=bool(copies.duplicate[row] != NEAR),
            **facts,
        )

    groups = copies.group[copies.rows]
    counts = numpy.bincount(groups, minlength=1)[1:]
    for number in numpy.argsort(-counts, kind="stable")[:SHOWN_GROUPS].tolist():
        rows = copies.rows[groups == number + 1].tolist()
        shown = tuple(map(sample, rows[:SHOWN_COPIES]))
        stays = sample(int(copies.stays[number]))
        yield DuplicateGroup(stays=stays, count=len(rows), copies=shown)


# --- files
def name_files(
    images: Sequence[HashedImages], output: str, table: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the places of the lists of keys, and of the tables, one of each for each dataset.

    Raise UsageError for a name that does not fit, such as one file for several datasets, or that a
    file has which is no such list or table.
    """
    for option, url in (("-o", output), ("--table", table)):
        if len(images) > 1 and url and NUMBER not in url:
            raise UsageError(
                f"{option} {url} is one file for {len(images)} datasets, each of which needs "
                f"its own: put {NUMBER} into the name"
            )
        for dataset in images:
            if url and absolute(url).startswith((f"{dataset.place}/", f"{dataset.kept.url}/")):
                raise UsageError(
                    f"{option} {url} lies in {dataset.shown}: give a file outside of it"
                )
    if (table and not table.endswith(".parquet")) or output.endswith(".parquet"):
        raise UsageError(
            "-o is a list of keys, and --table a Parquet file: give names such as copies.txt and "
            "copies.parquet"
        )
    lists, tables = (
        tuple(name.replace(NUMBER, str(n)) for n in range(1, len(images) + 1) if name)
        for name in (output, table)
    )
    for url, ours in (*((url, LIST_OF_KEYS) for url in lists), *((url, PARQUET) for url in tables)):
        store, name = split_url(url)
        start = b""
        with suppress(NotFoundError):
            start = store.read(name, nbytes=START_NBYTES)
        if start and not ours.match(start):
            raise UsageError(f"{url} exists already, and is no list of copies: give another name")
    return lists, tables


def write_copies(
    images: Sequence[HashedImages],
    copies: Copies,
    lists: Sequence[Sink],
    tables: Sequence[pq.ParquetWriter],
) -> None:
    """Write the keys of the copies in each dataset, and a table of all its samples."""
    for number, unit, start, end in _spans(images):
        columns = images[number].columns
        duplicate = copies.duplicate[start:end]
        if lists and duplicate.any():
            keys = columns(unit, "key")["key"].filter(pa.array(duplicate > 0)).to_pylist()
            lists[number].write("".join(f"{key}\n" for key in keys).encode())
        if tables:
            kept = columns(unit, "key", "hash")
            distance, group = copies.distance[start:end], copies.group[start:end]
            parts = [kept["key"], duplicate, distance, group, kept["hash"]]
            table = pa.table(parts, schema=_TABLE)
            if copies.is_compared is not None:
                table = table.filter(pa.array(copies.is_compared[start:end]))
            tables[number].write_table(table)
