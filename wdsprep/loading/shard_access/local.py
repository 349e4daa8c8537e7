"""Read samples of a local dataset by shard and number, with one positioned read each.

A *shelf* gives the bytes of many samples at a time. The first bytes of each go where the caller
wants them, and the rest is returned. On a local disk that is one system call, straight into where
the bytes belong. A shelf that fetches over a network (`remote`) is told beforehand which samples
will be wanted (`expect`).
"""

import os
import resource
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from wdsprep.dataset.aio import Bytes, address_of, read_all
from wdsprep.dataset.open_shards import OPEN_SHARDS, OpenShard, OpenShards, sample_range, too_short
from wdsprep.dataset.random_numbers import Ints
from wdsprep.dataset.tar import BLOCK
from wdsprep.dataset.tar.members import BadSampleError
from wdsprep.errors import NotFoundError
from wdsprep.loading.datasets import Dataset, missing_shard_advice
from wdsprep.store.local import open_file

NONE = memoryview(b"")

ByteColumns = Sequence[Bytes]
"""Memory for the first bytes of samples, part by part: a row for each sample."""


class SamplePlaces(NamedTuple):
    """The places of samples: the row that each is for, its shard, and its number there."""

    rows: Sequence[int]
    shards: Sequence[int]
    indices: Sequence[int]


class ReadSample(NamedTuple):
    """The size of a sample that was read, and its bytes after those in the columns."""

    nbytes: int
    rest: memoryview


ReadResult = ReadSample | BadSampleError | NotFoundError  # or why nothing came
WantedRows = tuple[Ints, Ints]  # shards and indices, the most urgent first


class Shelf(Protocol):
    """A source of the samples of one dataset, for any number of threads."""

    @property
    def fetches(self) -> bool:
        """True if the shelf fetches ahead, and so needs calls of `expect`."""

    def fill(
        self, places: SamplePlaces, columns: ByteColumns, *, spare: int = 0, rest: bool = False
    ) -> list[ReadResult]:
        """Put the first bytes of each sample into its row of the columns, one column after another.

        With `rest`, return the remaining bytes too; without columns these are all bytes. A
        sample may be shorter than the columns by up to `spare` bytes, which the last column
        then lacks.
        """

    def expect(self, wanted: WantedRows, soon: WantedRows) -> None:
        """Announce the samples that will be asked for, each once, and those of the next call.

        The shelf may fetch both from now on.
        """

    def close(self) -> None: ...


class _Reads(NamedTuple):
    """The reads to do: for each its number among the samples asked for, its row, and its place."""

    numbers: list[int]
    rows: list[int]
    fds: list[int]
    starts: list[int]
    sizes: list[int]
    """The bytes to read of each sample, which may be less than all of it."""
    wholes: list[int]
    opened: dict[int, OpenShard]
    """The open shards, held here so that no file closes before all is read."""


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

    def fill(
        self, places: SamplePlaces, columns: ByteColumns, *, spare: int = 0, rest: bool = False
    ) -> list[ReadResult]:
        most = sum(column.shape[1] for column in columns)
        sound = self._find_sound(places, most - spare, most if not rest else None)
        if sound is not None:
            return _read_samples(sound, columns, most if rest else None)
        found: list[ReadResult] = [ReadSample(0, NONE)] * len(places.rows)
        opened: dict[int, OpenShard] = {}
        reads = _Reads([], [], [], [], [], [], opened)
        for number, (row, shard, index) in enumerate(zip(*places, strict=True)):
            try:
                if shard not in opened:
                    opened[shard] = self._shards.get(shard)
                start, end = sample_range(opened[shard], index)
                if end - start < most - spare:
                    raise too_short()
            except (BadSampleError, NotFoundError) as error:
                found[number] = error
            else:
                reads.numbers.append(number)
                reads.rows.append(row)
                reads.fds.append(opened[shard].fd)
                reads.starts.append(start)
                reads.sizes.append(end - start if rest else min(end - start, most))
                reads.wholes.append(end - start)
        if reads.numbers:
            came = _read_samples(reads, columns, most if rest else None)
            for number, one in zip(reads.numbers, came, strict=True):
                found[number] = one
        return found

    def _find_sound(self, places: SamplePlaces, least: int, most: int | None) -> "_Reads | None":
        """Return the reads of all samples, or None if anything is wrong with one of them.

        All are checked at once: one by one takes three times as long, and delays the other
        threads.
        """
        rows, shards, indices = places
        try:
            opened = {shard: self._shards.get(shard) for shard in set(shards)}
        except NotFoundError:
            return None
        each = [opened[shard] for shard in shards]
        starts = [one.offsets[index] for one, index in zip(each, indices, strict=True)]
        ends = [one.offsets[index + 1] for one, index in zip(each, indices, strict=True)]
        first, last = np.array(starts, np.uint64), np.array(ends, np.uint64)
        is_sound = (first < last) & ((first | last) % BLOCK == 0)
        is_sound &= last <= np.array([one.nbytes for one in each], np.uint64)
        sizes = (last - first).view(np.int64)
        if not (is_sound & (sizes >= least)).all():
            return None
        wholes = sizes.tolist()
        wanted = wholes if most is None else np.minimum(sizes, most).tolist()
        fds = [one.fd for one in each]
        return _Reads([*range(len(rows))], [*rows], fds, starts, wanted, wholes, opened)

    def expect(self, wanted: WantedRows, soon: WantedRows) -> None:
        """Do nothing: a local shelf does not read ahead."""

    def close(self) -> None:
        """Leave the count of shelves in use; files close with their last reader."""
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


def _read_samples(reads: _Reads, columns: ByteColumns, tails_from: int | None) -> list[ReadResult]:
    """Read all samples into the columns; return what each has after them, if that is wanted."""
    tails: list[Bytes] = []
    if tails_from is not None:
        tails = [np.empty(max(0, size - tails_from), np.uint8) for size in reads.sizes]
    before = 0
    vectors = np.empty((len(reads.rows), len(columns) + bool(tails), 2), np.uint64)
    for part, column in enumerate(columns):
        last = column[max(reads.rows)].data
        if last.readonly or not last.c_contiguous or last.itemsize != 1:
            raise ValueError("the rows of a column must be bytes to write to, one after another")
        vectors[:, part, 0] = address_of(column) + np.multiply(reads.rows, column.strides[0])
        vectors[:, part, 1] = np.minimum(np.subtract(reads.sizes, before), column.shape[1])
        before += column.shape[1]
    if tails:
        vectors[:, -1] = [(address_of(tail), len(tail)) for tail in tails]
    rests = [tail.data for tail in tails] or [NONE] * len(reads.rows)
    found: list[ReadResult] = list(map(ReadSample, reads.wholes, rests))
    short = read_all(reads.fds, reads.starts, vectors) != reads.sizes
    for number in np.flatnonzero(short).tolist():
        buffers = [
            column[reads.rows[number]][: int(nbytes)]
            for column, nbytes in zip(columns, vectors[number, :, 1], strict=False)
        ]
        buffers += tails[number : number + 1]
        try:
            _fill_slowly(reads.fds[number], buffers, reads.starts[number])
        except BadSampleError as error:
            found[number] = error
    return found


def _fill_slowly(fd: int, buffers: Sequence[Bytes], start: int) -> None:
    """Read one sample with as many calls as it takes.

    Over 2 GB, or on a network file system, one call may bring less than all.
    """
    for buffer in buffers:
        view = buffer.data
        while len(view):
            count = os.preadv(fd, [view], start)
            if not count:
                raise too_short()
            start += count
            view = view[count:]
