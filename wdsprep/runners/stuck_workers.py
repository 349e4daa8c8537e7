"""Tell workers that hang from workers that take long.

A worker that is stopped, or waits for ever, does not die: nobody hears of it, and it alone holds up
the end of the run. What shows it is that nothing it holds comes further, for far longer than any
step takes. It is ended then, and judged like one that died. Where it goes on after all, as on a
machine that was paused, there are two attempts at one unit, which is harmless.

A worker that is not open yet is not watched: how long it takes to load models, nobody knows.

Time is counted as the driver lives it: one that was stopped itself finds nobody overdue.
"""

from __future__ import annotations

import time
from collections import OrderedDict

from wdsprep.runners.schedule import Done, Failed, Lost, Message, Returned, UnitProgress

PATIENCE_S = 2700.0
"""Longer than eight attempts at a server that never answers. Pages say it in minutes."""
LOOK_S = 5.0
"""The most seconds between two looks."""


class Watch:
    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._now_s, self._looked = 0.0, time.monotonic()
        self._held: dict[int, dict[int, object]] = {}
        """The progress that each order of a worker reported last."""
        self._since: OrderedDict[int, float] = OrderedDict()
        """The time when a worker that holds something last made progress; the longest ago is the
        first."""

    def given(self, slot: int, order: int) -> None:
        self._held.setdefault(slot, {})[order] = None
        self._since.setdefault(slot, self._now_s)

    def heard(self, slot: int, order: int, message: Message) -> None:
        held = self._held.get(slot, {})
        if isinstance(message, Lost):
            self._held.pop(slot, None)
            self._since.pop(slot, None)
            return
        if isinstance(message, Done | Failed | Returned):
            del held[order]
        elif isinstance(message, UnitProgress):
            if held[order] == message.value:
                return
            held[order] = message.value
        self._since.pop(slot, None)
        if held:
            self._since[slot] = self._now_s

    def overdue(self) -> list[int]:
        """Return the slots of workers whose units have made no progress for `patience_s`.

        Call this after each wait for messages: each call counts the time since the last one, but
        at most 5 s.
        """
        before, self._looked = self._looked, time.monotonic()
        self._now_s += min(self._looked - before, LOOK_S)
        found = []
        for slot, since_s in self._since.items():
            if self._now_s - since_s < self._patience_s:
                break
            found.append(slot)
        return found

    def lost(self) -> Lost:
        """Return the message that a worker hung and was ended."""
        return Lost(reason=f"worker made no progress for {self._patience_s:,.0f} s, and was ended")
