"""Groups of duplicate images, and the files that list them.

A sample is the number of its row: dataset after dataset, shard after shard, in the order of each.
All is done in arrays, since there may be 100 million of them.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from wdsprep.changes.image_hashes import ComparedSamples, HashUnit, ImagesLooked
from wdsprep.changes.near_duplicates import bits_set, choose_kept, find_near_pairs
from wdsprep.errors import UsageError
from wdsprep.images.perceptual_hash import NO_HASH
from wdsprep.store import split_url
from wdsprep.store.base import Sink, absolute
from wdsprep.text import Counting

Rows = NDArray[numpy.int64]
MOST_PIXELS = 0xFFFFFFFF
SHOWN_GROUPS, SHOWN_COPIES = 5, 10
NUMBER = "{number}"
_TABLE = pa.schema(
    [
        ("key", pa.string()),
        ("duplicate", pa.int8()),
        ("distance", pa.int8()),
        ("group", pa.int64()),
        ("hash", pa.int64()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Copies:
    """The rows of copies that may go, in rising order, each with the row that stays for it.

    `bits` are the numbers of bits in which they differ, and `equal` whether they have the same
    bytes. `stays` are all rows that stay for others.
    """

    rows: Rows
    stay: Rows
    bits: NDArray[numpy.int8]
    equal: NDArray[numpy.bool_]
    stays: Rows


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


class CopySearch:
    """The search for copies among the compared samples of some datasets of images."""

    def __init__(self, images: Sequence[ImagesLooked], compared: ComparedSamples) -> None:
        self._images, self._compared = images, compared
        tables = [table for one in images for table in one.each("hash", "width", "height")]
        self._hashes = numpy.concatenate([t["hash"].to_numpy() for t in tables]).view(numpy.uint64)
        self._pixels = numpy.concatenate(list(map(_pixels, tables)))
        chosen = slice(None) if compared.is_compared is None else compared.is_compared
        pixels = self._pixels[chosen]
        self.samples, self.damaged = len(pixels), int((pixels == 0).sum())
        self.flat = int((self._hashes[chosen] == NO_HASH).sum()) - self.damaged

    def copies(self, distance: int, heard: Counting) -> Copies:
        """Return the samples that may go, each with the sample that stays for it.

        `distance` is the most bits in which two hashes of copies differ, and `heard` gets the
        number of sorts done and of all. This can be called only once, as it frees the hashes.
        """
        order = numpy.lexsort((*self._sort_keys(), self._hashes))
        if self._compared.is_compared is not None:
            order = order[self._compared.is_compared[order]]
        hashes = self._hashes[order]
        del self._hashes
        blank = int(numpy.searchsorted(hashes, 1))
        without, order, hashes = numpy.sort(order[:blank]), order[blank:], hashes[blank:]
        starts = _run_starts(hashes)
        distinct = hashes[starts]
        del hashes
        stays = self._choose_hashes(distinct, order[starts], distance, heard)
        rows, at = _rows_to_go(order, starts, stays)
        stay = order[starts[stays[at]]]
        bits = bits_set(distinct[at] ^ distinct[stays[at]]).astype(numpy.int8)
        del order, starts, distinct, stays, at
        content = numpy.concatenate(
            [t["content"].to_numpy() for one in self._images for t in one.each("content")]
        )
        same, same_stay = self._find_same_bytes(without, content)
        rows, stay = numpy.concatenate([rows, same]), numpy.concatenate([stay, same_stay])
        bits = numpy.concatenate([bits, numpy.zeros(len(same), numpy.int8)])
        by_row = numpy.argsort(rows)
        rows, stay, bits = rows[by_row], stay[by_row], bits[by_row]
        equal = content[rows] == content[stay]
        return Copies(rows=rows, stay=stay, bits=bits, equal=equal, stays=numpy.unique(stay))

    def _choose_hashes(
        self, distinct: NDArray[numpy.uint64], best: Rows, distance: int, heard: Counting
    ) -> Rows:
        """Return for each hash the number of the hash whose picture stays: this one, or a near one.

        `distinct` has each hash once, and rises. `best` has the row of the best picture with
        each hash.
        """
        one, other = find_near_pairs(distinct, distance, heard)
        paired, places = numpy.unique(numpy.concatenate([one, other]), return_inverse=True)
        by_rank = numpy.lexsort((best[paired], *self._sort_keys(best[paired])))
        rank = numpy.empty(len(paired), numpy.int64)
        rank[by_rank] = numpy.arange(len(paired))
        first, second = rank[places[: len(one)]], rank[places[len(one) :]]
        kept = choose_kept(numpy.minimum(first, second), numpy.maximum(first, second), len(paired))
        stays = numpy.arange(len(distinct))
        stays[paired[by_rank]] = paired[by_rank[kept]]
        return stays

    def _sort_keys(self, rows: Rows | slice = slice(None)) -> tuple[NDArray[Any], ...]:
        """Return keys for `lexsort` that put the row to be kept first; the last key weighs most."""
        pixels, ranks = self._pixels[rows], self._compared.ranks
        return (~pixels,) if ranks is None else (~pixels, -ranks[rows])

    def _find_same_bytes(self, rows: Rows, content: Rows) -> tuple[Rows, Rows]:
        """Return those of `rows` with the same bytes as a better one, and for each the best one.

        `content` has a digest of the bytes of every row.
        """
        order = rows[numpy.lexsort((*self._sort_keys(rows), content[rows]))]
        starts = _run_starts(content[order])
        copies, at = _rows_to_go(order, starts, numpy.arange(len(starts)))
        return copies, order[starts[at]]


def _pixels(table: pa.Table) -> NDArray[numpy.uint32]:
    area = table["width"].to_numpy().astype(numpy.int64) * table["height"].to_numpy()
    pixels: NDArray[numpy.uint32] = numpy.minimum(area, MOST_PIXELS).astype(numpy.uint32)
    return pixels


def _run_starts(rising: NDArray[numpy.generic]) -> Rows:
    """Return the places at which runs of equal values begin."""
    is_first = numpy.ones(len(rising), bool)
    is_first[1:] = rising[1:] != rising[:-1]
    return numpy.flatnonzero(is_first)


def _rows_to_go(order: Rows, starts: Rows, stays: Rows) -> tuple[Rows, Rows]:
    """Return the rows that may go, each with the number of its run of equal values.

    `order` has the rows run by run, with the best row of a run first, and `starts` the place of
    each run's first row. `stays` has for each run the number of the run that stays for it. If a run
    stays for itself, its first row may not go.
    """
    goes = numpy.ones(len(order), bool)
    goes[starts[stays == numpy.arange(len(stays))]] = False
    places = numpy.flatnonzero(goes)
    return order[places], numpy.searchsorted(starts, places, side="right") - 1


def _spans(images: Sequence[ImagesLooked]) -> list[tuple[ImagesLooked, HashUnit, int, int]]:
    """Return each shard with its first row and the row after its last."""
    ends = numpy.cumsum([0, *(unit.shard.samples for one in images for unit in one.units)])
    units = [(one, unit) for one in images for unit in one.units]
    return [(*unit, int(a), int(b)) for unit, (a, b) in zip(units, pairwise(ends), strict=True)]


def largest_groups(images: Sequence[ImagesLooked], copies: Copies) -> Iterator[DuplicateGroup]:
    """Yield a few groups: those with the most copies, the largest first.

    Of the copies of a group only the first few are listed.
    """
    spans = _spans(images)

    def sample(row: int, distance: int = 0, is_equal: bool = True) -> CopiedSample:
        one, unit, start, _ = next(span for span in spans if row < span[3])
        facts = one.columns(unit, "key", "width", "height").slice(row - start, 1).to_pylist()[0]
        return CopiedSample(dataset=one.shown, distance=distance, is_equal=is_equal, **facts)

    counts = numpy.bincount(numpy.searchsorted(copies.stays, copies.stay))
    for group in numpy.argsort(-counts, kind="stable")[:SHOWN_GROUPS]:
        places = numpy.flatnonzero(copies.stay == copies.stays[group])
        some = [
            sample(int(copies.rows[at]), int(copies.bits[at]), bool(copies.equal[at]))
            for at in places[:SHOWN_COPIES]
        ]
        stays = sample(int(copies.stays[group]))
        yield DuplicateGroup(stays=stays, count=len(places), copies=tuple(some))


# --- files
class _SinkFile(io.RawIOBase):
    """A sink with the interface of a file, for the Parquet writer."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._nbytes = sink, 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._nbytes

    def write(self, data: object, /) -> int:
        piece = bytes(memoryview(data))  # type: ignore[arg-type]
        self._sink.write(piece)
        self._nbytes += len(piece)
        return len(piece)


class CopyFiles:
    """The files with the results of a search. They get their names once the search has finished."""

    def __init__(self, images: Sequence[ImagesLooked], output: str, table: str) -> None:
        numbers = range(1, len(images) + 1)
        self._images = images
        self.lists = [output.replace(NUMBER, str(n)) for n in numbers if output]
        self.tables = [table.replace(NUMBER, str(n)) for n in numbers if table]
        self._sinks: dict[str, Sink] = {}

    def open(self, stack: ExitStack) -> None:
        for url in (*self.lists, *self.tables):
            store, name = split_url(url)
            self._sinks[url] = stack.enter_context(store.write(name))

    def write(self, copies: Copies, compared: ComparedSamples) -> None:
        spans = _spans(self._images)
        for number, one in enumerate(self._images):
            own = [(unit, start, end) for which, unit, start, end in spans if which is one]
            if self.lists:
                _write_keys(self._sinks[self.lists[number]], one, own, copies)
            if self.tables:
                _write_table(self._sinks[self.tables[number]], one, own, copies, compared)


@contextmanager
def copy_files(output: str, table: str, images: Sequence[ImagesLooked]) -> Iterator[CopyFiles]:
    """Open the files of keys and the tables, which get their names at the end if nothing failed.

    They are opened before the search, so that a place that cannot be written to is known early.
    Raise UsageError for a name that does not fit, such as one file for several datasets.
    """
    for option, url in (("-o", output), ("--table", table)):
        if len(images) > 1 and url and NUMBER not in url:
            raise UsageError(
                f"{option} {url} is one file for {len(images)} datasets, each of which needs its "
                f"own: put {NUMBER} into the name"
            )
        for one in images:
            if url and absolute(url).startswith((f"{one.place}/", f"{one.kept.url}/")):
                raise UsageError(f"{option} {url} lies in {one.shown}: give a file outside of it")
    if table and not table.endswith(".parquet"):
        raise UsageError(
            f"--table {table} will be a Parquet file: give a name that ends in .parquet"
        )
    if output and output == table:
        raise UsageError(f"-o and --table are both {output}: give two files")
    files = CopyFiles(images, output, table)
    with ExitStack() as stack:
        files.open(stack)
        yield files


Span = tuple[HashUnit, int, int]


def _write_keys(sink: Sink, one: ImagesLooked, spans: Sequence[Span], copies: Copies) -> None:
    for unit, start, end in spans:
        first, last = numpy.searchsorted(copies.rows, [start, end])
        if first < last:
            keys = one.columns(unit, "key")["key"].take(copies.rows[first:last] - start)
            sink.write("".join(f"{key}\n" for key in keys.to_pylist()).encode())


def _write_table(
    sink: Sink,
    one: ImagesLooked,
    spans: Sequence[Span],
    copies: Copies,
    compared: ComparedSamples,
) -> None:
    with pq.ParquetWriter(_SinkFile(sink), _TABLE) as writer:
        for unit, start, end in spans:
            first, last = numpy.searchsorted(copies.rows, [start, end])
            places = copies.rows[first:last] - start
            duplicate = numpy.zeros(end - start, numpy.int8)
            duplicate[places] = numpy.where(copies.equal[first:last], 2, 1)
            distance = numpy.zeros(end - start, numpy.int8)
            distance[places] = copies.bits[first:last]
            group = numpy.zeros(end - start, numpy.int64)
            group[places] = numpy.searchsorted(copies.stays, copies.stay[first:last]) + 1
            own, after = numpy.searchsorted(copies.stays, [start, end])
            group[copies.stays[own:after] - start] = numpy.arange(own, after) + 1
            kept = one.columns(unit, "key", "hash")
            columns = [kept["key"], duplicate, distance, group, kept["hash"]]
            table = pa.table(columns, schema=_TABLE)
            if compared.is_compared is not None:
                table = table.filter(pa.array(compared.is_compared[start:end]))
            writer.write_table(table)
