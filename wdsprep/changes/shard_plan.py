"""Plan the shards of a selection: runs of selected samples, bounded in number and bytes.

A shard has samples of one bucket. It also ends where the next key does not rise, which is usually
between two datasets. So keys rise in each shard, as `verify` and `inspect` expect.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from wdsprep.changes.selected_samples import OriginShards, read_keys
from wdsprep.dataset.file_names import image_shard, slice_name
from wdsprep.dataset.receipts import Shard
from wdsprep.dataset.sample_selection import Numbers, SampleSelection, ShardSamples, ranges
from wdsprep.dataset.samples import key_order
from wdsprep.dataset.sealed_json import canonical_json
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.errors import UsageError

Order = tuple[int, str]
"""A key as it is sorted: keys rise in each shard in this order."""


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


@dataclass(frozen=True, slots=True, eq=False)
class _SelectedShard:
    """The selected samples of a source shard: their sizes, and their first and last key."""

    samples: ShardSamples
    origin: int
    sizes: NDArray[np.int64]
    first: bytes
    last: bytes


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
    look = partial(_look_at_shard, shards)
    cutter = _Cutter(shards=shards, limits=limits, prefixes=prefixes, rise=rise)
    seen = []
    for looked in map_ahead(look, selection.per_shard(), shards.readers):
        seen.append(replace(looked, sizes=_NONE))
        cutter.add(looked)
    cutter.end()
    if len(shards.origins) > 1 and not any(prefixes):
        _check_apart(_overlapping(seen, len(shards.origins)) if rise else seen, shards)
    return cutter.done


_NONE = np.empty(0, np.int64)


def _look_at_shard(shards: OriginShards, samples: ShardSamples) -> _SelectedShard:
    """Return the selected samples of a shard with their sizes and their first and last key."""
    origin, shard = shards.of(samples)
    numbers = samples.numbers
    with origin.open(shard) as reader:
        sizes = reader.sizes[numbers]
        first, last = read_keys(reader, numbers[[0, -1]].tolist())
    number, _shard = shards.shards[samples.shard]
    return _SelectedShard(samples, number, sizes, first, last)


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
    _last: Order = (0, "")

    def add(self, looked: _SelectedShard) -> None:
        origin, shard = self.shards.shards[looked.samples.shard]
        first, last = (self._order(origin, key) for key in (looked.first, looked.last))
        falls = self.rise and self._last >= first
        if self._pieces and (falls or self._pieces[-1].shard.bucket != shard.bucket):
            self.end()
        numbers, sizes = looked.samples.numbers, looked.sizes
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

    def _order(self, origin: int, key: bytes) -> Order:
        return key_order(self.prefixes[origin] + key.decode("utf-8", "surrogateescape"))


# --- keys of several datasets
def _overlapping(seen: Sequence[_SelectedShard], datasets: int) -> list[_SelectedShard]:
    """Return the shards whose keys overlap with those of a shard of another dataset."""
    spans: list[list[tuple[Order, Order]]] = [[] for _ in range(datasets)]
    for one in seen:
        spans[one.origin].append((_order(one.first), _order(one.last)))
    reach = [_reach(sorted(each)) for each in spans]

    def overlaps(one: _SelectedShard) -> bool:
        others = (each for at, each in enumerate(reach) if at != one.origin)
        return any(_reaches(each, _order(one.first), _order(one.last)) for each in others)

    return [one for one in seen if overlaps(one)]


Reach = tuple[list[Order], list[Order]]
"""The starts of spans in their order, and the furthest end of all spans up to each."""


def _reach(spans: Sequence[tuple[Order, Order]]) -> Reach:
    return [first for first, _ in spans], [*accumulate((last for _, last in spans), max)]


def _reaches(reach: Reach, first: Order, last: Order) -> bool:
    begin, end = reach
    at = bisect_right(begin, last)
    return at > 0 and end[at - 1] >= first


def _order(key: bytes) -> Order:
    return key_order(key.decode("utf-8", "surrogateescape"))


def _check_apart(some: Iterable[_SelectedShard], shards: OriginShards) -> None:
    """Raise UsageError if two datasets have the same key."""
    found: dict[bytes, int] = {}
    for origin, keys in map_ahead(partial(_keys, shards), some, shards.readers):
        for key in keys:
            if (other := found.setdefault(key, origin)) != origin:
                both = " and ".join(shards.origins[each].shown for each in (other, origin))
                shown = key.decode("utf-8", "replace")
                raise UsageError(
                    f"{both} both have the key {shown}: give --prefix, which puts the number of "
                    "its dataset (0, 1, ...) before each key"
                )


def _keys(shards: OriginShards, looked: _SelectedShard) -> tuple[int, list[bytes]]:
    origin, shard = shards.of(looked.samples)
    with origin.open(shard) as reader:
        return looked.origin, read_keys(reader, looked.samples.numbers.tolist())
