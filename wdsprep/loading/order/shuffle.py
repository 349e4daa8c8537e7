"""The order of one stream: pass after pass, each of which serves every sample exactly once.

The stream is a row of places x = 0, 1, 2, ... without end. Place x holds

    pass p = x div n        block j = x div q        slot c = j mod C        row = j div C

so blocks of q samples are taken from the C slots in turn, and a single stream's step (C blocks) is
one block from every slot. What a place serves is found in three moves:

1. From place to slot. Slot c has places of its own, the ones with its c, and counts them through:
   its i-th place has i = row * q + x mod q. Before pass p, which begins at place p * n, it has had
   A(c, p) = q * ((p * n) div G) + clip((p * n) mod G - c * q, 0, q) of them, where G = C * q; so in
   pass p it serves L(c, p) = A(c, p + 1) - A(c, p) samples, with local number i - A(c, p).
2. From slot to axis. The axis [0, n) of a pass is cut into C contiguous slots of those lengths, and
   each slot into windows of `window` numbers, the last of them shorter. A window of s numbers is
   permuted in runs of r neighbours: its s div r whole runs change places among each other, and the
   s mod r numbers behind them stay. r is `run`, or what leaves at least 16 runs in the window.
3. From axis to shard. The axis is turned by a hash of the pass, so that slots and windows begin
   elsewhere in each pass, and laid over the shards, which are permuted anew in each pass.

Each sample is served exactly once a pass, for every n, C and q. Pass p consists of the n places
[p * n, (p + 1) * n). Each of them has one slot and one local number, and no two have both the same,
as i tells apart the places of a slot. Those in slot c are L(c, p) by definition, with numbers 0 to
L(c, p) - 1, as i rises by one from each place of a slot to its next. So the L(c, p) sum to n, the
slots fill the axis without gap or overlap, and places go to the axis one to one. In a window of s
numbers, k * r + j with k < s div r and j < r goes to f(k) * r + j, where f permutes the whole runs,
and the numbers from (s div r) * r on go to themselves: one to one, each part onto itself. Turning
the axis and permuting shards are one to one as well. q.e.d. Nothing is dropped or padded: where n
is no multiple of G, the pass ends in the middle of a round of slots and the next one goes on from
there, so that the slots' extra samples go round the circle.

Runs are for reading: a slot serves a run without a break, in q samples a step, so what is asked of
a shard is ranges of r neighbours, which matters on S3, where a request costs as much as a megabyte.

Permutations are computed from the keyed hashes of `dataset.random_numbers`, and never change.
`shuffle_range` permutes one long range (the shards), and `permute_rows` many short ones at once
(the windows). Both sort by hash, which makes all permutations equally likely.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from wdsprep.dataset.random_numbers import Ints, Words, draw, key_of

RUNS = 16  # the least number in a window, if it has as many samples
CHUNK = 1 << 13  # shards laid on the axis at once
KEPT = 2  # passes whose order of shards is remembered: a step may touch two


Axis = tuple[Ints, Ints, int, NDArray[np.int32], Ints]
"""One pass over a stream, laid out as a line of samples.

What each slot had served before the pass; where the slots begin on the axis, and the last one ends;
how far the axis is turned; and the shards on it in their order, with their ends.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Passes:
    """The passes over a stream with shards of these sizes.

    All random numbers in it depend on `name` alone.
    """

    sizes: Ints
    slots: int
    block: int
    window: int
    run: int
    name: tuple[str | int, ...]
    _axes: dict[int, Axis] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def samples(self) -> int:
        return int(self.sizes.sum())

    def find(self, places: Ints) -> tuple[Ints, Ints]:
        """Return the shard that each place serves, and the number of the sample in it."""
        passes = places // self.samples
        first, last = int(passes.min()), int(passes.max())
        if first == last:
            return self._find(places, first)
        shards, indices = np.empty_like(places), np.empty_like(places)
        for number in np.unique(passes).tolist():
            here = passes == number
            shards[here], indices[here] = self._find(places[here], number)
        return shards, indices

    def _find(self, places: Ints, number: int) -> tuple[Ints, Ints]:
        had, slot_starts, turn, axis_shards, ends = self._axis(number)
        # from places to slots
        blocks = places // self.block
        rows = blocks // self.slots
        slots = blocks - rows * self.slots
        local = places - (blocks - rows) * self.block - had[slots]
        # from slots to windows of the axis, each of which is shuffled
        heads = local // self.window * self.window
        starts, firsts, windows = np.unique(
            slot_starts[slots] + heads, return_index=True, return_inverse=True
        )
        sizes = np.minimum(self.window, slot_starts[slots[firsts] + 1] - starts)
        lengths = np.clip(sizes // RUNS, 1, self.run)
        counts = sizes // lengths
        length, count = lengths[windows], counts[windows]
        offsets = local - heads
        runs = offsets // length
        keys = draw(key_of(*self.name, "window", number), starts)
        moved = permute_rows(np.minimum(runs, count - 1), windows, counts, keys)
        shuffled = np.where(runs < count, (moved - runs) * length, 0) + offsets
        # from the axis to shards
        spots = starts[windows] + shuffled + turn
        spots -= self.samples * (spots >= self.samples)
        rank = np.searchsorted(ends, spots, side="right")
        shards = axis_shards[rank].astype(np.int64)
        return shards, spots - (ends[rank] - self.sizes[shards])

    def _axis(self, number: int) -> Axis:
        if (axis := self._axes.get(number)) is not None:
            return axis
        for old in list(self._axes)[: 1 - KEPT]:
            self._axes.pop(old, None)
        ends = shuffle_range(len(self.sizes), key_of(*self.name, "shards", number))
        shards = ends.astype(np.int32)
        for start in range(0, len(ends), CHUNK):  # in place: fresh memory costs more than the sums
            part = ends[start : start + CHUNK]
            np.take(self.sizes, part, out=part, mode="clip")
        np.cumsum(ends, out=ends)
        had, before = self._count_served(number)
        _, after = self._count_served(number + 1)
        turn = key_of(*self.name, "turn", number) % self.samples
        axis = self._axes[number] = had, after - before, turn, shards, ends
        return axis

    def _count_served(self, passes: int) -> tuple[Ints, Ints]:
        """Return how many samples each slot, and all slots before it, serve in the first passes."""
        rounds, rest = divmod(passes * self.samples, self.slots * self.block)
        lead = np.arange(self.slots + 1) * self.block
        served = rounds * self.block + np.clip(rest - lead, 0, self.block)
        return served, rounds * lead + np.minimum(rest, lead)


_CHUNK = 1 << 13  # numbers hashed at once: they stay in the processor's cache
_MANY = 1 << 20  # words sorted at once, 8 MB
_LAST = (1 << 64) - 1


def shuffle_range(count: int, key: int) -> Ints:
    """Return a permutation of range(count): its numbers sorted by their hashes.

    A number stands in the lower bits of its own hash, so no two are equal and the result is the
    same whatever algorithm sorts them.
    """
    words = np.empty(count, np.uint64)
    for start in range(0, count, _CHUNK):
        numbers = np.arange(start, min(start + _CHUNK, count))
        words[start : start + _CHUNK] = _tag(draw(key, numbers), numbers, count)
    words.sort()
    words &= np.uint64(_mask(count))
    return words.view(np.int64)


def permute_rows(places: Ints, rows: Ints, sizes: Ints, keys: Words) -> Ints:
    """Return where each place goes under its row's permutation.

    The permutation of a row is one of range(sizes[row]), by keys[row]. It is a row of hashes,
    sorted as in `shuffle_range`. In a row that is shorter than others, what lies beyond its size
    sorts to the end.
    """
    width = int(sizes.max())
    height = max(1, _MANY // width)
    if len(sizes) <= height:
        return _permute_small(sizes, keys, width)[rows, places]
    result = np.empty_like(places)
    for start in range(0, len(sizes), height):
        here = np.flatnonzero((rows >= start) & (rows < start + height))
        part = slice(start, start + height)
        table = _permute_small(sizes[part], keys[part], width)
        result[here] = table[rows[here] - start, places[here]]
    return result


def _permute_small(sizes: Ints, keys: Words, width: int) -> Ints:
    numbers = np.arange(width)
    words = _tag(draw(keys[:, None], numbers), numbers, width)
    words[numbers >= sizes[:, None]] = np.uint64(_LAST)
    words.sort(axis=1)
    words &= np.uint64(_mask(width))
    return words.view(np.int64)


def _tag(words: Words, numbers: Ints, count: int) -> Words:
    words &= np.uint64(_LAST ^ _mask(count))
    words |= numbers.view(np.uint64)
    return words


def _mask(count: int) -> int:
    """Return a number with ones at the bits that numbers of range(count) use."""
    return (1 << (count - 1).bit_length()) - 1
