"""Samples of a dataset by shard and number, one positioned read each.

A *shelf* gives the bytes of a sample: into buffers from its start (`fill`), or whole (`sample`).
On a local disk that is one `preadv` into where the bytes belong. On S3 a request costs too much for
one sample, so the loader says beforehand what it will want (`expect`): neighbours are fetched
together, and `fill` copies from what has come.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from wdsprep.errors import FormatError, NotFoundError, UsageError
from wdsprep.loader.blocks import Blocks
from wdsprep.loader.cache import Cache, CacheDir
from wdsprep.loader.catalog import Dataset
from wdsprep.order.permute import Ints
from wdsprep.store.local import LocalStore
from wdsprep.store.s3 import S3Store
from wdsprep.tar import BLOCK
from wdsprep.tar.read import BadSampleError

OPEN_SHARDS = 256  # of one stream; a window of one slot lies in one or two
PIECE_NBYTES = 4 << 20  # at most this, or one sample, in one request
STEP_NBYTES = 256 << 10  # by which the memory for requests grows
MOST_NBYTES = 1 << 30  # of one request: a damaged index asks for more
LARGE_NBYTES = 1 << 20
LARGE_AT_ONCE = 8  # requests of more than that: more of them only take turns at the processor
GAP = 1  # unwanted samples between two wanted ones that are fetched with them

NONE = memoryview(b"")

Buffers = Sequence[Any]
Wanted = tuple[Ints, Ints]  # shards and indices, the most urgent first


class Shelf(Protocol):
    """The samples of one dataset, for any number of threads."""

    @property
    def fetches(self) -> bool:
        """Whether it makes use of being told what to expect."""

    def fill(self, shard: int, index: int, buffers: Buffers, *, rest: bool = False) -> bytearray:
        """Put the first bytes of a sample into the buffers, one after another; the rest of it, if
        that is wanted. With no buffers, the rest is the whole sample."""

    def expect(self, wanted: Wanted, soon: Wanted) -> None:
        """Say what will be asked for, each sample once, and what will be said next; it may be
        fetched from now on."""

    def close(self) -> None: ...


def open_shelf(dataset: Dataset, fetchers: int, cache: CacheDir | None = None) -> Shelf:
    if isinstance(dataset.store, LocalStore):
        return LocalShelf(dataset, dataset.store.root)
    if isinstance(dataset.store, S3Store):
        return RemoteShelf(dataset, dataset.store, fetchers, cache)
    raise UsageError(f"{dataset.store.url}: loading is from a local folder or s3://")


class _OpenShard:
    """An open tar and its index. It closes when nobody uses it any more, so that no thread reads
    from a number that means another file by now."""

    __slots__ = ("fd", "offsets")

    def __init__(self, fd: int, offsets: memoryview) -> None:
        self.fd, self.offsets = fd, offsets

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.fd >= 0:  # at the end of the program, when the module may be gone
            close(self.fd)


class _Shards:
    """The shards in use: opened when first needed, the longest unused closed first."""

    def __init__(self, dataset: Dataset, open_tar: Callable[[str], int]) -> None:
        self._dataset, self._open_tar = dataset, open_tar
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._lock = threading.Lock()
        self._opening = [threading.Lock() for _ in range(OPEN_SHARDS)]

    def get(self, shard: int) -> _OpenShard:
        with self._lock:
            found = self._open.get(shard)
            if found is not None:
                self._open.move_to_end(shard)
                return found
        with self._opening[shard % len(self._opening)]:  # many want the same at the start
            found = self._open.get(shard) or self._opened(shard)
            with self._lock:
                self._open[shard] = found
                while len(self._open) > OPEN_SHARDS:
                    self._open.popitem(last=False)
        return found

    def _opened(self, shard: int) -> _OpenShard:
        data, name = self._dataset, self._dataset.names[shard]
        what = f"{data.store.url}/{name}"
        try:
            offsets = _offsets(data.store.read(f"{name}.idx"))
            fd = self._open_tar(name)
        except (NotFoundError, FileNotFoundError) as error:
            raise NotFoundError(
                f"{what} or its index is missing: bring it back, or load with skip_missing=True"
            ) from error
        if len(offsets) != data.sizes[shard] + 1:
            raise FormatError(
                f"{what}.idx has {len(offsets) - 1:,} samples where {data.sizes[shard]:,} should "
                f'be: delete it and run "wdsprep index {data.store.url}"'
            )
        return _OpenShard(fd, offsets)

    def place(self, shard: int, index: int) -> tuple[_OpenShard, int, int]:
        """The file, and where the sample begins and ends in it."""
        opened = self.get(shard)
        start, end = opened.offsets[index], opened.offsets[index + 1]
        if not start < end or (start | end) % BLOCK:
            raise BadSampleError("its place in the index is damaged", code="truncated")
        return opened, start, end


def _offsets(data: bytes) -> memoryview:
    whole = data[: len(data) // 8 * 8]
    return np.frombuffer(whole, "<u8").astype(np.uint64, copy=False).data


class LocalShelf:
    """Reads in place: the page cache is all the reading ahead there is."""

    fetches = False

    def __init__(self, dataset: Dataset, root: Path) -> None:
        def open_tar(name: str) -> int:
            return os.open(root / name, os.O_RDONLY | os.O_CLOEXEC)

        self._shards = _Shards(dataset, open_tar)

    def fill(self, shard: int, index: int, buffers: Buffers, *, rest: bool = False) -> bytearray:
        opened, start, end = self._shards.place(shard, index)
        nbytes = sum(map(len, buffers))
        if end - start < nbytes:
            raise too_short()
        more = bytearray(end - start - nbytes if rest else 0)
        if rest:
            buffers, nbytes = [*buffers, more], end - start
        if os.preadv(opened.fd, buffers, start) != nbytes:
            _fill_slowly(opened.fd, buffers, start)
        return more

    def expect(self, wanted: Wanted, soon: Wanted) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Files close with the last reader."""


def too_short() -> BadSampleError:
    return BadSampleError("it has fewer bytes than it should", code="truncated")


def _fill_slowly(fd: int, buffers: Buffers, start: int) -> None:
    """Over 2 GB, or on a network file system, one call may bring less than all."""
    for buffer in buffers:
        view = memoryview(buffer)
        while len(view):
            count = os.preadv(fd, [view], start)
            if not count:
                raise too_short()
            start += count
            view = view[count:]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Neighbouring samples fetched together: where the first byte lies in the tar, and them."""

    start: int
    data: memoryview

    def part(self, start: int, end: int) -> memoryview:
        """What it has of the bytes from start to end."""
        return self.data[start - self.start : end - self.start] if start >= self.start else NONE


class RemoteShelf:
    """Reads by ranges that neighbours share. What was fetched is dropped when its last sample has
    been asked for; what nobody announced is a request of its own, as is what its range, by a
    damaged index, does not hold."""

    fetches = True

    def __init__(
        self, dataset: Dataset, store: S3Store, fetchers: int, cache: CacheDir | None = None
    ) -> None:
        self._dataset, self._store = dataset, store
        self._cache = Cache(cache, dataset.contents) if cache else None
        self._shards = _Shards(dataset, lambda _name: -1)
        self._pool = ThreadPoolExecutor(fetchers, "wdsprep-fetch")
        self._coming: dict[tuple[int, int], Future[_Piece]] = {}
        self._large = threading.Semaphore(LARGE_AT_ONCE)
        self._blocks = Blocks(keep=MOST_NBYTES // STEP_NBYTES, step=STEP_NBYTES)

    def fill(self, shard: int, index: int, buffers: Buffers, *, rest: bool = False) -> bytearray:
        data = self._bytes(shard, index)
        nbytes = sum(map(len, buffers))
        if len(data) < nbytes:
            raise too_short()
        start = 0
        for buffer in buffers:
            part = data[start : start + len(buffer)]  # NumPy lets other threads go on meanwhile
            np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(part, np.uint8))
            start += len(buffer)
        return bytearray(data[start:] if rest else b"")

    def _bytes(self, shard: int, index: int) -> memoryview:
        coming = self._coming.pop((shard, index), None)
        piece = coming.result() if coming else None
        _, start, end = self._shards.place(shard, index)
        data = piece.part(start, end) if piece else NONE
        if len(data) < end - start:
            data = self._fetch(shard, index, index + 1).part(start, end)
        if len(data) < end - start:
            raise too_short()
        return data

    def _fetch(self, shard: int, first: int, stop: int) -> _Piece:
        offsets, name = self._shards.get(shard).offsets, self._dataset.names[shard]

        def fetch(first: int, _stop: int, buffer: memoryview) -> int:
            with self._large if len(buffer) > LARGE_NBYTES else nullcontext():
                return self._store.read_into(name, buffer, start=offsets[first])

        nbytes = offsets[stop] - offsets[first]
        if not 0 < nbytes <= MOST_NBYTES:
            return _Piece(offsets[first], NONE)
        data = self._blocks.take(nbytes).data
        try:
            if self._cache is None:
                count = fetch(first, stop, data)
            else:
                count = self._cache.read(shard, offsets, first, stop, data, fetch)
        except NotFoundError as error:
            raise NotFoundError(f"{error}: bring it back, or load with skip_missing=True") from None
        return _Piece(offsets[first], data[:count])

    def expect(self, wanted: Wanted, soon: Wanted) -> None:
        most = max(1, PIECE_NBYTES // self._dataset.sample_nbytes)
        left = self._not_coming(wanted), self._not_coming(soon)
        for shard, indices in pieces_of(*left, gap=GAP, most=most):
            coming = self._pool.submit(self._fetch, shard, indices[0], indices[-1] + 1)
            self._coming.update(((shard, index), coming) for index in indices)

    def _not_coming(self, wanted: Wanted) -> Wanted:
        places = zip(*(numbers.tolist() for numbers in wanted), strict=True)
        left = np.fromiter((place not in self._coming for place in places), np.bool_)
        return wanted[0][left], wanted[1][left]

    def close(self) -> None:
        self._coming.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)


def pieces_of(
    wanted: Wanted, soon: Wanted, *, gap: int, most: int
) -> Iterator[tuple[int, list[int]]]:
    """The wanted samples in groups to fetch together, those first that hold the most urgent one;
    with each, those wanted soon that are its neighbours. A group reaches over `most` samples."""
    shards, indices = map(np.concatenate, zip(wanted, soon, strict=True))
    if not len(wanted[0]):
        return
    by = np.lexsort((indices, shards))
    shards, indices = shards[by], indices[by]
    new = np.diff(shards, prepend=-1) != 0
    new[1:] |= np.diff(indices) > gap + 1
    heads = np.flatnonzero(new)
    reach = indices - np.repeat(indices[heads], np.diff(heads, append=len(by)))
    new[1:] |= np.diff(reach // most) != 0
    starts = np.flatnonzero(new)
    urgency = np.minimum.reduceat(by, starts)
    stops = np.append(starts[1:], len(by))
    for group in np.argsort(urgency):
        if urgency[group] < len(wanted[0]):
            some = slice(starts[group], stops[group])
            yield int(shards[starts[group]]), indices[some].tolist()
