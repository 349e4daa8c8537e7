"""Read samples of local datasets by shard and number, all that a thread wants in one call.

A *shelf* gives the bytes of many samples of a dataset at a time. The first bytes of each go where
the caller wants them, and the rest is returned. On local disks that is one system call for all
datasets that are joined, straight into where the bytes belong. A shelf that fetches over a network
(`remote`) is told beforehand which samples will be wanted (`expect`).
"""

import os
import resource
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from wdsprep.dataset.aio import Bytes, Vectors, address_of, read_all
from wdsprep.dataset.open_shards import OPEN_SHARDS, OpenShard, OpenShards, sample_range, too_short
from wdsprep.dataset.random_numbers import Ints
from wdsprep.dataset.tar import BLOCK
from wdsprep.dataset.tar.members import BadSampleError
from wdsprep.errors import NotFoundError
from wdsprep.loading.served_datasets import Dataset, missing_shard_advice
from wdsprep.store.local import open_file

NONE = memoryview(b"")

ByteColumns = Sequence[Bytes]
"""Memory for the first bytes of samples, part by part: a row for each sample."""


class WantedSamples(NamedTuple):
    """Samples to read: their shards and numbers, and the rows of the columns that they go to.

    The first bytes of each sample go to its row of the columns, one column after another. With
    `rest`, its remaining bytes are wanted too; without columns these are all bytes. A sample may
    be shorter than the columns by up to `spare` bytes, which the last column then lacks.
    """

    rows: Sequence[int]
    shards: Sequence[int]
    indices: Sequence[int]
    columns: ByteColumns
    spare: int = 0
    rest: bool = False

    @property
    def columns_nbytes(self) -> int:
        return sum(column.shape[1] for column in self.columns)

    @property
    def least_nbytes(self) -> int:
        return self.columns_nbytes - self.spare

    @property
    def parts(self) -> int:
        """The number of places in memory that a sample goes to."""
        return len(self.columns) + self.rest


ReadError = BadSampleError | NotFoundError


class ReadSamples(NamedTuple):
    """The samples that were read: the size of each, and its bytes after those in the columns.

    `rests` is empty if no bytes after the columns are wanted. `errors` has, by number, the
    reason why a sample could not be read.
    """

    sizes: Ints
    rests: Sequence[memoryview]
    errors: Mapping[int, ReadError]


WantedRows = tuple[Ints, Ints]  # shards and indices, the most urgent first


class Shelf(Protocol):
    """A source of the samples of one dataset, for any number of threads."""

    @property
    def fetches(self) -> bool:
        """True if the shelf fetches ahead, and so needs calls of `expect`."""

    def read(self, wanted: WantedSamples) -> ReadSamples: ...

    def expect(self, wanted: WantedRows, soon: WantedRows) -> None:
        """Announce the samples that will be read next, each once, and those of the next call.

        The shelf may fetch both from now on.
        """

    def close(self) -> None: ...


class LocalShelf:
    """A shelf that reads from a local disk; only the page cache reads ahead."""

    fetches = False

    def __init__(self, dataset: Dataset, root: Path) -> None:
        def open_tar(name: str) -> int:
            return open_file(root / name)[0]

        self._shards = OpenShards(
            dataset, open_tar, _max_open_shards, missing_shard_advice(dataset)
        )
        _in_use.add(self)

    def open(self, shard: int) -> "AnyShard":
        try:
            return self._shards.get(shard)
        except NotFoundError as error:
            return MissingShard(error)

    def read(self, wanted: WantedSamples) -> ReadSamples:
        (read,) = _read_local([(self, wanted)])
        return read

    def expect(self, wanted: WantedRows, soon: WantedRows) -> None:
        """Do nothing: a local shelf does not read ahead."""

    def close(self) -> None:
        """Remove this shelf from those in use; its files close with their last reader."""
        _in_use.discard(self)


_in_use: "weakref.WeakSet[LocalShelf]" = weakref.WeakSet()


def _max_open_shards() -> int:
    """Return how many shards a shelf may keep open.

    All shelves of all loaders share a third of the files that the process may open. Shards that
    are being read come on top.
    """
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY:
        return OPEN_SHARDS
    return max(1, min(OPEN_SHARDS, allowed // 3 // max(1, len(_in_use))))


class MissingShard:
    """A missing shard, used in place of an open one; all of its samples are empty."""

    fd, nbytes = -1, 0
    offsets: Mapping[int, int] = defaultdict(int)

    def __init__(self, error: NotFoundError) -> None:
        self.error = error


AnyShard = OpenShard | MissingShard


def read_samples(wanted: Sequence[tuple[Shelf, WantedSamples]]) -> Iterator[ReadSamples]:
    """Yield the samples read from each shelf; those on local disks are read in one call."""
    local = [(shelf, some) for shelf, some in wanted if isinstance(shelf, LocalShelf)]
    came = iter(_read_local(local) if local else ())
    for shelf, some in wanted:
        yield next(came) if isinstance(shelf, LocalShelf) else shelf.read(some)


def _read_local(wanted: Sequence[tuple[LocalShelf, WantedSamples]]) -> list[ReadSamples]:
    """Read samples of several local shelves in one call.

    All are checked at once: one by one takes three times as long, and delays the other threads.
    """
    opened: list[AnyShard] = []  # held here, so that no file closes before all is read
    starts: list[int] = []
    ends: list[int] = []
    bounds = [0]
    for shelf, some in wanted:
        shards = {shard: shelf.open(shard) for shard in set(some.shards)}
        own = [shards[shard] for shard in some.shards]
        opened += own
        starts += [one.offsets[index] for one, index in zip(own, some.indices, strict=True)]
        ends += [one.offsets[index + 1] for one, index in zip(own, some.indices, strict=True)]
        bounds.append(len(opened))
    sizes, is_sound = _check_places(opened, starts, ends)
    parts = [slice(*pair) for pair in pairwise(bounds)]
    for part, (_, some) in zip(parts, wanted, strict=True):
        is_sound[part] &= sizes[part] >= some.least_nbytes
    if not (is_whole := bool(is_sound.all())):
        sizes[~is_sound] = 0
    vectors = np.zeros((len(opened), max(some.parts for _, some in wanted), 2), np.uint64)
    tails = [
        _point_to_memory(vectors[part], some, sizes[part])
        for part, (_, some) in zip(parts, wanted, strict=True)
    ]
    fds = [one.fd for one in opened]
    if is_whole:
        came = read_all(fds, starts, vectors)
    else:
        came = np.full(len(opened), -1)
        sound = np.flatnonzero(is_sound)
        some_places = [fds[n] for n in sound.tolist()], [starts[n] for n in sound.tolist()]
        came[sound] = read_all(*some_places, vectors[sound])
    failed = came != vectors[:, :, 1].sum(axis=1).view(np.int64)
    return [
        _read_again(some, opened[part], sizes[part], own_tails, failed[part])
        for part, (_, some), own_tails in zip(parts, wanted, tails, strict=True)
    ]


def _check_places(
    opened: Sequence["AnyShard"], starts: list[int], ends: list[int]
) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the sizes of samples, and a mask of those whose offsets are possible."""
    first, last = np.array(starts, np.uint64), np.array(ends, np.uint64)
    is_sound: NDArray[np.bool_] = (first < last) & ((first | last) % BLOCK == 0)
    is_sound &= last <= np.array([one.nbytes for one in opened], np.uint64)
    return (last - first).view(np.int64), is_sound


def _point_to_memory(vectors: Vectors, some: WantedSamples, sizes: Ints) -> list[Bytes]:
    """Write into `vectors` where the bytes of each sample go, and how many.

    Return new memory for the bytes after the columns, or [] if these are not wanted.
    """
    rows = np.asarray(some.rows)
    for number, column in enumerate(some.columns):
        last = column[rows.max()].data
        if last.readonly or not last.c_contiguous or last.itemsize != 1:
            raise ValueError("the rows of a column must be bytes to write to, one after another")
        vectors[:, number, 0] = address_of(column) + rows * column.strides[0]
        vectors[:, number, 1] = column.shape[1]
    if some.spare:
        before = some.columns_nbytes - some.columns[-1].shape[1]
        last_nbytes = np.minimum(sizes - before, some.columns[-1].shape[1])
        vectors[:, len(some.columns) - 1, 1] = np.maximum(last_nbytes, 0)
    if not some.rest:
        return []
    behind = np.maximum(sizes - some.columns_nbytes, 0)
    tails = [np.empty(nbytes, np.uint8) for nbytes in behind.tolist()]
    vectors[:, len(some.columns), 0] = [*map(address_of, tails)]
    vectors[:, len(some.columns), 1] = behind
    return tails


def _read_again(
    some: WantedSamples,
    opened: Sequence["AnyShard"],
    sizes: Ints,
    tails: Sequence[Bytes],
    failed: NDArray[np.bool_],
) -> ReadSamples:
    """Read again the samples that were not read completely, and return all samples."""
    errors: dict[int, ReadError] = {}
    for number in np.flatnonzero(failed).tolist() if failed.any() else ():
        row = some.rows[number]
        buffers = [*(column[row] for column in some.columns), *tails[number : number + 1]]
        try:
            _read_slowly(opened[number], some.indices[number], some.least_nbytes, buffers)
        except (BadSampleError, NotFoundError) as error:
            errors[number] = error
    return ReadSamples(sizes, [tail.data for tail in tails], errors)


def _read_slowly(one: "AnyShard", index: int, least_nbytes: int, buffers: Sequence[Bytes]) -> None:
    """Read one sample with as many calls as it takes; raise an error if it cannot be read.

    Over 2 GB, or on a network file system, one call may bring less than all.
    """
    if isinstance(one, MissingShard):
        raise one.error
    start, end = sample_range(one, index)
    if end - start < least_nbytes:
        raise too_short()
    for buffer in buffers:
        view = buffer.data[: end - start]
        while len(view):
            count = os.preadv(one.fd, [view], start)
            if not count:
                raise too_short()
            start += count
            view = view[count:]
