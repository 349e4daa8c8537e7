"""The global order of samples: a pure function of seed, data and step, the same on any cluster.

How the order works, from large to small:

1. A step is `global_batch` samples: C blocks of q. C is the smallest divisor of the batch that is
   at least 64, or the batch itself; world size and workers have no part in it.
2. Each block belongs to a stream: `mixing` gives every stream its share of the blocks, never off by
   2. With `homogeneous`, a whole step belongs to a stream and takes its turn like a block. A step
   may then be cut into *groups*, each dealt like a step of its own (`shape_batch` samples).
3. Each block of a stream comes from its next slot, the C slots in turn; a step over one stream is
   one block from every slot. `shuffle` says which samples these are, and has the proof that every
   sample is served exactly once a pass.
4. Inside a step, blocks are placed by slot: a slot's block comes to nearly the same place in every
   step, so a rank, which takes a contiguous share of the step, goes on reading the same windows of
   the same shards. Then each 8 neighbouring blocks are interleaved, sample by sample, so that even
   a small share comes from 8 places. Both keep the mixture: at any prefix of the sequence, down to
   the sample, each stream is within 2 blocks of its target.

Epochs only count: an epoch is `steps_per_epoch` steps, by default as many whole batches as an
epoch's samples fill, and at least one. What does not fill a batch is not dropped: the next epoch
begins with it. The sequence itself has no seam: it is the same whether it is read epoch by epoch
or without end, and resuming takes the number of the step alone. A step in which a pass over a
stream ends holds the last samples of that pass and the first of the next.

How well it shuffles (tools/bench order: 200 shards of 500, batches of 1,024, means of 20 seeds),
where near means less than 16 places apart in a shard:

                              serial         neighbours        pairs in a batch  near pairs
                              correlation    from one shard    from one shard    in a batch
    wdsprep, runs of 16       -0.031          0.0 %             1.4 %             1.45 %
    wdsprep, run=1            -0.031          0.0 %             1.2 %             0.18 %
    webdataset, shuffle(1000)  0.215         21.7 %            17.9 %             1.09 %
    a full permutation        -0.001          0.5 %             0.5 %             0.03 %

Runs of neighbours are the price of reading from S3 fast. Where neighbours in a shard are alike (the
frames of a video), `run=1` takes them apart.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import numpy as np

from wdsprep.dataset.random_numbers import GOLDEN, Ints, key_of
from wdsprep.errors import FingerprintError, FormatError, OtherFormatError, UsageError
from wdsprep.loading.order.mixing import Node, StreamAmount, compute_shares, huffman_tree, split
from wdsprep.loading.order.shuffle import Passes
from wdsprep.text import brief, plural, shortened

VERSION = 2
SLOTS = 64  # the least number, if a batch has as many samples
RUN = 16  # neighbours in a shard that come one after another from a slot, and are read at once
INTERLEAVED = 8  # blocks whose samples alternate within a step
MAX_STEP = 1 << 40
SHOWN = 20  # differences that an error lists
NAMED = 8  # streams a state lists one by one
SHARE = ", share "


@dataclass(frozen=True, kw_only=True, eq=False)
class OrderStream:
    """A dataset as the order knows it: a digest of its content and the samples of each shard.

    `place` is for messages and does not change the order.

    A dataset may be split into several streams, one after another. Their `part_of` is then the
    number of that dataset, and each has its `amount`. Together they get one share of the
    order, each in proportion to its samples.
    """

    digest: str
    sizes: Ints
    amount: StreamAmount = field(default_factory=StreamAmount)
    place: str = ""
    part_of: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", np.ascontiguousarray(self.sizes, np.int64))
        if self.sizes.ndim != 1 or self.samples < 1 or self.sizes.min() < 0:
            raise UsageError("a stream needs at least one sample")

    @cached_property
    def samples(self) -> int:
        return int(self.sizes.sum())


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Samples:
    """The places of samples, as three arrays of one shape.

    They hold the numbers of the stream, of the shard in it, and of the sample in that shard.
    """

    stream: Ints
    shard: Ints
    index: Ints

    def __getitem__(self, which: Any) -> "Samples":
        """Return the places of some of these samples, chosen as from an array."""
        return Samples(stream=self.stream[which], shard=self.shard[which], index=self.index[which])


@dataclass(frozen=True, kw_only=True, eq=False)
class Order:
    """The samples of each step, computed from the seed and the data.

    An order keeps nothing between calls but a cache. The options of `load` bound its numbers.
    """

    streams: tuple[OrderStream, ...]
    global_batch: int
    seed: int = 0
    window: int = 256
    run: int = RUN
    homogeneous: bool = False
    shape_batch: int | None = None  # consecutive samples of one stream, where they are not a step
    epoch_steps: int | None = None
    also: Mapping[str, Any] = field(default_factory=dict)  # settings that a state must agree with
    also_places: Mapping[str, str] = field(default_factory=dict)  # of what those say, for messages

    def __post_init__(self) -> None:
        if not self.streams:
            raise UsageError("an order needs at least one stream")
        if self.global_batch % self.group:
            raise UsageError(
                f"a global batch of {self.global_batch} does not divide by shape_batch "
                f"{self.group}: give a divisor"
            )
        if self.group < self.global_batch and not self.homogeneous:
            raise UsageError(
                "shape_batch is for datasets with shapes, or with homogeneous=True: leave it out"
            )
        _ = self._shares  # refuses amounts that make no sense

    @property
    def group(self) -> int:
        """The number of samples in a group: `shape_batch` of them, or else a whole step."""
        return self.shape_batch or self.global_batch

    @cached_property
    def slots(self) -> int:
        """The number of slots of a pass, and of blocks in a group (C in the module's docstring)."""
        least = min(SLOTS, self.group)
        return next(c for c in range(least, self.group + 1) if not self.group % c)

    @property
    def block(self) -> int:
        """The number of samples in a block (q in the module's docstring)."""
        return self.group // self.slots

    @property
    def steps_per_epoch(self) -> int:
        return self.epoch_steps or max(1, self.epoch_samples // self.global_batch)

    @property
    def epoch_samples(self) -> int:
        """The number of samples in an epoch, which need not fill whole batches."""
        return self._shares[1]

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def step(self, step: int, *, rank: int = 0, world: int = 1) -> Samples:
        """Return the samples of a step, or a rank's share of them, in their order."""
        return self.steps(step, 1, rank=rank, world=world)[0]

    def steps(self, first: int, count: int, *, rank: int = 0, world: int = 1) -> Samples:
        """Return the samples of steps [first, first + count), one row for each step.

        This costs less than one step at a time.
        """
        share = self.check(first, count, rank=rank, world=world)
        stream, places = self._places(range(first, first + count), share)
        shard, index = np.empty_like(places), np.empty_like(places)
        for number, passes in enumerate(self._passes):
            here = stream == number
            if here.any():
                shard[here], index[here] = passes.find(places[here])
        return Samples(stream=stream, shard=shard, index=index)

    def state(self, step: int) -> dict[str, Any]:
        """Return the state to resume from before `step`.

        It is under 1 KB of JSON, and the same on every rank.
        """
        return {"version": VERSION, "step": step} | self._parameters

    def resume(self, state: Mapping[str, Any]) -> int:
        """Return the step of a saved state.

        Raise FingerprintError, with what differs, if the state is of another order.
        """
        step, version = state.get("step"), state.get("version")
        if not (type(version) is type(step) is int and 0 <= step < MAX_STEP):
            raise FormatError("this is not the state of a loader: it has no version and step")
        if version > VERSION:
            raise OtherFormatError(
                f"the state is of version {brief(version)}, newer than this wdsprep reads "
                f"({VERSION}): upgrade wdsprep"
            )
        if differences := self._differences(state):
            lines = []
            for name, values in differences[:SHOWN]:
                place = self._named_places.get(name)
                lines.append(f"{name} ({place}): {values}" if place else f"{name}: {values}")
            if len(differences) > SHOWN:
                lines.append(f"and {len(differences) - SHOWN:,} more")
            shown = "\n  ".join(lines)
            raise FingerprintError(
                f"the state belongs to another order (state -> this loader):\n  {shown}\n"
                "resume with what it was saved with, or begin another order "
                f"at its step {step} (step={step})"
            )
        return step

    def places_with_other_samples(self, state: Mapping[str, Any]) -> list[str]:
        """Return the places of the datasets that have other samples in a state than in this order.

        What share of an epoch a dataset has makes no difference.
        """
        joined = {name: str(self.also.get(name)) for name in self.also_places}
        other = [
            name
            for name, line in (self._stream_lines | joined).items()
            if str(state.get(name)).partition(SHARE)[0] != line.partition(SHARE)[0]
        ]
        every = [parts[0].place for parts in self._datasets]
        named = ([self._named_places[n]] if n in self._named_places else every for n in other)
        return list(dict.fromkeys(chain.from_iterable(named)))

    def _differences(self, state: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return what differs between a state and this order: `("global-batch", "32 -> 64")`."""
        old = {name: value for name, value in state.items() if name != "step"}
        new = {"version": VERSION} | self._parameters
        differences = []
        for name in sorted({*old, *new}):
            before, after = (
                _format_value(values[name]) if name in values else "(none)" for values in (old, new)
            )
            if before != after:
                shown = shortened(name.replace("_", "-"))
                differences.append((shown, f"{shortened(before)} -> {shortened(after)}"))
        return differences

    @property
    def _named_places(self) -> dict[str, str]:
        """The place of each stream and joined dataset, by its name in a state."""
        places = {f"stream {n}": parts[0].place for n, parts in enumerate(self._datasets)}
        return places | dict(self.also_places)

    @cached_property
    def _parameters(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "global_batch": self.global_batch,
            "window": self.window,
            "run": self.run,
            "homogeneous": self.homogeneous,
            "steps_per_epoch": self.steps_per_epoch,
            **({"shape_batch": self.group} if self.group < self.global_batch else {}),
            **self.also,
        } | self._stream_lines

    @property
    def _stream_lines(self) -> dict[str, str]:
        """The texts that describe the datasets in a saved state."""
        shares = iter(self._shares[0])
        lines = []
        for parts in self._datasets:
            key = key_of(*(part.digest for part in parts))
            samples = f"{sum(part.samples for part in parts):,} samples"
            shapes = "" if parts[0].part_of is None else f" in {plural(len(parts), 'shape')}"
            share = sum(next(shares) for _ in parts)
            lines.append(f"{key:016x}, {samples}{shapes}{SHARE}{share:,}")
        if len(lines) > NAMED:
            return {"streams": f"{len(lines)}, together {key_of(*lines):016x}"}
        return {f"stream {number}": line for number, line in enumerate(lines)}

    @cached_property
    def _datasets(self) -> list[list[OrderStream]]:
        """The streams, grouped by the dataset that they are parts of."""
        datasets = (n if s.part_of is None else -1 - s.part_of for n, s in enumerate(self.streams))
        grouped = groupby(zip(datasets, self.streams, strict=True), key=itemgetter(0))
        return [[stream for _, stream in parts] for _, parts in grouped]

    @cached_property
    def _shares(self) -> tuple[tuple[int, ...], int]:
        """The share of the blocks that each stream gets, and the samples of an epoch."""
        samples = [[stream.samples for stream in parts] for parts in self._datasets]
        return compute_shares(samples, [parts[0].amount for parts in self._datasets])

    @cached_property
    def _tree(self) -> Node:
        return huffman_tree(self._shares[0])

    @cached_property
    def _passes(self) -> tuple[Passes, ...]:
        return tuple(
            Passes(
                sizes=stream.sizes,
                slots=self.slots,
                block=self.block,
                window=self.window,
                run=self.run,
                name=(VERSION, self.seed, number, stream.digest),
            )
            for number, stream in enumerate(self.streams)
        )

    @cached_property
    def _layout(self) -> tuple[Ints, Ints]:
        """The number of the block, and the row in the block, for each position in a group."""
        blocks, rows = np.divmod(np.arange(self.group), self.block)
        by = np.lexsort((blocks, rows, blocks // INTERLEAVED))
        return blocks[by], rows[by]

    def check(self, first: int, count: int = 1, *, rank: int, world: int) -> slice:
        """Return the positions in a step that are a rank's share.

        Raise UsageError if the steps or the rank do not exist.
        """
        if not 0 <= first < first + count <= MAX_STEP:
            raise UsageError(f"steps [{first}, {first + count}): give one or more, from 0 on")
        if world < 1 or self.global_batch % world:
            raise UsageError(
                f"a global batch of {self.global_batch} does not divide by {world} ranks: give a "
                "multiple"
            )
        if not 0 <= rank < world:
            raise UsageError(f"rank {rank} does not exist: give a rank from 0 to {world - 1}")
        size = self.global_batch // world
        return slice(rank * size, (rank + 1) * size)

    def _places(self, steps: range, share: slice) -> tuple[Ints, Ints]:
        """Return for each position its stream, and its place in the sequence of that stream."""
        groups, spots = np.divmod(np.arange(share.start, share.stop), self.group)
        blocks, rows = (part[spots] for part in self._layout)
        if self.homogeneous:
            shared = range(int(groups[0]), int(groups[-1]) + 1)
            of_block, numbers = self._deal_groups(steps, shared)
        else:
            of_block, numbers = map(np.stack, zip(*map(self._deal, steps), strict=True))
        shape = len(steps), -1, self.slots
        of_block, numbers = of_block.reshape(shape), numbers.reshape(shape)
        groups -= groups[0]
        return of_block[:, groups, blocks], numbers[:, groups, blocks] * self.block + rows

    def _deal(self, step: int) -> tuple[Ints, Ints]:
        """Return the stream of each block of a step, and the block's number in that stream."""
        stream, numbers = np.empty(self.slots, np.int64), np.empty(self.slots, np.int64)
        counts = split(self._tree, step * self.slots, np.arange(self.slots + 1))
        for number, (first, more) in counts.items():
            spots = np.flatnonzero(np.diff(more))
            stream[spots] = number
            numbers[spots] = self._sort_by_slot(first, len(spots))
        return stream, numbers

    def _deal_groups(self, steps: range, groups: range) -> tuple[Ints, Ints]:
        """Return the streams and block numbers of some groups of each step.

        There is one row for each group, which belongs to one stream.
        """
        a_step = self.global_batch // self.group
        group_numbers = np.add.outer(np.arange(len(steps)) * a_step, groups).ravel()
        before_and_after = np.stack([group_numbers, group_numbers + 1])
        in_round = self._sort_by_slot(0, self.slots)
        stream = np.empty((len(group_numbers), self.slots), np.int64)
        numbers = np.empty_like(stream)
        for number, (first, more) in split(
            self._tree, steps.start * a_step, before_and_after
        ).items():
            here = np.flatnonzero(more[1] > more[0])
            stream[here] = number
            numbers[here] = (first + more[0, here])[:, None] * self.slots + in_round
        return stream, numbers

    def _sort_by_slot(self, first: int, count: int) -> Ints:
        """Return the numbers of a stream's next blocks, sorted by a key of their slots.

        Multiples of the golden ratio spread any run of slots evenly over the step. So a
        slot has nearly the same place in the step, whichever run it comes in.
        """
        numbers = np.arange(first, first + count)
        keys = (numbers % self.slots).view(np.uint64) * np.uint64(GOLDEN)
        return numbers[np.argsort(keys)]


def _format_value(value: object) -> str:
    if isinstance(value, str) and value:
        return value
    try:
        return ",".join(map(str, value)) if isinstance(value, list | tuple) else json.dumps(value)
    except (TypeError, ValueError, RecursionError):  # no JSON, so none of ours
        return brief(value)
