"""Find all pairs of near duplicates among many hashes, without comparing each with each.

Two hashes are a pair if they differ in at most `distance` of their 64 bits.

The 64 bits are cut into `distance + agreeing` blocks. Two hashes that differ in `distance` bits
differ in as many blocks at most, so there are `agreeing` blocks in which they are the same. For
each choice of so many blocks the hashes are sorted with these in front: such pairs then stand close
together, and only neighbours that begin alike are compared. A pair is taken where its choice is the
first that it agrees in, so it is found once.

With more blocks agreeing there are more sorts and fewer comparisons: `plan` takes what is least. A
sort needs 8 bytes a hash beside the hashes themselves, and as many are done at once as there are
processors and `SORTS_NBYTES`. Hashes that begin alike in great numbers, which those of pictures do
not, are each compared with each.

Written by hand: of a million hashes it takes seconds, and a library for it, such as faiss, would be
larger than all of wdsprep. To be looked at again when that is there for another reason.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations, pairwise

import numpy
from numpy.typing import NDArray

from wdsprep.cpus import usable_cpus
from wdsprep.dataset.thread_map import read_each
from wdsprep.text import Counting, ignore_count

Hashes = NDArray[numpy.uint64]
Rows = NDArray[numpy.int64]
NBITS = 64
MOST_AGREEING = 6
SORT_NS, COMPARE_NS = 90, 15  # what a hash costs in each sort, and a pair
SORTS_NBYTES = 2 << 30
HASHES_AT_ONCE = 1 << 16  # hashes: what the processor's cache can hold
Block = tuple[int, int]
"""A run of neighbouring bits of a hash: where it starts, from the lowest bit on, and how many."""


def plan(count: int, distance: int) -> tuple[int, int]:
    """Return the number of blocks to cut a hash into, and how many of them must be equal.

    They are those with which a search among `count` hashes should take the least time.
    """

    def cost(agreeing: int) -> float:
        sorts = math.comb(distance + agreeing, agreeing)
        alike: float = 2.0 ** (NBITS * agreeing / (distance + agreeing))
        pairs = count * (count / 2) / alike
        return sorts * (SORT_NS * count + COMPARE_NS * pairs)

    best = min(range(1, MOST_AGREEING + 1), key=cost)
    return distance + best, best


def find_near_pairs(
    hashes: Hashes, distance: int, on_count: Counting = ignore_count
) -> tuple[Rows, Rows]:
    """Return all pairs of hashes that differ in 1 to `distance` bits, as places in `hashes`.

    The hashes rise, and each is there once. `on_count` gets the number of sorts done, and of all.
    """
    if not distance or len(hashes) < 2:
        return numpy.empty(0, numpy.int64), numpy.empty(0, numpy.int64)
    count, agreeing = plan(len(hashes), distance)
    ends = [NBITS * number // count for number in range(count + 1)]
    blocks = [(start, end - start) for start, end in pairwise(ends)]
    choices = list(combinations(range(count), agreeing))
    threads = max(1, min(usable_cpus(), SORTS_NBYTES // max(1, hashes.nbytes)))
    search = partial(_pairs_of_choice, hashes, distance, blocks)
    pairs = read_each(search, choices, threads, lambda done: on_count(done, len(choices)))
    first, second = (numpy.concatenate(places) for places in zip(*pairs, strict=True))
    return first, second


def _pairs_of_choice(
    hashes: Hashes, distance: int, blocks: Sequence[Block], choice: Sequence[int]
) -> tuple[Rows, Rows]:
    order = [*choice, *(number for number in range(len(blocks)) if number not in choice)]
    ordered = [blocks[number] for number in order]
    front = _reorder_blocks(hashes, ordered)
    front.sort()
    key_nbits = sum(blocks[number][1] for number in choice)
    earlier = [blocks[number] for number in range(choice[-1]) if number not in choice]
    firsts, seconds = [numpy.empty(0, numpy.int64)], [numpy.empty(0, numpy.int64)]
    for pair in _find_alike(front, key_nbits, distance):
        a, b = (_restore_blocks(reordered, ordered) for reordered in pair)
        differ, is_first = a ^ b, numpy.ones(len(a), bool)
        for block in earlier:
            is_first &= _bits_in(differ, block) != 0
        firsts.append(numpy.searchsorted(hashes, a[is_first]))
        seconds.append(numpy.searchsorted(hashes, b[is_first]))
    return numpy.concatenate(firsts), numpy.concatenate(seconds)


def _bits_in(hashes: Hashes, block: Block) -> Hashes:
    start, nbits = block
    bits: Hashes = (hashes >> numpy.uint64(start)) & numpy.uint64((1 << nbits) - 1)
    return bits


def _reorder_blocks(hashes: Hashes, blocks: Sequence[Block]) -> Hashes:
    """Return the hashes with their blocks in this order, from the highest bit on."""
    reordered = numpy.zeros(len(hashes), numpy.uint64)
    for at in range(0, len(hashes), HASHES_AT_ONCE):
        part, to = (array[at : at + HASHES_AT_ONCE] for array in (hashes, reordered))
        for block in blocks:
            to <<= numpy.uint64(block[1])
            to |= _bits_in(part, block)
    return reordered


def _restore_blocks(reordered: Hashes, blocks: Sequence[Block]) -> Hashes:
    hashes, left = numpy.zeros(len(reordered), numpy.uint64), NBITS
    for start, nbits in blocks:
        left -= nbits
        hashes |= _bits_in(reordered, (left, nbits)) << numpy.uint64(start)
    return hashes


def _find_alike(front: Hashes, key_nbits: int, distance: int) -> Iterator[tuple[Hashes, Hashes]]:
    """Yield the pairs of hashes that have the same first bits and differ in few others.

    The first `key_nbits` bits are the same, and at most `distance` bits differ. `front` is sorted.
    Many pairs are yielded at a time, as two arrays.
    """
    limit = numpy.uint64(1 << (NBITS - key_nbits))
    for start in range(0, len(front) - 1, HASHES_AT_ONCE):
        at = numpy.arange(start, min(start + HASHES_AT_ONCE, len(front) - 1))
        apart = 0
        while len(at):
            apart += 1
            at = at[at < len(front) - apart]
            differ = front[at] ^ front[at + apart]
            same = differ < limit
            at, differ = at[same], differ[same]
            near = at[numpy.bitwise_count(differ) <= distance]
            if len(near):
                yield front[near], front[near + apart]


def choose_kept(better: Rows, worse: Rows, count: int) -> NDArray[numpy.int64]:
    """Return for each of `count` pictures which one stays: itself, or one that it is paired with.

    Pictures are numbered from the best on; `better` and `worse` have the two of each pair. A
    picture that is better than all it is paired with stays; a picture paired with one that stays
    goes; and so on with the rest. For a picture that goes, the best of those that stay and are
    paired with it is returned.
    """
    stays, goes = numpy.zeros(count, bool), numpy.zeros(count, bool)
    left_better, left_worse = better, worse
    undecided = numpy.ones(count, bool)
    while undecided.any():
        waits = numpy.zeros(count, bool)
        waits[left_worse] = True
        stays |= undecided & ~waits
        goes[left_worse[stays[left_better]]] = True
        undecided &= ~(stays | goes)
        both = undecided[left_better] & undecided[left_worse]
        left_better, left_worse = left_better[both], left_worse[both]
    kept = numpy.arange(count)
    chosen = stays[better]
    kept[goes] = count
    numpy.minimum.at(kept, worse[chosen], better[chosen])
    return kept
