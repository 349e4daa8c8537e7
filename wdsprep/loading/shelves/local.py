"""Samples of a dataset by shard and number, one positioned read each.

A *shelf* gives the bytes of many samples at a time: what each begins with goes where the caller
wants it, the rest comes as it is. On a local disk that is one system call, straight into where the
bytes belong. A shelf that fetches from afar is told beforehand what will be wanted (`expect`); that
one is in `remote`.
"""

import os
import resource
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from wdsprep.dataset.names import index_name
from wdsprep.dataset.tar import BLOCK
from wdsprep.dataset.tar.members import BadSampleError
from wdsprep.errors import FormatError, NotFoundError
from wdsprep.loading.catalog import Dataset
from wdsprep.loading.order.chance import Ints
from wdsprep.loading.shelves.aio import address_of, read_all
from wdsprep.loading.worker_memory import Bytes
from wdsprep.text import command, plural

OPEN_SHARDS = 256  # of one stream, at most; a window of one slot lies in one or two
NONE = memoryview(b"")

ByteColumns = Sequence[Bytes]
"""Of each part that samples begin with: a row of so many bytes for each."""
SamplePlace = tuple[int, int]  # of a sample: its shard, and its number there
ShelfFound = memoryview | BadSampleError | NotFoundError  # what follows, or why nothing came
WantedRows = tuple[Ints, Ints]  # shards and indices, the most urgent first


class Shelf(Protocol):
    """The samples of one dataset, for any number of threads."""

    @property
    def fetches(self) -> bool:
        """Whether it makes use of being told what to expect."""

    def fill(
        self, places: Mapping[int, SamplePlace], columns: ByteColumns, *, rest: bool = False
    ) -> dict[int, ShelfFound]:
        """Put the first bytes of the sample for each row into that row of the columns, one after
        another, and give the rest of it, if that is wanted. With no columns that is all of it."""

    def expect(self, wanted: WantedRows, soon: WantedRows) -> None:
        """Say what will be asked for, each sample once, and what will be said next; it may be
        fetched from now on."""

    def close(self) -> None: ...


class OpenShard:
    """An open tar and its index. It closes when nobody uses it any more, so that no thread reads
    from a number that means another file by now."""

    __slots__ = ("fd", "nbytes", "offsets", "stamp")

    def __init__(self, fd: int, offsets: memoryview, stamp: str) -> None:
        self.fd, self.offsets, self.stamp = fd, offsets, stamp
        self.nbytes = os.fstat(fd).st_size if fd >= 0 else sys.maxsize

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.fd >= 0:  # at the end of the program, when the module may be gone
            close(self.fd)


class OpenShards:
    """The shards in use: opened when first needed, the longest unused closed first."""

    def __init__(
        self,
        dataset: Dataset,
        open_tar: Callable[[str], int],
        most: Callable[[], int],
        stamp_of: Callable[[str], str] = lambda _name: "",
    ) -> None:
        self._dataset, self._open_tar, self._most = dataset, open_tar, most
        self._stamp_of = stamp_of
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
                while len(self._open) > self._most():
                    self._open.popitem(last=False)
        return found

    def _opened(self, shard: int) -> OpenShard:
        data, name = self._dataset, self._dataset.names[shard]
        what = f"{data.store.url}/{name}"
        try:
            offsets = _offsets(data.store.read(index_name(name)))
            opened = OpenShard(self._open_tar(name), offsets, self._stamp_of(name))
        except (NotFoundError, FileNotFoundError) as error:
            raise NotFoundError(f"{what} or its index is missing: {bring_back(data)}") from error
        if len(offsets) != data.sizes[shard] + 1:
            raise FormatError(
                f"{index_name(what)} has {plural(len(offsets) - 1, 'sample')} where "
                f"{data.sizes[shard]:,} should be: delete it and run "
                f"{command('index', data.store.url)}"
            )
        return opened


def bring_back(dataset: Dataset) -> str:
    """What to do about a shard that is missing."""
    repair = command("repair", dataset.store.url)
    again = f" or make it again ({repair}, then the command it is from)"
    return f"bring it back{again if dataset.kind != 'tars' else ''}, or load with skip_missing=True"


def reach(opened: OpenShard, index: int) -> tuple[int, int]:
    """Where the sample begins and ends in its file."""
    start, end = opened.offsets[index], opened.offsets[index + 1]
    if not start < end or (start | end) % BLOCK:
        raise BadSampleError("its place in the index is damaged", code="truncated")
    if end > opened.nbytes:
        raise too_short()
    return start, end


def _offsets(data: bytes) -> memoryview:
    whole = data[: len(data) // 8 * 8]
    return np.frombuffer(whole, "<u8").astype(np.uint64, copy=False).data


class _Read(NamedTuple):
    row: int
    fd: int
    start: int
    nbytes: int


class LocalShelf:
    """Reads in place: the page cache is all the reading ahead there is."""

    fetches = False

    def __init__(self, dataset: Dataset, root: Path) -> None:
        def open_tar(name: str) -> int:
            return os.open(root / name, os.O_RDONLY | os.O_CLOEXEC)

        self._shards = OpenShards(dataset, open_tar, _open_at_most)
        _in_use.add(self)

    def fill(
        self, places: Mapping[int, SamplePlace], columns: ByteColumns, *, rest: bool = False
    ) -> dict[int, ShelfFound]:
        least = sum(column.shape[1] for column in columns)
        found: dict[int, ShelfFound] = dict.fromkeys(places, NONE)
        reads = []
        opened: dict[int, OpenShard] = {}  # until all is read
        for row, (shard, index) in places.items():
            try:
                if shard not in opened:
                    opened[shard] = self._shards.get(shard)
                start, end = reach(opened[shard], index)
                if end - start < least:
                    raise too_short()
            except (BadSampleError, NotFoundError) as error:
                found[row] = error
            else:
                nbytes = end - start if rest else least
                reads.append(_Read(row, opened[shard].fd, start, nbytes))
        return found | _done(reads, columns, least if rest else None) if reads else found

    def expect(self, wanted: WantedRows, soon: WantedRows) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Files close with the last reader."""
        _in_use.discard(self)


_in_use: "weakref.WeakSet[LocalShelf]" = weakref.WeakSet()


def _open_at_most() -> int:
    """All streams of all loaders share a third of the files that the process may open; what is
    being read comes to that."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY:
        return OPEN_SHARDS
    return max(1, min(OPEN_SHARDS, allowed // 3 // max(1, len(_in_use))))


def too_short() -> BadSampleError:
    return BadSampleError("it has fewer bytes than it should", code="truncated")


def _done(
    reads: Sequence[_Read], columns: ByteColumns, tails_from: int | None
) -> dict[int, ShelfFound]:
    """What each row has after its first bytes, if it is wanted."""
    rows, fds, starts, sizes = (list(each) for each in zip(*reads, strict=True))
    tails: list[Bytes] = []
    if tails_from is not None:
        tails = [np.empty(size - tails_from, np.uint8) for size in sizes]
    vectors = np.empty((len(reads), len(columns) + bool(tails), 2), np.uint64)
    for part, column in enumerate(columns):
        last = column[max(rows)].data
        if last.readonly or not last.c_contiguous or last.itemsize != 1:
            raise ValueError("the rows of a column must be bytes to write to, one after another")
        vectors[:, part, 0] = address_of(column) + np.multiply(rows, column.strides[0])
        vectors[:, part, 1] = column.shape[1]
    if tails:
        vectors[:, -1] = [(address_of(tail), len(tail)) for tail in tails]
    found: list[ShelfFound] = [tail.data for tail in tails] or [NONE] * len(reads)
    for number in np.flatnonzero(read_all(fds, starts, vectors) != sizes).tolist():
        buffers = [column[rows[number]] for column in columns] + list(tails[number : number + 1])
        try:
            _fill_slowly(fds[number], buffers, starts[number])
        except BadSampleError as error:
            found[number] = error
    return dict(zip(rows, found, strict=True))


def _fill_slowly(fd: int, buffers: Sequence[Bytes], start: int) -> None:
    """Over 2 GB, or on a network file system, one call may bring less than all."""
    for buffer in buffers:
        view = buffer.data
        while len(view):
            count = os.preadv(fd, [view], start)
            if not count:
                raise too_short()
            start += count
            view = view[count:]
