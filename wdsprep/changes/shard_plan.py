"""Plan the shards of a selection: runs of selected samples, bounded in number and bytes.

A shard has samples of one bucket. It also ends where the next key does not rise, which is usually
between two datasets. So keys rise in each shard, as `verify` and `inspect` expect.

`spans` has the byte ranges of samples in a tar, and `offsets_without` the index of a tar that lacks
some of its samples. Their offsets are those of an index: where each sample begins, and where the
last one ends.
"""

import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsprep.changes.selected_samples import OriginShards
from wdsprep.dataset.damage import naming_repair
from wdsprep.dataset.file_names import image_shard, is_table, slice_name
from wdsprep.dataset.receipts import Shard
from wdsprep.dataset.sample_selection import Numbers, SampleSelection, ShardSamples, ranges
from wdsprep.dataset.samples import key_order
from wdsprep.dataset.sealed_json import canonical_json
from wdsprep.dataset.shard_reader import ShardReader
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.errors import UsageError

MOST_TWICE = 1_000
"""Hashes of keys that several datasets have of which keys are compared: not all are different."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplesToCopy:
    """Samples of one shard that a new shard gets, and all that a worker needs to find them.

    `origin` is the number of the dataset, and `unit` the unit that made the shard. The digest in
    `shard` tells whether it has changed since. A `ShardSamples` says less: only the number of its
    shard in a list, which no worker has and no receipt keeps.
    """

    origin: int
    unit: str
    shard: Shard
    numbers: Numbers

    def line(self) -> bytes:
        """Return the line of this piece in the inputs of a unit.

        It does not depend on where the dataset is.
        """
        said = {
            "dataset": self.origin,
            "digest": self.shard.digest,
            "samples": ranges(self.numbers),
            "shard": self.shard.name,
        }
        return canonical_json(said) + b"\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedShard:
    """A shard to write, of a selection of images or of latents without images."""

    number: int
    bucket: int
    pieces: tuple[SamplesToCopy, ...]
    nbytes: int

    @property
    def slice(self) -> str:
        return slice_name(self.number)

    @property
    def name(self) -> str:
        return image_shard(self.bucket, self.slice, 0)

    @property
    def samples(self) -> int:
        return sum(len(piece.numbers) for piece in self.pieces)

    @property
    def inputs(self) -> bytes:
        return b"".join(piece.line() for piece in self.pieces)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardLimits:
    """The limits on the samples and the bytes of a shard."""

    samples: int
    nbytes: int


def cut_into_shards(
    selection: SampleSelection,
    shards: OriginShards,
    limits: ShardLimits,
    *,
    prefixes: Sequence[str],
    rise: bool,
) -> list[PlannedShard]:
    """Divide the selected samples into shards.

    `prefixes` are put before the keys of each dataset. Without them, raise UsageError if two
    datasets have the same key. With `rise`, for images, a shard also ends where keys do not rise.
    """
    cutter = _Cutter(shards=shards, limits=limits, prefixes=prefixes, rise=rise)
    sizes = map_ahead(partial(_read_sizes, shards), selection.per_shard(), shards.readers)
    for own, (samples, keys) in zip(sizes, shards.read_keys(selection), strict=True):
        cutter.add(samples, own, keys)
    cutter.end()
    if len(shards.origins) > 1 and not any(prefixes):
        _check_apart(selection, shards)
    return cutter.done


def _read_sizes(shards: OriginShards, samples: ShardSamples) -> NDArray[np.int64]:
    origin, shard = shards.of(samples)
    if is_table(shard.name):
        return np.full(len(samples.numbers), shard.nbytes // shard.samples)
    with naming_repair(origin.store):
        return ShardReader(origin.store, shard).sizes[samples.numbers]


@dataclass(kw_only=True, slots=True)
class _Cutter:
    """The state of dividing samples into shards: those that are done, and the open one."""

    shards: OriginShards
    limits: ShardLimits
    prefixes: Sequence[str]
    rise: bool
    done: list[PlannedShard] = field(default_factory=list)
    _pieces: list[SamplesToCopy] = field(default_factory=list)
    _samples: int = 0
    _nbytes: int = 0
    _last: tuple[int, str] = (0, "")

    def add(self, samples: ShardSamples, sizes: NDArray[np.int64], keys: Sequence[str]) -> None:
        """Add the selected samples of a shard, given their sizes and their keys."""
        origin, shard = self.shards.shards[samples.shard]
        first, last = (key_order(self.prefixes[origin] + keys[at]) for at in (0, -1))
        falls = self.rise and self._last >= first
        if self._pieces and (falls or self._pieces[-1].shard.bucket != shard.bucket):
            self.end()
        numbers = samples.numbers
        unit = self.shards.origins[origin].units[shard.name]
        while len(numbers):
            fit = self._count_fitting(sizes)
            if not fit and self._pieces:
                self.end()
                continue
            fit = max(1, fit)
            self._pieces.append(SamplesToCopy(origin, unit, shard, numbers[:fit]))
            self._samples += fit
            self._nbytes += int(sizes[:fit].sum())
            numbers, sizes = numbers[fit:], sizes[fit:]
        self._last = last

    def end(self) -> None:
        if self._pieces:
            bucket, pieces = self._pieces[0].shard.bucket, tuple(self._pieces)
            made = PlannedShard(
                number=len(self.done), bucket=bucket, pieces=pieces, nbytes=self._nbytes
            )
            self.done.append(made)
        self._pieces, self._samples, self._nbytes = [], 0, 0

    def _count_fitting(self, sizes: NDArray[np.int64]) -> int:
        """Return how many samples, of these sizes and in this order, fit into the open shard."""
        ends = sizes[: self.limits.samples - self._samples].cumsum()
        return int(np.searchsorted(ends, self.limits.nbytes - self._nbytes, side="right"))


def _check_apart(selection: SampleSelection, shards: OriginShards) -> None:
    """Raise UsageError if two datasets have the same key.

    Only the hashes of all keys are held at a time.
    """
    hashes: list[list[NDArray[np.int64]]] = [[] for _ in shards.origins]
    for samples, keys in shards.read_keys(selection):
        own = np.fromiter(map(hash, keys), np.int64, len(keys))
        hashes[shards.shards[samples.shard][0]].append(own)
    unique = [np.unique(np.concatenate([np.empty(0, np.int64), *own])) for own in hashes]
    values, counts = np.unique(np.concatenate(unique), return_counts=True)
    twice = {*values[counts > 1][:MOST_TWICE].tolist()}
    found: dict[str, int] = {}
    for samples, keys in shards.read_keys(selection) if twice else ():
        origin = shards.shards[samples.shard][0]
        for key in (key for key in keys if hash(key) in twice):
            if (other := found.setdefault(key, origin)) != origin:
                both = " and ".join(shards.origins[each].shown for each in (other, origin))
                raise UsageError(
                    f"{both} both have the key {key}: give --prefix, which puts the number of "
                    "its dataset (0, 1, ...) before each key"
                )


class Span(NamedTuple):
    """The bytes of samples that lie together in a tar, from `start` to `end`.

    `first` and `last` are places in the list of sample numbers that were asked for. The span
    has the samples from `first` up to, but not including, `last`.
    """

    first: int
    last: int
    start: int
    end: int


def spans(
    offsets: NDArray[np.int64],
    numbers: NDArray[np.uint32],
    *,
    gap_nbytes: int = 0,
    most_nbytes: int = sys.maxsize,
) -> Iterator[Span]:
    """Yield the byte ranges in a tar that hold the samples with these numbers, which rise.

    Samples share a range if the gap between them has at most `gap_nbytes`. No range has more
    than `most_nbytes`, unless a single sample has more.
    """
    starts, ends = (offsets[which].tolist() for which in (numbers, numbers + 1))
    first = 0
    for at in range(1, len(starts)):
        if starts[at] - ends[at - 1] > gap_nbytes or ends[at] - starts[first] > most_nbytes:
            yield Span(first, at, starts[first], ends[at - 1])
            first = at
    if starts:
        yield Span(first, len(starts), starts[first], ends[-1])


def offsets_without(offsets: NDArray[np.int64], numbers: Sequence[int]) -> "array[int]":
    """Return the offsets that a tar has after the samples with these numbers are taken out."""
    sizes = np.delete(np.diff(offsets), np.asarray(numbers, np.int64))
    left = np.concatenate([offsets[:1], sizes]).cumsum()
    return array("Q", left.astype("u8").tobytes())
