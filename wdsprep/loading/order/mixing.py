"""Mix streams: give each its share of the blocks of an order, closed-form and never 2 blocks off.

Blocks are numbered 0, 1, 2, ... and each belongs to one stream. With shares w_b of a total W, the
first k blocks should hold k * w_b / W of stream b's. Two streams split k blocks by rounding: the
left one gets floor(k * w / W + 1/2), the right one the rest. Both counts rise with k and are off by
1/2 at most, and any k is answered at once, so there is nothing to search and nothing to remember.

More streams split along a Huffman tree: the two lightest are joined to one, again and again. The
error of a leaf of weight w is its own split's, plus that of each split above it, scaled down by w
over the weight W_m of the subtree in between: at most 1/2 * (1 + w/W_1 + w/W_2 + ...). A Huffman
tree joins the lightest first, so whatever joins W_m is no lighter than W_(m-1) was before it:
W_(m+1) >= W_m + W_(m-1). The weights grow like the Fibonacci numbers, and the error is at most half
the sum of their reciprocals, 1.68 blocks, for any number of streams and any shares.

(Sorting blocks by virtual time (i + u) / t_b with hashed u in [0, 1) was the plan. Its error can
reach (1 - p) + p * (B - 1) blocks for a stream of proportion p among B: 6 blocks for 8 streams.)
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from wdsprep.dataset.random_numbers import Ints
from wdsprep.errors import UsageError
from wdsprep.text import real_number, whole_number

MAX_TOTAL = 1 << 40  # so that products with the blocks of a step stay below 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamAmount:
    """The amount of a stream in an epoch; by default each sample comes once.

    At most one is given: `weight`, its proportion to the other streams; `repeat`, how often
    each sample comes; `count`, a number of samples.
    """

    weight: float | None = None
    repeat: float | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        names = [n for n in ("weight", "repeat", "count") if getattr(self, n) is not None]
        if len(names) > 1:
            raise UsageError("give a stream only one of weight, repeat and count")
        for name in names:
            check = whole_number if name == "count" else real_number
            value = check(f"a stream's {name}", getattr(self, name))
            if not 0 < value < float("inf"):
                raise UsageError(f"a stream's {name} must be above 0, not {value}")
            object.__setattr__(self, name, value)


def compute_shares(
    parts: Sequence[Sequence[int]], amounts: Sequence[StreamAmount]
) -> tuple[tuple[int, ...], int]:
    """Return the share of blocks that each part of the streams gets, and the samples of an epoch.

    `parts` has the samples of each part, by stream; a stream without parts is its only part. Parts
    share in proportion to their samples. With weights, an epoch has as many samples as the data.
    """
    samples = [*map(sum, parts)]
    if any(amount.weight is not None for amount in amounts):
        if any(amount.weight is None for amount in amounts):
            raise UsageError("give a weight to every stream or to none")
        shares, epoch = _reduce([Fraction(str(amount.weight)) for amount in amounts]), sum(samples)
    else:
        counts = [
            max(1, round(number * Fraction(str(amount.repeat or 1))))
            if amount.count is None
            else amount.count
            for number, amount in zip(samples, amounts, strict=True)
        ]
        shares, epoch = _reduce([*map(Fraction, counts)]), sum(counts)
    if len(shares) < sum(map(len, parts)):
        streams = zip(shares, samples, parts, strict=True)
        shares = _reduce(
            [Fraction(share * part, total) for share, total, sizes in streams for part in sizes]
        )
    return shares, epoch


def _reduce(shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Return the least whole numbers in these proportions, or nearly so if they sum to too much."""
    unit = math.lcm(*(share.denominator for share in shares))
    numbers = [int(share * unit) for share in shares]
    divisor = math.gcd(*numbers)
    total = sum(numbers) // divisor
    if total <= MAX_TOTAL:
        return tuple(number // divisor for number in numbers)
    return tuple(max(1, number // divisor * MAX_TOTAL // total) for number in numbers)


Node = tuple[int, int, tuple["Node", ...]]
"""A node of a Huffman tree: its weight, and its stream (of a leaf) or two nodes that split it."""


def huffman_tree(shares: Sequence[int]) -> Node:
    """Return the Huffman tree of shares.

    Nodes of equal weight are joined in the order in which they were made.
    """
    serial = itertools.count()
    heap: list[tuple[int, int, Node]] = [
        (weight, next(serial), (weight, stream, ())) for stream, weight in enumerate(shares)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        (first, _, left), (second, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        weight = first + second
        heapq.heappush(heap, (weight, next(serial), (weight, -1, (left, right))))
    return heap[0][2]


def split(node: Node, first: int, more: Ints) -> dict[int, tuple[int, Ints]]:
    """Count the blocks of each stream under a node, among the first `first + more[i]` blocks.

    For each stream, return the count among the first `first`, which may be any number, and
    what each entry of `more` adds to it.
    """
    weight, stream, halves = node
    if not halves:
        return {stream: (first, more)}
    left, right = halves
    base, carry = divmod(2 * left[0] * first + weight, 2 * weight)
    added = (carry + 2 * left[0] * more) // (2 * weight)
    return split(left, base, added) | split(right, first - base, more - added)
