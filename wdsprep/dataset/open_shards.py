"""Tars that are open for positioned reads, each with its index."""

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from wdsprep.dataset.file_names import index_name
from wdsprep.dataset.random_numbers import Ints
from wdsprep.dataset.tar import BLOCK
from wdsprep.dataset.tar.members import BadSampleError
from wdsprep.errors import FormatError, NotFoundError
from wdsprep.store.base import Store
from wdsprep.text import command, plural

OPEN_SHARDS = 256  # most that one stream has; a window of one slot lies in one or two


class IndexedTars(Protocol):
    """Tars of a store, with the number of samples of each."""

    @property
    def store(self) -> Store: ...
    @property
    def names(self) -> Sequence[str]: ...
    @property
    def sizes(self) -> Ints: ...


class OpenShard:
    """An open tar and its index.

    It closes when nobody uses it any more, so that no thread reads from a file number that
    means another file by now.
    """

    __slots__ = ("fd", "nbytes", "offsets", "stamp")

    def __init__(self, fd: int, offsets: memoryview, stamp: str) -> None:
        self.fd, self.offsets, self.stamp = fd, offsets, stamp
        self.nbytes = os.fstat(fd).st_size if fd >= 0 else sys.maxsize

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.fd >= 0:  # at the end of the program, when the module may be gone
            close(self.fd)


class OpenShards:
    """Tars in use: opened when first needed, the longest unused closed first.

    `most` says how many may be open now, `next_step` what a user does about one that is missing.
    """

    def __init__(
        self,
        tars: IndexedTars,
        open_tar: Callable[[str], int],
        most: Callable[[], int],
        next_step: str,
        stamp_of: Callable[[str], str] = lambda _name: "",
    ) -> None:
        self._tars, self._open_tar, self._most = tars, open_tar, most
        self._next_step, self._stamp_of = next_step, stamp_of
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
            found = self._open.get(shard) or self._open_shard(shard)
            with self._lock:
                self._open[shard] = found
                while len(self._open) > self._most():
                    self._open.popitem(last=False)
        return found

    def _open_shard(self, shard: int) -> OpenShard:
        data, name = self._tars, self._tars.names[shard]
        what = f"{data.store.url}/{name}"
        try:
            offsets = _offsets(data.store.read(index_name(name)))
            if len(offsets) != data.sizes[shard] + 1:  # before a file is open that nobody gets
                raise FormatError(
                    f"{index_name(what)} has {plural(max(0, len(offsets) - 1), 'sample')}, not "
                    f"{data.sizes[shard]:,}: delete it and run "
                    f"{command('index', data.store.url)}"
                )
            return OpenShard(self._open_tar(name), offsets, self._stamp_of(name))
        except (NotFoundError, FileNotFoundError) as error:
            raise NotFoundError(f"{what} or its index is missing: {self._next_step}") from error


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


def _offsets(data: bytes) -> memoryview:
    whole = data[: len(data) // 8 * 8]
    return np.frombuffer(whole, "<u8").astype(np.uint64, copy=False).data
