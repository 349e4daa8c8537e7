"""Fetch samples of a dataset in a bucket or on the hub, ahead of their use.

A request costs too much for one sample. So samples that are wanted soon are fetched beforehand,
neighbours together, and copied from what has come.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from wdsprep.dataset.aio import Bytes
from wdsprep.dataset.open_shards import OPEN_SHARDS, OpenShards, sample_range, too_short
from wdsprep.dataset.tar.members import BadSampleError
from wdsprep.errors import NotFoundError
from wdsprep.loading.batch_memory import BlockPool
from wdsprep.loading.served_datasets import Dataset, missing_shard_advice
from wdsprep.loading.shard_access.local import (
    NONE,
    ReadError,
    ReadSamples,
    WantedRows,
    WantedSamples,
)
from wdsprep.loading.shard_access.sample_cache import Cache, CacheDir
from wdsprep.store.base import RemoteStore

PIECE_NBYTES = 4 << 20  # at most this, or one sample, in one request
STEP_NBYTES = 256 << 10  # sizes of memory for requests are multiples of this
MOST_NBYTES = 1 << 30  # the limit on one request; only a damaged index asks for more
LARGE_NBYTES = 1 << 20
MAX_LARGE_REQUESTS = (
    8  # larger requests than that at a time; more would only wait for the processor
)
SMALL_NBYTES = 16 << 10
GAP = 1  # unwanted samples between two wanted ones that are fetched with them


@dataclass(frozen=True, slots=True)
class _Piece:
    """Neighbouring samples that were fetched together: their bytes, and these bytes' offset."""

    start: int
    data: memoryview

    def part(self, start: int, end: int) -> memoryview:
        """Return the bytes of the file from start to end.

        There are fewer if this piece ends before, and none if it begins after `start`.
        """
        return self.data[start - self.start : end - self.start] if start >= self.start else NONE


class RemoteShelf:
    """A shelf that fetches ranges of a shard, which neighbouring samples share.

    A range is dropped when its last sample has been asked for. A sample that nobody announced
    has a request of its own. So has one that its range lacks because an index is damaged.
    """

    fetches = True

    def __init__(
        self, dataset: Dataset, store: RemoteStore, fetchers: int, cache: CacheDir | None = None
    ) -> None:
        self._dataset, self._store = dataset, store
        self._cache = Cache(cache, dataset.contents) if cache else None
        self._shards = OpenShards(
            dataset,
            lambda _name: -1,
            lambda: OPEN_SHARDS,
            missing_shard_advice(dataset),
            lambda name: store.stamp(name) if cache else "",
        )
        self._pool = ThreadPoolExecutor(fetchers, "wdsprep-fetch")
        self._coming: dict[tuple[int, int], Future[_Piece]] = {}
        self._large = threading.Semaphore(MAX_LARGE_REQUESTS)
        self._blocks = BlockPool(keep=MOST_NBYTES // STEP_NBYTES, step=STEP_NBYTES)

    def read(self, wanted: WantedSamples) -> ReadSamples:
        sizes, rests = np.zeros(len(wanted.rows), np.int64), [NONE] * len(wanted.rows)
        errors: dict[int, ReadError] = {}
        places = zip(wanted.rows, wanted.shards, wanted.indices, strict=True)
        for number, (row, shard, index) in enumerate(places):
            try:
                data = np.frombuffer(self._bytes(shard, index), np.uint8)
                if len(data) < wanted.least_nbytes:
                    raise too_short()
            except (BadSampleError, NotFoundError) as error:
                errors[number] = error
            else:
                sizes[number] = len(data)
                left = _scatter(data, [column[row] for column in wanted.columns])
                rests[number] = left.data if wanted.rest else NONE
        return ReadSamples(sizes, rests, errors)

    def _bytes(self, shard: int, index: int) -> memoryview:
        coming = self._coming.pop((shard, index), None)
        piece = coming.result() if coming else None
        start, end = sample_range(self._shards.get(shard), index)
        data = piece.part(start, end) if piece else NONE
        if len(data) < end - start:
            data = self._fetch(shard, index, index + 1).part(start, end)
        if len(data) < end - start:
            raise too_short()
        return data

    def _fetch(self, shard: int, first: int, stop: int) -> _Piece:
        opened, name = self._shards.get(shard), self._dataset.names[shard]
        offsets = opened.offsets

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
                count = self._cache.read(
                    shard, offsets, first, stop, data, fetch, stamp=opened.stamp
                )
        except NotFoundError as error:
            raise NotFoundError(f"{error}: {missing_shard_advice(self._dataset)}") from None
        return _Piece(offsets[first], data[:count])

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


def _scatter(data: Bytes, buffers: Sequence[Bytes]) -> Bytes:
    """Copy data to the buffers in turn, and return what is left.

    NumPy lets other threads go on meanwhile. For a few bytes that costs more than the copy.
    """
    for buffer in buffers:
        part, data = data[: len(buffer)], data[len(buffer) :]
        if len(part) < SMALL_NBYTES:
            buffer.data[: len(part)] = part.data
        else:
            np.copyto(buffer[: len(part)], part)
    return data


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
            some = slice(starts[group], stops[group])
            yield int(shards[starts[group]]), indices[some].tolist()
