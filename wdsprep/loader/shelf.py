"""Samples of a dataset by shard and number, one positioned read each.

A *shelf* gives the bytes of a sample: into buffers from its start (`fill`), or whole (`sample`).
On a local disk that is one `preadv` into where the bytes belong. A shelf that fetches from afar is
told beforehand what will be wanted (`expect`); that one is in `fetching.py`.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from wdsprep.errors import FormatError, NotFoundError
from wdsprep.loader.catalog import Dataset
from wdsprep.order.permute import Ints
from wdsprep.tar import BLOCK
from wdsprep.tar.read import BadSampleError

OPEN_SHARDS = 256  # of one stream; a window of one slot lies in one or two

Buffers = Sequence[Any]
Place = tuple[int, int]  # of a sample: its shard, and its number there
Found = bytearray | BadSampleError | NotFoundError  # what follows the buffers, or why nothing came
Wanted = tuple[Ints, Ints]  # shards and indices, the most urgent first


class Shelf(Protocol):
    """The samples of one dataset, for any number of threads."""

    @property
    def fetches(self) -> bool:
        """Whether it makes use of being told what to expect."""

    def fill(
        self, places: Sequence[Place], buffers: Sequence[Buffers], *, rest: bool = False
    ) -> list[Found]:
        """Put the first bytes of each sample into its buffers, one after another, and give the rest
        of it, if that is wanted. With no buffers, the rest is the whole sample."""

    def expect(self, wanted: Wanted, soon: Wanted) -> None:
        """Say what will be asked for, each sample once, and what will be said next; it may be
        fetched from now on."""

    def close(self) -> None: ...


class OpenShard:
    """An open tar and its index. It closes when nobody uses it any more, so that no thread reads
    from a number that means another file by now."""

    __slots__ = ("fd", "offsets")

    def __init__(self, fd: int, offsets: memoryview) -> None:
        self.fd, self.offsets = fd, offsets

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.fd >= 0:  # at the end of the program, when the module may be gone
            close(self.fd)


class OpenShards:
    """The shards in use: opened when first needed, the longest unused closed first."""

    def __init__(self, dataset: Dataset, open_tar: Callable[[str], int]) -> None:
        self._dataset, self._open_tar = dataset, open_tar
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._lock = threading.Lock()
        self._opening = [threading.Lock() for _ in range(OPEN_SHARDS)]

    def get(self, shard: int) -> OpenShard:
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

    def _opened(self, shard: int) -> OpenShard:
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
        return OpenShard(fd, offsets)


def reach(opened: OpenShard, index: int) -> tuple[int, int]:
    """Where the sample begins and ends in its file."""
    start, end = opened.offsets[index], opened.offsets[index + 1]
    if not start < end or (start | end) % BLOCK:
        raise BadSampleError("its place in the index is damaged", code="truncated")
    return start, end


def _offsets(data: bytes) -> memoryview:
    whole = data[: len(data) // 8 * 8]
    return np.frombuffer(whole, "<u8").astype(np.uint64, copy=False).data


class _Read(NamedTuple):
    """A read with all it needs. `rest` is where its last bytes go, if they are wanted."""

    opened: OpenShard
    buffers: Buffers
    start: int
    nbytes: int
    rest: bytearray

    def done(self) -> Found:
        if os.preadv(self.opened.fd, self.buffers, self.start) == self.nbytes:
            return self.rest
        try:
            _fill_slowly(self.opened.fd, self.buffers, self.start)
        except BadSampleError as error:
            return error
        return self.rest


class LocalShelf:
    """Reads in place: the page cache is all the reading ahead there is."""

    fetches = False

    def __init__(self, dataset: Dataset, root: Path) -> None:
        def open_tar(name: str) -> int:
            return os.open(root / name, os.O_RDONLY | os.O_CLOEXEC)

        self._shards = OpenShards(dataset, open_tar)

    def fill(
        self, places: Sequence[Place], buffers: Sequence[Buffers], *, rest: bool = False
    ) -> list[Found]:
        """All is worked out before the first read: threads that copy at the same time meet in what
        little Python lies between two reads, and there they would wait for each other."""
        reads = [
            self._ready(*place, into, rest) for place, into in zip(places, buffers, strict=True)
        ]
        return [one.done() if isinstance(one, _Read) else one for one in reads]

    def _ready(
        self, shard: int, index: int, buffers: Buffers, rest: bool
    ) -> _Read | BadSampleError | NotFoundError:
        try:
            opened = self._shards.get(shard)
            start, end = reach(opened, index)
        except (BadSampleError, NotFoundError) as error:
            return error
        nbytes = sum(map(len, buffers))
        if end - start < nbytes:
            return too_short()
        if not rest:
            return _Read(opened, buffers, start, nbytes, bytearray())
        more = bytearray(end - start - nbytes)
        return _Read(opened, [*buffers, more], start, end - start, more)

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
