"""Tell workers that hang from workers that take long.

A worker that is stopped, or waits for ever, does not die: nobody hears of it, and it alone holds up
the end of the run. What shows it is that nothing it holds comes further, for far longer than any
step takes. It is ended then, and judged like one that died. Where it goes on after all, as on a
machine that was paused, there are two attempts at one unit, which is harmless.

A worker that opens is watched too, from when it has its place. Nobody knows how long it takes to
load models that may have to be downloaded. What shows that it goes on is that bytes move: those
that the worker's process reads and writes, and those that another process downloads for it.

Time is counted as the driver lives it: one that was stopped itself finds nobody overdue.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from wdsprep.runners.schedule import Lost, Message, Opening, UnitProgress

PATIENCE_S = 2700.0
"""Longer than eight attempts at a server that never answers. Pages say it in minutes."""
LOOK_S = 5.0
"""The most seconds between two looks."""

REPORT_S = 5.0
STEP_NBYTES = 1 << 20
"""The bytes that count as progress. A process that only waits moves some thousand."""

_growing: Counter[Path] = Counter()
_changing = threading.Lock()


class Watch:
    """The progress of all workers, those that open and those that hold units."""

    def __init__(self, patience_s: float, opening_patience_s: float = PATIENCE_S) -> None:
        self._now_s, self._looked = 0.0, time.monotonic()
        self._held: dict[int, dict[int, object]] = {}
        """The progress that each order of a worker reported last; the order 0 is its opening."""
        self._working = _Waiting(patience_s)
        self._opening = _Waiting(opening_patience_s)

    def given(self, slot: int, order: int) -> None:
        self._held.setdefault(slot, {})[order] = None
        self._working.since.setdefault(slot, self._now_s)

    def heard(self, slot: int, order: int, message: Message) -> None:
        held = self._held.setdefault(slot, {})
        if isinstance(message, Opening | UnitProgress):
            if order in held and held[order] == message.value:
                return
            held[order] = message.value
        elif isinstance(message, Lost):
            del self._held[slot]
            held = {}
        else:
            held.pop(order, None)
        for workers in (self._opening, self._working):
            workers.since.pop(slot, None)
        if held:
            (self._opening if 0 in held else self._working).since[slot] = self._now_s

    def overdue(self) -> list[tuple[int, Lost]]:
        """Return the slots of workers that came no further for too long, and what to say of each.

        Call this after each wait for messages: each call counts the time since the last one, but
        at most 5 s.
        """
        before, self._looked = self._looked, time.monotonic()
        self._now_s += min(self._looked - before, LOOK_S)
        working, opening = self._working, self._opening
        hung = f"worker made no progress for {working.patience_s:,.0f} s, and was ended"
        closed = f"worker opened no further for {opening.patience_s:,.0f} s, and was ended"
        return [
            *((slot, Lost(reason=hung)) for slot in working.overdue(self._now_s)),
            *((slot, Lost(reason=closed)) for slot in opening.overdue(self._now_s)),
        ]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The workers of one kind, and when each last made progress, the longest ago first."""

    patience_s: float
    since: OrderedDict[int, float] = field(default_factory=OrderedDict)

    def overdue(self, now_s: float) -> Iterator[int]:
        return takewhile(lambda slot: now_s - self.since[slot] >= self.patience_s, self.since)


# --- in a worker that opens
@contextmanager
def awaiting(folder: Path) -> Iterator[None]:
    """Count what arrives in a folder as progress of this worker while the block lasts."""
    with _changing:
        _growing[folder] += 1
    try:
        yield
    finally:
        with _changing:
            _growing[folder] -= 1


def report_opening(is_over: threading.Event) -> Iterator[Opening]:
    """Yield a message now and then if bytes have moved, until the opening is over."""
    reported = 0
    while not is_over.wait(REPORT_S):
        with _changing:
            folders = [folder for folder, count in _growing.items() if count]
        moved = _own_nbytes() + sum(map(_nbytes_in, folders))
        if abs(moved - reported) >= STEP_NBYTES:
            reported = moved
            yield Opening(value=moved)


def _own_nbytes() -> int:
    """Return the bytes that this process has read and written, as far as the system tells."""
    with suppress(OSError):
        lines = Path("/proc/self/io").read_text().splitlines()
        counts = dict(line.split(": ") for line in lines)
        return int(counts["rchar"]) + int(counts["wchar"])
    return 0


def _nbytes_in(folder: Path) -> int:
    nbytes = 0
    for path in folder.glob("*"):
        with suppress(OSError):  # it has just got its final name
            nbytes += path.stat().st_size
    return nbytes
