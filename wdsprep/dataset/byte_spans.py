"""Byte ranges of samples in a tar, and the index of a tar that lacks some of its samples.

The offsets are those of an index: where each sample begins, and where the last one ends.
"""

import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Offsets = NDArray[np.int64]


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
    offsets: "Offsets",
    numbers: "NDArray[np.uint32]",
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


def offsets_without(offsets: "Offsets", numbers: Sequence[int]) -> "array[int]":
    """Return the offsets that a tar has after the samples with these numbers are taken out."""
    import numpy as np

    sizes = np.delete(np.diff(offsets), np.asarray(numbers, np.int64))
    left = np.concatenate([offsets[:1], sizes]).cumsum()
    return array("Q", left.astype("u8").tobytes())
