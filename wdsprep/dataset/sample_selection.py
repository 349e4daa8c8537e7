"""Some samples of some shards, in columns, whatever dataset the shards are of.

A selection is a list of *runs*, each of one shard, or of one shape in it. The samples of a run are
neighbours from one number on, or have any numbers that rise, which then lie in an array or in a
file that is mapped. An object for each run would be 40 million for a million shards of 40 shapes.

Loaders know what they serve by digests that stand in their states. So the three functions at the
end give the same text for ever.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from wdsprep.dataset.random_numbers import Ints

if TYPE_CHECKING:
    from wdsprep.dataset.kept_file import KeptFile, KeptWriter

SAMPLES_AT_ONCE = 1 << 20  # so many are computed at a time
Numbers = NDArray[np.uint32]
"""The numbers of samples in their tars."""
RunStarts = NDArray[np.int32] | Ints


class ShardSamples(NamedTuple):
    """Samples of one shard of a list, by their numbers in its tar, which rise.

    It means something only beside the list of shards that the selection is of.
    """

    shard: int
    numbers: Numbers


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class SampleSelection:
    """Samples of a list of shards, in runs: samples of one shard, or of one shape in it.

    For each run, `shards` says which shard of the list it is of, and `counts` how many samples it
    has. Without `numbers`, `starts` is the number of its first sample in the shard, and the others
    follow it one by one. With them, the samples of a run are `numbers[start : start + count]`. What
    `holds` these is an array, or a file that each process maps for itself.
    """

    shards: NDArray[np.int32]
    starts: RunStarts
    counts: Ints
    holds: "Numbers | KeptFile | None" = None

    @classmethod
    def all_of(cls, sizes: Ints) -> "SampleSelection":
        """Return the selection of all samples of shards, from the size of each."""
        shards = np.arange(len(sizes), dtype=np.int32)
        starts = np.zeros(len(sizes), np.int32)  # pages of zeros take no memory as yet
        return cls(shards=shards, starts=starts, counts=sizes)

    @classmethod
    def from_numbers(cls, per_shard: Iterable[NDArray[Any]]) -> "SampleSelection":
        """Return a selection with one run for each shard, from the numbers of its samples."""
        arrays = [np.asarray(array, np.uint32) for array in per_shard]
        counts = np.array([*map(len, arrays)], np.int64)
        numbers = np.concatenate([np.empty(0, np.uint32), *arrays])
        shards = np.arange(len(arrays), dtype=np.int32)
        starts = np.cumsum(counts) - counts
        return cls(shards=shards, starts=starts, counts=counts, holds=numbers)

    @classmethod
    def from_file(cls, file: "KeptFile") -> "SampleSelection":
        """Return the selection that `keep_selection` wrote, with one run for each shard."""
        ends = file.arrays["starts"]
        shards = np.arange(len(ends) - 1, dtype=np.int32)
        return cls(shards=shards, starts=ends[:-1], counts=np.diff(ends), holds=file)

    @property
    def numbers(self) -> Numbers | None:
        if self.holds is None or isinstance(self.holds, np.ndarray):
            return self.holds
        return self.holds.arrays["numbers"]

    @property
    def samples(self) -> int:
        return int(self.counts.sum())

    def locate(self, runs: Ints, indices: Ints) -> tuple[Ints, Ints]:
        """Return the shards and numbers of samples, given by their runs and places in these."""
        places = indices + self.starts[runs]
        if self.numbers is not None:
            places = self.numbers[places].astype(np.int64)
        return self.shards[runs].astype(np.int64), places

    def per_shard(self) -> Iterator[ShardSamples]:
        """Yield for each run its shard and the numbers of its samples. A shard may come again."""
        numbers = self.numbers
        columns = (self.shards.tolist(), self.starts.tolist(), self.counts.tolist())
        for shard, start, count in zip(*columns, strict=True):
            if numbers is None:
                yield ShardSamples(shard, np.arange(start, start + count, dtype=np.uint32))
            else:
                yield ShardSamples(shard, numbers[start : start + count])

    def pick(self, runs: RunStarts | NDArray[np.bool_]) -> "SampleSelection":
        """Return the selection with some runs alone, by their places or by a mask."""
        columns = (self.shards[runs], self.starts[runs], self.counts[runs])
        return replace(self, shards=columns[0], starts=columns[1], counts=columns[2])

    def split(self, counts: NDArray[np.int32]) -> Iterator["SampleSelection"]:
        """Yield a selection for each column of `counts`, which has a row for each run.

        A row says how many samples of the run go to the first column, how many after these to the
        second, and so on.
        """
        starts = self.starts.copy()
        for per_run in map(np.ascontiguousarray, counts.T):
            runs = np.flatnonzero(per_run)
            run_counts = per_run[runs].astype(np.int64)
            yield replace(self, shards=self.shards[runs], starts=starts[runs], counts=run_counts)
            starts += per_run

    def filter(self, mask: NDArray[np.bool_]) -> "SampleSelection":
        """Return the selection of the samples for which a mask is true, without empty runs.

        The mask has a value for each sample, run after run.
        """
        if mask.all():
            return self.pick(self.counts > 0)
        parts = []
        counts = np.zeros_like(self.counts)
        ends = np.cumsum(self.counts)
        for block in self.blocks():
            begin = int(ends[block.start] - self.counts[block.start])
            is_kept = mask[begin : int(ends[block.stop - 1])]
            parts.append(self.flat(block)[is_kept].astype(np.uint32))
            runs = np.repeat(np.arange(block.stop - block.start), self.counts[block])
            counts[block] = np.bincount(runs[is_kept], minlength=block.stop - block.start)
        numbers = np.concatenate([np.empty(0, np.uint32), *parts])
        starts = np.cumsum(counts) - counts
        selection = replace(self, starts=starts, counts=counts, holds=numbers)
        return selection.pick(counts > 0)

    def intersect(self, other: "SampleSelection") -> "SampleSelection":
        """Return the selection of the samples that another selection has too, without empty runs.

        The other one has numbers, in one run for each shard.
        """
        if other.numbers is None:
            raise ValueError("a selection of neighbours cannot be looked up in")
        if self.numbers is None:
            bounds = self.starts, self.starts + self.counts
            low = other.starts[self.shards].astype(np.int64)
            high = low + other.counts[self.shards]
            first, last = (_bisect(other.numbers, low, high, edge) for edge in bounds)
            selection = replace(other, shards=self.shards, starts=first, counts=last - first)
            return selection.pick(selection.counts > 0)
        masks = [np.empty(0, np.bool_)]
        for block in self.blocks():
            counts, shards = self.counts[block], self.shards[block]
            numbers, starts = self.flat(block), other.starts[shards].astype(np.int64)
            low = np.repeat(starts, counts)
            high = low + np.repeat(other.counts[shards], counts)
            at = _bisect(other.numbers, low, high, numbers)
            is_in = at < high
            is_in[is_in] = other.numbers[at[is_in]] == numbers[is_in]
            masks.append(is_in)
        return self.filter(np.concatenate(masks))

    def blocks(self) -> Iterator[slice]:
        """Yield slices of the runs, each of about `SAMPLES_AT_ONCE` samples."""
        ends = np.cumsum(self.counts)
        first = np.flatnonzero(np.diff(ends // SAMPLES_AT_ONCE, prepend=-1)).tolist()
        return (slice(a, b) for a, b in pairwise([*first, len(ends)]))

    def flat(self, runs: slice) -> Ints:
        """Return the numbers of all samples of some runs, one after another."""
        starts, counts = self.starts[runs].astype(np.int64), self.counts[runs]
        shifts = starts - (np.cumsum(counts) - counts)
        if self.numbers is not None and not np.diff(shifts).any():  # as they stand there
            begin = int(shifts[0])
            return self.numbers[begin : begin + int(counts.sum())].astype(np.int64)
        places: Ints = np.arange(int(counts.sum())) + np.repeat(shifts, counts)
        return places if self.numbers is None else self.numbers[places].astype(np.int64)

    def places_of(self, numbers: Ints, runs: slice, counts: Ints) -> Ints:
        """Return for each of these sample numbers its place within its run.

        The numbers stand run after run; `counts` says how many of them each run has.
        """
        first: Ints = np.repeat(self.starts[runs].astype(np.int64), counts)
        if self.numbers is None:
            return numbers - first
        last: Ints = first + np.repeat(self.counts[runs], counts)
        return _bisect(self.numbers, first, last, numbers) - first


def _bisect(numbers: Numbers, low: Ints, high: Ints, wanted: NDArray[Any]) -> Ints:
    """Return for each range the place of the first number that is no less than the wanted one.

    Numbers rise in each range from low to high. All ranges are searched at once.
    """
    while (is_open := low < high).any():
        middle = (low + high) // 2
        is_less = is_open.copy()
        is_less[is_open] = numbers[middle[is_open]] < wanted[is_open]
        low = np.where(is_less, middle + 1, low)
        high = np.where(is_open & ~is_less, middle, high)
    return low


def ranges(numbers: Numbers) -> list[list[int]]:
    """Return the ranges of consecutive numbers, each as its first number and the one behind it."""
    ends = np.flatnonzero(np.diff(numbers.astype(np.int64)) != 1) + 1
    first = numbers[np.concatenate([[0], ends])].tolist()
    last = numbers[np.concatenate([ends, [len(numbers)]]) - 1].tolist()
    return [[begin, end + 1] for begin, end in zip(first, last, strict=True)]


def keep_selection(writer: "KeptWriter", shards: int, samples: Iterable[ShardSamples]) -> None:
    """Write which samples of each shard are selected, for `SampleSelection.from_file` to read.

    `shards` says how many shards there are. `samples` has the numbers of the samples in their
    shards, in the order of the shards, those of one shard all at once or in parts.
    """
    counts = np.zeros(shards + 1, np.int64)

    def numbers() -> Iterator[Numbers]:
        for shard, part in samples:
            counts[shard + 1] += len(part)
            yield part

    writer.add("numbers", "<u4", numbers())
    writer.add("starts", "<i8", [np.cumsum(counts)])


def _hash(digest: blake3, numbers: NDArray[Any], dtype: str) -> None:
    digest.update(np.ascontiguousarray(numbers, dtype).tobytes())


# --- digests that stand in states
def digest_of_shards(shards: Iterable[tuple[str, int, str | int]]) -> str:
    """Return the digest of a dataset, from each shard's name, samples, and what it is made of."""
    return hashlib.sha256(json.dumps(list(shards)).encode()).hexdigest()


def digest_of_shape(digest: str, shape: str, counts: NDArray[np.int32]) -> str:
    """Return the digest of one shape, from the dataset and the samples of it in each shard."""
    known = f"{digest} {shape} ".encode() + counts.astype("<i4").tobytes()
    return hashlib.sha256(known).hexdigest()


def digest_of_selected(
    digest: str, of: SampleSelection, selected: SampleSelection, shards: int
) -> str:
    """Return the digest of the samples `selected` from those in `of`, whose own digest is given.

    It depends on which samples are selected, not on where they lie in the tars. `shards` is the
    length of the list of shards that both selections are of.
    """
    inner, starts = blake3(), np.zeros(shards + 1, np.int64)
    starts[selected.shards + 1] = selected.counts
    runs = np.searchsorted(of.shards, selected.shards)
    of = of.pick(runs)
    for block in selected.blocks():
        places = of.places_of(selected.flat(block), block, selected.counts[block])
        _hash(inner, places, "<u4")
    _hash(inner, np.cumsum(starts), "<i8")
    return hashlib.sha256(f"{digest} {inner.hexdigest()}".encode()).hexdigest()
