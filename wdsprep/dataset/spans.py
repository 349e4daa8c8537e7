"""Bytes of samples in a tar: where neighbours lie together, and where samples are without others.

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
    """The bytes of samples that lie together, and which of the numbers these have."""

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
    """Yield the spans of samples by their numbers, which rise.

    Neighbours stand in one, and so do samples with a gap between them that is not larger. None has
    more bytes than asked for, but for a single sample that has.
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
    """Return the offsets of a tar that lacks some samples, by their numbers."""
    import numpy as np

    sizes = np.delete(np.diff(offsets), np.asarray(numbers, np.int64))
    left = np.concatenate([offsets[:1], sizes]).cumsum()
    return array("Q", left.astype("u8").tobytes())
