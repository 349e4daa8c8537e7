"""Read samples of datasets by shard and number, all that a thread wants in one call.

The first bytes of each sample go where the caller wants them, and the rest is returned. On local
disks that is one system call for all datasets that are joined, straight into where the bytes
belong. A thread that has made a system call waits for the interpreter's lock, and the checks before
the call hold that lock. With one call for all of them, two datasets that are joined take 1.08 times
the processor time of one dataset with the same bytes, at batches of 64; with a call for each they
took 1.10 times (two idle cores, page cache).

A request over a network costs too much for one sample. So samples that are wanted soon are
announced (`expect`) and fetched beforehand, neighbours together, and copied from what has come.
"""

import os
import resource
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain, pairwise

import numpy as np

from wdsprep.dataset.aio import Bytes, Vectors, address_of, read_all
from wdsprep.dataset.file_names import index_name
from wdsprep.dataset.random_numbers import Ints
from wdsprep.dataset.tar import BLOCK
from wdsprep.dataset.tar.members import BadSampleError
from wdsprep.errors import FormatError, NotFoundError
from wdsprep.loading.batch_memory import Batch, BlockPool, PaddedRows
from wdsprep.loading.sample_cache import Cache, CacheDir
from wdsprep.loading.sample_layout import SampleLayout
from wdsprep.loading.served_datasets import Dataset, WantedArrays, missing_shard_advice
from wdsprep.store.base import RemoteStore
from wdsprep.store.local import open_file
from wdsprep.text import command, plural

NONE = memoryview(b"")
NOTHING = np.empty(0, np.uint8)
NO_PLACE = -1, 0, 0, 0  # file, its bytes, start and end of a sample that no open shard has
OPEN_SHARDS = 256  # most that one stream has; a window of one slot lies in one or two
FETCHERS = 16  # requests to S3 at a time
PIECE_NBYTES = 4 << 20  # at most this, or one sample, in one request
STEP_NBYTES = 256 << 10  # sizes of memory for requests are multiples of this
MOST_NBYTES = 1 << 30  # the limit on one request; only a damaged index asks for more
LARGE_NBYTES = 1 << 20
MAX_LARGE_REQUESTS = 8  # larger ones than that at a time; more would only wait for the processor
SMALL_NBYTES = 16 << 10
GAP = 1  # unwanted samples between two wanted ones that are fetched with them

ReadError = BadSampleError | NotFoundError
WantedRows = tuple[Ints, Ints]  # shards and indices, the most urgent first
Piece = tuple[int, memoryview]
"""Neighbouring samples that were fetched together: their place in the tar, and their bytes."""


class OpenShard:
    """An open tar and its index.

    It closes when nobody uses it any more, so that no thread reads from a file number that
    means another file by now.
    """

    __slots__ = ("fd", "nbytes", "offsets", "stamp")

    def __init__(self, fd: int, stamp: str, offsets: memoryview) -> None:
        self.fd, self.stamp, self.offsets = fd, stamp, offsets
        self.nbytes = os.fstat(fd).st_size if fd >= 0 else sys.maxsize

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.fd >= 0:  # at the end of the program, when the module may be gone
            close(self.fd)


class Shards:
    """The shards of one dataset on a local disk, whose samples any number of threads read.

    A tar is opened when it is first needed, and the longest unused one is closed first. Only the
    page cache reads ahead. Subclasses may fetch samples from elsewhere.
    """

    fetches = False
    """True if samples are fetched ahead, which needs calls of `expect`."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._lock = threading.Lock()
        self._opening = [threading.Lock() for _ in range(OPEN_SHARDS)]
        if dataset.store.root:
            _in_use.add(self)

    def expect(self, wanted: WantedRows, soon: WantedRows) -> None:
        """Announce the samples that will be read next, each once, and those of the next call.

        Both may be fetched from now on.
        """

    def close(self) -> None:
        """Count these shards as in use no longer; their files close with their last reader."""
        _in_use.discard(self)

    def open_tar(self, name: str) -> tuple[int, str]:
        """Return a file descriptor, or -1 if the tar is not here, and a stamp of its content."""
        return open_file(f"{self._dataset.store.root}/{name}")[0], ""

    def most_open(self) -> int:
        """Return how many shards of a dataset may stay open.

        The datasets of all loaders share a third of the files that the process may open. Shards
        that are being read come on top.
        """
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if allowed == resource.RLIM_INFINITY:
            return OPEN_SHARDS
        return max(1, min(OPEN_SHARDS, allowed // 3 // max(1, len(_in_use))))

    def open(self, shard: int, /) -> OpenShard | None:
        """Return an open shard, so that one call can read from several; None if it is missing."""
        try:
            return self.get(shard)
        except NotFoundError:
            return None  # `read` says why

    def read(self, reads: "RowReads", number: int) -> None:
        """Read a single one of the samples, and set what was read of it.

        This takes as many calls as it needs: over 2 GB, or on a network file system, one call may
        bring less than all. Raise BadSampleError or NotFoundError if the sample cannot be read.
        """
        opened = self.get(reads.shards[number])
        start, end = sample_range(opened, reads.indices[number])
        if end - start < reads.least_nbytes:
            raise too_short()
        rest = np.empty(max(0, end - start - reads.columns_nbytes) if reads.rest else 0, np.uint8)
        reads.sizes[number], reads.rests[number] = end - start, rest.data
        for buffer in (*reads.buffers(number), rest):
            view = buffer.data[: end - start]
            while len(view):
                count = os.preadv(opened.fd, [view], start)
                if not count:
                    raise too_short()
                start += count
                view = view[count:]

    def get(self, shard: int) -> OpenShard:
        """Return a shard that is open. Raise NotFoundError if it or its index is missing."""
        with self._lock:
            if (opened := self._open.get(shard)) is not None:
                self._open.move_to_end(shard)
                return opened
        with self._opening[shard % len(self._opening)]:  # many want the same at the start
            opened = self._open.get(shard) or self._open_shard(shard)
            with self._lock:
                self._open[shard] = opened
                while len(self._open) > self.most_open():
                    self._open.popitem(last=False)
        return opened

    def _open_shard(self, shard: int) -> OpenShard:
        store, name = self._dataset.store, self._dataset.names[shard]
        what, samples = f"{store.url}/{name}", self._dataset.sizes[shard]
        try:
            index = store.read(index_name(name))
            whole = index[: len(index) // 8 * 8]
            offsets = np.frombuffer(whole, "<u8").astype(np.uint64, copy=False)
            if len(offsets) != samples + 1:  # before a file is open that nobody gets
                raise FormatError(
                    f"{index_name(what)} has {plural(max(0, len(offsets) - 1), 'sample')}, not "
                    f"{samples:,}: delete it and run {command('index', store.url)}"
                )
            return OpenShard(*self.open_tar(name), offsets.data)
        except (NotFoundError, FileNotFoundError) as error:
            advice = missing_shard_advice(self._dataset)
            raise NotFoundError(f"{what} or its index is missing: {advice}") from error


@dataclass(kw_only=True, slots=True, eq=False)
class RowReads:
    """Rows of a batch to read from the datasets of one slot, and what was read of them.

    For each sample, `sources` has the shards of its dataset, `shards` the number of its shard among
    them, and `indices` its own number in that shard. Its first bytes go to its row of the columns,
    one column after another. With `rest`, its remaining bytes are wanted too; without columns these
    are all bytes. A sample may be shorter than the columns by up to `spare` bytes, which the last
    column then lacks.

    `read_samples` sets the size of each sample, its bytes after those in the columns, and by number
    the reason why a sample could not be read.

    `batch_rows` are these rows among those that one thread fills, the `run`, with which the columns
    begin. Their arrays, and the headers between these, go where the layout says; without a layout,
    samples are read whole. `padded` has the rows of an array of variable length, if that is wanted.
    """

    sources: Sequence[Shards]
    shards: Sequence[int]
    indices: Sequence[int]
    columns: Sequence[Bytes] = ()
    spare: int = 0
    rest: bool = False
    sizes: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    rests: list[memoryview] = field(default_factory=list)
    errors: dict[int, ReadError] = field(default_factory=dict)
    batch: Batch
    run: range
    batch_rows: Sequence[int]
    slot: int
    arrays: WantedArrays
    layout: SampleLayout | None = None
    headers: Bytes = field(default_factory=lambda: NOTHING)
    padded: PaddedRows | None = None

    @property
    def columns_nbytes(self) -> int:
        return sum(column.shape[1] for column in self.columns)

    @property
    def least_nbytes(self) -> int:
        return self.columns_nbytes - self.spare

    def buffers(self, number: int) -> list[Bytes]:
        """Return the memory for the first bytes of a sample, part by part."""
        row = self.batch_rows[number] - self.run.start
        return [column[row] for column in self.columns]


def sample_range(opened: OpenShard, index: int) -> tuple[int, int]:
    """Return the bytes at which a sample of an open tar begins and ends.

    Raise BadSampleError if the index is damaged there, or if the tar ends before the sample does.
    """
    start, end = opened.offsets[index], opened.offsets[index + 1]
    if not start < end or (start | end) % BLOCK:
        raise BadSampleError("its place in the index is damaged", code="truncated")
    if end > opened.nbytes:
        raise too_short()
    return start, end


def too_short() -> BadSampleError:
    return BadSampleError("it has fewer bytes than it should", code="truncated")


_in_use: "weakref.WeakSet[Shards]" = weakref.WeakSet()
"""The shards on local disks that loaders have now."""


def read_samples(wanted: Sequence[RowReads]) -> None:
    """Read samples into `wanted`: those on local disks in one call, the others one after another.

    The places of all are checked at once: one by one takes three times as long, and delays the
    other threads.
    """
    opened: list[OpenShard | None] = []  # held here, so that no file closes before all is read
    bounds = [0]
    for reads in wanted:
        if len({*reads.sources}) == 1:  # as a rule, and then quicker
            shards = {shard: reads.sources[0].open(shard) for shard in {*reads.shards}}
            opened += [shards[shard] for shard in reads.shards]
        else:
            keys = [*zip(reads.sources, reads.shards, strict=True)]
            of_all = {key: key[0].open(key[1]) for key in {*keys}}
            opened += [of_all[key] for key in keys]
        bounds.append(len(opened))
    indices = chain.from_iterable(reads.indices for reads in wanted)
    places = [
        (tar.fd, tar.nbytes, tar.offsets[index], tar.offsets[index + 1]) if tar else NO_PLACE
        for tar, index in zip(opened, indices, strict=True)
    ]
    if not places:
        return
    fds, nbytes, starts, ends = zip(*places, strict=True)
    first, last = np.array(starts, np.uint64), np.array(ends, np.uint64)
    is_sound = (
        (first < last) & ((first | last) % BLOCK == 0) & (last <= np.array(nbytes, np.uint64))
    )
    sizes = (last - first).view(np.int64)
    parts = [*zip(wanted, (slice(*pair) for pair in pairwise(bounds)), strict=True)]
    for reads, part in parts:
        is_sound[part] &= sizes[part] >= reads.least_nbytes
    sizes[~is_sound] = 0
    vectors = np.zeros(
        (len(opened), max(len(reads.columns) + reads.rest for reads in wanted), 2), np.uint64
    )
    for reads, part in parts:
        reads.sizes = sizes[part]
        reads.rests = _point_to_memory(vectors[part], reads)
    if is_sound.all():
        came = read_all(fds, starts, vectors)
    else:
        came, sound = np.full(len(opened), -1), np.flatnonzero(is_sound)
        numbers = sound.tolist()
        came[sound] = read_all(
            [fds[n] for n in numbers], [starts[n] for n in numbers], vectors[sound]
        )
    failed = came != vectors[:, :, 1].sum(axis=1).view(np.int64)
    for reads, part in parts if failed.any() else ():
        for number in np.flatnonzero(failed[part]).tolist():
            try:
                reads.sources[number].read(reads, number)
            except (BadSampleError, NotFoundError) as error:
                reads.errors[number] = error


def _point_to_memory(vectors: Vectors, reads: RowReads) -> list[memoryview]:
    """Write into `vectors` where the bytes of each sample go, and how many.

    Return new memory for the bytes after the columns, which is empty if these are not wanted.
    """
    rows = np.fromiter(reads.batch_rows, np.int64) - reads.run.start
    last_row = reads.batch_rows[-1] - reads.run.start  # they rise
    for number, column in enumerate(reads.columns):
        last = column[last_row].data
        if last.readonly or not last.c_contiguous or last.itemsize != 1:
            raise ValueError("the rows of a column must be bytes to write to, one after another")
        vectors[:, number, 0] = address_of(column) + rows * column.strides[0]
        vectors[:, number, 1] = column.shape[1]
    if reads.spare:
        last_nbytes = reads.columns[-1].shape[1]
        came_nbytes = reads.sizes - (reads.columns_nbytes - last_nbytes)
        vectors[:, len(reads.columns) - 1, 1] = np.clip(came_nbytes, 0, last_nbytes)
    if not reads.rest:
        return [NONE] * len(rows)
    behind = np.maximum(reads.sizes - reads.columns_nbytes, 0)
    tails = [np.empty(nbytes, np.uint8) for nbytes in behind.tolist()]
    vectors[:, len(reads.columns), 0] = [*map(address_of, tails)]
    vectors[:, len(reads.columns), 1] = behind
    return [tail.data for tail in tails]


class RemoteShards(Shards):
    """Shards in a bucket or on the hub, fetched in ranges that neighbouring samples share.

    A range is dropped when its last sample has been asked for. A sample that nobody announced
    has a request of its own. So has one that its range lacks because an index is damaged.
    """

    fetches = True

    def __init__(self, dataset: Dataset, store: RemoteStore, cache: CacheDir | None = None) -> None:
        super().__init__(dataset)
        self._store = store
        self._cache = Cache(cache, dataset.contents) if cache else None
        self._pool = ThreadPoolExecutor(FETCHERS, "wdsprep-fetch")
        self._coming: dict[tuple[int, int], Future[Piece]] = {}
        self._large = threading.Semaphore(MAX_LARGE_REQUESTS)
        self._blocks = BlockPool(keep=MOST_NBYTES // STEP_NBYTES, step=STEP_NBYTES)

    def most_open(self) -> int:
        return OPEN_SHARDS

    def open_tar(self, name: str) -> tuple[int, str]:
        return -1, "" if self._cache is None else self._store.stamp(name)

    def open(self, _shard: int, /) -> None:
        """Return None: no file is here to read from."""

    def read(self, reads: RowReads, number: int) -> None:
        """Copy a sample from what was fetched, after waiting for it."""
        shard, index = reads.shards[number], reads.indices[number]
        coming = self._coming.pop((shard, index), None)
        piece = coming.result() if coming else (0, NONE)
        start, end = sample_range(self.get(shard), index)
        part = _cut(piece, start, end)
        if len(part) < end - start:
            part = _cut(self._fetch(shard, index, index + 1), start, end)
        data = np.frombuffer(part, np.uint8)
        if len(data) < max(end - start, reads.least_nbytes):
            raise too_short()
        reads.sizes[number] = len(data)
        for buffer in reads.buffers(number):
            first, data = data[: len(buffer)], data[len(buffer) :]
            if len(first) < SMALL_NBYTES:
                buffer.data[: len(first)] = first.data
            else:  # other threads go on meanwhile, which for a few bytes costs more than the copy
                np.copyto(buffer[: len(first)], first)
        reads.rests[number] = data.data if reads.rest else NONE

    def _fetch(self, shard: int, first: int, stop: int) -> Piece:
        opened, name = self.get(shard), self._dataset.names[shard]
        offsets = opened.offsets

        def fetch(first: int, buffer: memoryview) -> int:
            with self._large if len(buffer) > LARGE_NBYTES else nullcontext():
                return self._store.read_into(name, buffer, start=offsets[first])

        nbytes = offsets[stop] - offsets[first]
        if not 0 < nbytes <= MOST_NBYTES:
            return offsets[first], NONE
        data = self._blocks.take(nbytes).data
        try:
            if self._cache is None:
                count = fetch(first, data)
            else:
                count = self._cache.read(
                    shard, offsets, first, stop, data, fetch, stamp=opened.stamp
                )
        except NotFoundError as error:
            raise NotFoundError(f"{error}: {missing_shard_advice(self._dataset)}") from None
        return offsets[first], data[:count]

    def expect(self, wanted: WantedRows, soon: WantedRows) -> None:
        most = max(1, PIECE_NBYTES // self._dataset.sample_nbytes)
        left = self._not_requested(wanted), self._not_requested(soon)
        for shard, indices in group_neighbours(*left, gap=GAP, most=most):
            coming = self._pool.submit(self._fetch, shard, indices[0], indices[-1] + 1)
            self._coming.update(((shard, index), coming) for index in indices)

    def _not_requested(self, wanted: WantedRows) -> WantedRows:
        places = zip(*(numbers.tolist() for numbers in wanted), strict=True)
        left = np.fromiter((place not in self._coming for place in places), np.bool_)
        return wanted[0][left], wanted[1][left]

    def close(self) -> None:
        self._coming.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _cut(piece: Piece, start: int, end: int) -> memoryview:
    """Return the bytes from start to end of a file, as far as a piece of it has them.

    There are none if the piece begins after `start`.
    """
    first, data = piece
    return data[start - first : end - first] if start >= first else NONE


def group_neighbours(
    wanted: WantedRows, soon: WantedRows, *, gap: int, most: int
) -> Iterator[tuple[int, list[int]]]:
    """Yield groups of neighbouring samples to fetch together, the most urgent group first.

    Each is a shard and the numbers of its wanted samples, and of their neighbours that are
    wanted soon. At most `gap` other samples lie between neighbours, and a group reaches over
    at most `most` samples.
    """
    shards, indices = map(np.concatenate, zip(wanted, soon, strict=True))
    if not len(wanted[0]):
        return
    by = np.lexsort((indices, shards))
    shards, indices = shards[by], indices[by]
    new = np.diff(shards, prepend=-1) != 0
    new[1:] |= np.diff(indices) > gap + 1
    heads = np.flatnonzero(new)
    reached = indices - np.repeat(indices[heads], np.diff(heads, append=len(by)))
    new[1:] |= np.diff(reached // most) != 0
    starts = np.flatnonzero(new)
    urgency = np.minimum.reduceat(by, starts)
    stops = np.append(starts[1:], len(by))
    for group in np.argsort(urgency):
        if urgency[group] < len(wanted[0]):
            neighbours = indices[starts[group] : stops[group]]
            yield int(shards[starts[group]]), neighbours.tolist()
