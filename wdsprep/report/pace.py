"""How fast a run went, by the times at which its receipts were written.

Receipts hold no times: equal input gives equal bytes. But a store knows when each was written, and
a receipt is written when its unit is done. A copy of a dataset may have lost these times, and a
unit that was done again has those of the last time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from wdsprep.dataset import receipt_name
from wdsprep.report.given import Given

BINS = 48
PAUSE_S = 600.0
PAUSE_TIMES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """`rates` are inputs a second over equal parts of the time in which work was done; pauses, as
    between a kill and a resume, are left out of it."""

    first_s: float
    last_s: float
    active_s: float
    pauses: int
    inputs: int
    """of all units but those done at the first moment"""
    rates: tuple[float, ...]

    @property
    def mean(self) -> float:
        return self.inputs / self.active_s


def pace_of(given: Given) -> Pace | None:
    """None where fewer than three moments are told apart."""
    times = {entry.name: entry.written_s for entry in given.store.list("receipts/")}
    done: dict[float, int] = {}
    for receipt in given.manifest.receipts:
        at = times.get(receipt_name(receipt.unit), 0.0)
        done[at] = done.get(at, 0) + receipt.inputs
    moments = sorted((at, inputs) for at, inputs in done.items() if at)
    return _pace(moments) if len(moments) > 2 else None


def _pace(moments: Sequence[tuple[float, int]]) -> Pace:
    gaps = [b - a for (a, _), (b, _) in pairwise(moments)]
    usual = sorted(gaps)[len(gaps) // 2]
    longest = max(PAUSE_S, PAUSE_TIMES * usual)
    steps: list[tuple[float, int]] = []  # a length of time, and what was done in it
    for gap, (_, inputs) in zip(gaps, moments[1:], strict=True):
        steps.append((usual if gap > longest else gap, inputs))
    return Pace(
        first_s=moments[0][0],
        last_s=moments[-1][0],
        active_s=sum(length for length, _ in steps),
        pauses=sum(gap > longest for gap in gaps),
        inputs=sum(inputs for _, inputs in steps),
        rates=_rates(steps),
    )


def _rates(steps: Sequence[tuple[float, int]]) -> tuple[float, ...]:
    """What was done in each step is spread evenly over it, and then counted by bin."""
    count = min(BINS, len(steps))
    width = sum(length for length, _ in steps) / count
    done = [0.0] * count
    start = 0.0
    for length, inputs in steps:
        end = start + length
        first, last = int(start / width), min(count - 1, int(end / width))
        for at in range(min(first, count - 1), last + 1):
            inside = min(end, (at + 1) * width) - max(start, at * width)
            done[at] += inputs * max(0.0, inside) / length
        start = end
    return tuple(inputs / width for inputs in done)
