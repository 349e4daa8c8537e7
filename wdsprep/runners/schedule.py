"""The schedule of a run: who gets which unit, what a failure costs, when to give up.

These are the decisions of a runner, apart from how messages travel.

A `Schedule` draws a unit when a worker has room for it, or to justify starting one more
worker. Failed units go before fresh ones: what is held stays bounded however many fail.
Everything is O(1) a message.

A worker gets a second unit only when there is one for every worker that has none yet, and a fourth
only when there are two, so units spread over workers before they pile up on the first.

When a worker dies with several units, any of them may be the killer. All become *suspects*:
a suspect is done by a worker that has nothing else, so at its next death there is no doubt.
The shared death counts as an attempt, but never as the last one. Suspects wait for a worker
that holds nothing, such as the one that replaces the dead: none is emptied for them.

A worker that cannot open, or dies before it is ready, held no unit, so no unit is blamed: its
place is tried `max_attempts` times in a row and then given up. The run is over where no place is
left, and sooner where no worker has ever become ready and none is on its way that might.

A worker may also start and fail at whatever it is given, as one whose GPU is broken: it says so of
each unit, or dies. What tells such a place from units that fail: there, `MOST_IN_A_ROW` different
ones fail and none is finished between them, while one of them is finished at another place. (If the
worker dies of each, it is enough that others are finished.) Then the worker is ended, and these
failures are no attempts at their units. So that no good unit is lost before that is known, the last
of several attempts at a unit is made where the fewest have failed in a row: best where the last one
was finished. While `MOST_WAITING` units wait for such a place, those that fail get no fresh ones.

A place is given up, for either reason, until `TRIED_AGAIN` more units are finished, or no other
place is open: it may have been mended, or its machine replaced.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol, TypeAlias

from wdsprep.errors import WorkError
from wdsprep.runners.base import (
    Event,
    Failure,
    Finished,
    Message,
    Quarantined,
    SlotMessage,
    Step,
    Unit,
)
from wdsprep.text import plural

_log = logging.getLogger("wdsprep")

MOST_IN_A_ROW = 3
"""The different units that fail at a place, and none that it finishes, after which it is given up
if others finish theirs."""
MOST_WAITING = 4
"""The last attempts that may wait for a better place, while failing ones still get fresh units."""
TRIED_AGAIN = 100
"""Units that others finish before a place that was given up is tried again."""


class Workers(Protocol):
    """Workers, each known by its slot, that take units and send messages.

    Every giving of a unit is an *order* with a number of its own, which messages come back with: a
    unit that is given again is another order.
    """

    def start(self, slot: int) -> None: ...

    def give(self, slot: int, order: int, unit: Unit) -> None: ...

    def end(self, slot: int) -> None:
        """End the worker of a slot. Nothing more is heard of it."""
        ...

    def hear(self) -> Iterable[SlotMessage]:
        """Wait a while for messages of the workers, and return those that came: perhaps none.

        After `lost` the slot is empty, and nothing more is heard of the units that its
        worker held.
        """
        ...

    def stop(self) -> None:
        """End every worker, whatever it is doing."""
        ...


Allowed: TypeAlias = Callable[[int, int], int]
"""Tells how many more workers may be started, where so many are open and so many are starting."""


def all_at_once(_opened: int, _starting: int) -> int:
    return sys.maxsize


class WorkerTraceback(Exception):  # noqa: N818  it is never raised, only shown as a cause
    """The traceback of a worker, as the cause of the error that the driver raises."""


@dataclass(slots=True, eq=False)
class _FailuresInARow:
    """The failures at a place since it last finished a unit.

    `finished` is the number of units that the run had finished when the first of them came.
    """

    finished: int
    failures: int = 0
    units: int = 0
    """The number of different units that failed."""
    is_refuted: bool = False
    """True if one of these units was finished at another place."""
    is_given_up: bool = False


@dataclass(slots=True, eq=False)
class _Ticket:
    unit: Unit
    is_suspect: bool = False
    rows: list[_FailuresInARow] = field(default_factory=list)
    """The row to which each failed attempt belongs, for which the place may be to blame."""
    other_attempts: int = 0

    @property
    def attempts(self) -> int:
        """Count the failed attempts, without those at places that are known to be broken."""
        return self.other_attempts + sum(not (r.is_given_up and r.is_refuted) for r in self.rows)


class _Queue:
    """Units that wait for a worker. Those of which the next attempt is the last wait apart."""

    def __init__(self) -> None:
        self.usual: deque[_Ticket] = deque()
        self.last: deque[_Ticket] = deque()

    def __len__(self) -> int:
        return len(self.usual) + len(self.last)


class Schedule:
    def __init__(
        self,
        units: Iterable[Unit],
        *,
        workers: int,
        max_attempts: int,
        units_per_worker: int = 1,
        allowed: Allowed = all_at_once,
    ) -> None:
        self._source = iter(units)
        self._allowed = allowed
        self._exhausted = False
        self._max_attempts = max_attempts
        self._waiting, self._suspects = _Queue(), _Queue()
        self._empty = list(reversed(range(workers)))
        self._starting: set[int] = set()
        self._false_starts: dict[int, int] = {}
        self._rows: dict[int, _FailuresInARow] = {}
        self._opening: set[int] = set()
        """The starting workers that have their place."""
        self._doubts: dict[int, int] = {}
        """The doubt in each open place: 0 where the last unit was finished, else 1, and 1 more for
        each failure in a row."""
        self._doubted: Counter[int] = Counter()
        """The number of open places for each doubt."""
        self._broken: dict[int, str] = {}
        """The places whose workers are to be ended, and why."""
        self._finished = 0
        self._given_up: dict[int, int] = {}
        """The places that were given up, with how many units are finished when one is tried again.
        Until then it takes room as if it were open, so that no other slot gets there."""
        self._ever_ready = False
        self._orders = count(1)
        self._in_flight = 0
        self._held: dict[int, dict[int, _Ticket]] = {}
        """The units that each open worker holds, by order."""
        self._roomy: list[dict[int, None]] = [{} for _ in range(units_per_worker)]
        """The open workers with room for a unit more, by how many they hold. One that is busy
        with a suspect has none."""
        self._most: dict[int, int] = {}
        """The number of units that each open worker takes at once."""

    def dispatch(self, crew: Workers) -> bool:
        """Give units to workers, and start workers.

        Return whether there is anything to wait for: False once all units have ended.
        """
        self._end_broken(crew)
        self._try_again()
        self._hand_out(crew, 0)
        more = 0
        if self._empty:
            more = self._allowed(len(self._held) + len(self._given_up), len(self._starting))
        while self._empty and more > 0 and self._draw(len(self._starting) + 1):
            more -= 1
            slot = self._vacant()
            self._starting.add(slot)
            crew.start(slot)
        for load in range(1, len(self._roomy)):
            # One for each worker to come, or more where those that are here have many; and one
            # more that is not a suspect.
            kept = len(self._starting) * max(1, load - 1)
            self._hand_out(crew, load, kept=max(kept, len(self._suspects)))
        return bool(self._in_flight) or self._draw(1)

    def _end_broken(self, crew: Workers) -> None:
        for slot, why in self._broken.items():
            if slot in self._held:  # else it was lost meanwhile
                crew.end(slot)
                for ticket in self._close(slot):
                    self._put_back(ticket)
                self._give_up(slot, why)
        self._broken.clear()

    def _try_again(self) -> None:
        is_alone = not (self._held or self._starting)
        due = [s for s, when in self._given_up.items() if is_alone or when <= self._finished]
        for slot in due:
            del self._given_up[slot]
            self._empty.append(slot)

    def _hand_out(self, crew: Workers, load: int, *, kept: int = 0) -> None:
        """Give a unit more to workers that hold so many, as long as more units wait than `kept`."""
        roomy = self._roomy[load]
        while roomy and self._draw(kept + 1):
            for slot in reversed(roomy):  # mostly the first: to the others nothing can be given
                if ticket := self._take_for(slot):
                    break
            else:
                return
            self._give(crew, slot, load, ticket)

    def _take_for(self, slot: int) -> _Ticket | None:
        """Take a unit for a worker, or None if there is none that it may do.

        A last attempt is for a place in which there is the least doubt. If there is any, other
        units go first.
        """
        doubt = self._doubts[slot]
        queues = [self._waiting] if self._held[slot] else [self._suspects, self._waiting]
        for queue in queues:
            if queue.last and not doubt:
                return queue.last.popleft()
            if queue.usual:
                return queue.usual.popleft()
        must_wait = doubt > 1 and len(self._waiting.last) >= MOST_WAITING
        if not must_wait and self._draw(len(self._waiting) + len(self._suspects) + 1):
            return self._waiting.usual.popleft()
        least = min(self._doubted)
        if doubt > (min(least, 1) if self._opening else least):
            return None
        return next((queue.last.popleft() for queue in queues if queue.last), None)

    def _doubt(self, slot: int, doubt: int | None) -> None:
        """Set the doubt in a place, or forget it if no worker is open there any more."""
        before = self._doubts.pop(slot, None)
        if before is not None:
            self._doubted[before] -= 1
            if not self._doubted[before]:
                del self._doubted[before]
        if doubt is not None:
            self._doubts[slot] = doubt
            self._doubted[doubt] += 1

    def _vacant(self) -> int:
        """Take an empty slot to start a worker in.

        Prefer one that has not failed, if only last attempts are left.
        """
        slot = self._empty.pop()
        if self._empty and slot in self._rows and not (self._waiting.usual or self._suspects.usual):
            self._empty[-1], slot = slot, self._empty[-1]
        return slot

    def _draw(self, wanted: int) -> bool:
        missing = wanted - len(self._waiting) - len(self._suspects)
        while missing > 0 and not self._exhausted:
            try:
                self._waiting.usual.append(_Ticket(next(self._source)))
                missing -= 1
            except StopIteration:
                self._exhausted = True
        return missing <= 0

    def _give(self, crew: Workers, slot: int, load: int, ticket: _Ticket) -> None:
        del self._roomy[load][slot]
        order = next(self._orders)
        self._held[slot][order] = ticket
        self._in_flight += 1
        if load + 1 < self._most[slot] and not ticket.is_suspect:
            self._roomy[load + 1][slot] = None
        crew.give(slot, order, ticket.unit)

    def heard(self, slot: int, order: int, message: Message) -> Event | None:
        match message:
            case "progress", value:
                return Step(unit=self._held[slot][order].unit, value=value)
            case "done", result:
                ticket = self._take_back(slot, order)
                self._note_success(slot, ticket)
                return Finished(unit=ticket.unit, result=result)
            case "failed", failure:
                return self._failed(slot, self._take_back(slot, order), failure)
            case "returned", _:
                self._put_back(self._take_back(slot, order))
            case "opening", _:
                self._opening.add(slot)
            case "ready", units:
                self._starting.remove(slot)
                self._opening.discard(slot)
                self._most[slot] = min(units or len(self._roomy), len(self._roomy))
                self._held[slot] = {}
                self._doubt(slot, 1 + (self._rows[slot].failures if slot in self._rows else 0))
                self._roomy[0][slot] = None
                self._false_starts.pop(slot, None)
                self._ever_ready = True
            case "fatal", (error, trace):
                raise error from WorkerTraceback(trace)
            case "lost", failure:
                return self._lost(slot, failure)
        return None

    def _take_back(self, slot: int, order: int) -> _Ticket:
        held = self._held[slot]
        if len(held) < len(self._roomy):
            self._roomy[len(held)].pop(slot, None)
        ticket = held.pop(order)
        self._in_flight -= 1
        self._roomy[len(held)][slot] = None
        return ticket

    def _close(self, slot: int) -> list[_Ticket]:
        """Forget the worker of a slot, and return the units that it held."""
        tickets = list(self._held.pop(slot).values())
        self._in_flight -= len(tickets)
        if len(tickets) < len(self._roomy):
            self._roomy[len(tickets)].pop(slot, None)
        self._doubt(slot, None)
        return tickets

    def _note_success(self, slot: int, ticket: _Ticket) -> None:
        self._finished += 1
        self._rows.pop(slot, None)
        self._doubt(slot, 0)
        for row in ticket.rows:
            row.is_refuted = True

    def _failed(self, slot: int, ticket: _Ticket, failure: Failure) -> Quarantined | None:
        if failure.is_of_unit or failure.is_hopeless:
            ticket.other_attempts += 1
        else:
            if why := self._note_failure(slot, ticket, failure.reason):
                self._broken[slot] = why
            self._doubt(slot, self._doubts[slot] + 1)
        return self._try_or_quarantine(ticket, failure)

    def _note_failure(
        self, slot: int, ticket: _Ticket, reason: str, *, is_death: bool = False
    ) -> str:
        """Note that a unit failed at a place. If the place is broken, return why, and else "".

        It is broken if 3 or more different units in a row have failed there, and one of them was
        finished elsewhere; if each ended its worker, other units finished meanwhile are enough.
        """
        row = self._rows.setdefault(slot, _FailuresInARow(self._finished))
        row.failures += 1
        row.units += row not in ticket.rows
        ticket.rows.append(row)
        is_refuted = row.is_refuted or (is_death and row.finished < self._finished)
        if row.units < MOST_IN_A_ROW or not is_refuted:
            return ""
        row.is_given_up = True
        del self._rows[slot]
        row_of = f"{row.units} units in a row failed there"
        return f"{row_of}, while others were done elsewhere: {reason}"

    def _try_or_quarantine(self, ticket: _Ticket, failure: Failure) -> Quarantined | None:
        """Put a unit back that failed, or quarantine it if that was its last attempt."""
        reason, attempts = failure.reason, ticket.attempts
        if attempts < self._max_attempts and not failure.is_hopeless:
            if _log.isEnabledFor(logging.INFO):
                _log.info("%s is tried again: %s", ticket.unit.name, reason)
            self._put_back(ticket)
            return None
        return Quarantined(unit=ticket.unit, attempts=attempts, reason=reason, trace=failure.trace)

    def _put_back(self, ticket: _Ticket) -> None:
        queue = self._suspects if ticket.is_suspect else self._waiting
        is_last = 0 < ticket.attempts >= self._max_attempts - 1
        (queue.last if is_last else queue.usual).append(ticket)

    def _lost(self, slot: int, failure: Failure) -> Quarantined | None:
        if slot in self._starting:
            _log.warning("a worker could not begin%s: %s", _on(failure), failure.reason)
            self._starting.remove(slot)
            self._opening.discard(slot)
            self._vacate(slot, failure)
            return None
        tickets = self._close(slot)
        _log.warning("a worker was lost with %s: %s", plural(len(tickets), "unit"), failure.reason)
        if failure.costs and len(tickets) == 1:
            (ticket,) = tickets
            ticket.is_suspect = True
            if why := self._note_failure(slot, ticket, failure.reason, is_death=True):
                self._give_up(slot, why)
            else:
                self._empty.append(slot)
            return self._try_or_quarantine(ticket, failure)
        self._empty.append(slot)
        for ticket in tickets:
            if failure.costs:
                ticket.is_suspect = True
                ticket.other_attempts += ticket.attempts < self._max_attempts - 1
            self._put_back(ticket)
        return None

    def _give_up(self, slot: int, why: str) -> None:
        self._given_up[slot] = self._finished + TRIED_AGAIN
        _log.warning("a place is given up for now: %s", why)

    def _vacate(self, slot: int, failure: Failure) -> None:
        """Free the slot of a worker that did not get ready, for another try.

        After too many tries, give the slot up instead. Raise an error if the run cannot go on.
        """
        if failure.costs:
            self._false_starts[slot] = self._false_starts.get(slot, 0) + 1
        is_over = self._false_starts.get(slot, 0) >= self._max_attempts
        if not is_over:
            self._empty.append(slot)
        if self._is_hopeless(failure):
            trace = WorkerTraceback(failure.trace) if failure.trace else None
            error = failure.error or WorkError(f"workers do not start: {failure.reason}")
            raise error from trace
        if is_over:
            self._false_starts[slot] -= 1  # where it is tried again, once is enough
            self._give_up(slot, f"no worker can begin{_on(failure)}: {failure.reason}")

    def _is_hopeless(self, failure: Failure) -> bool:
        """Return whether the run is over because a worker could not start."""
        if self._ever_ready:
            others = self._given_up.keys() - self._false_starts.keys()
            return not (self._empty or self._starting or self._held or others)
        if failure.error is not None and not self._starting:
            return True
        untried = self._starting - self._false_starts.keys()
        return sum(self._false_starts.values()) >= self._max_attempts and not untried


def _on(failure: Failure) -> str:
    return f" on {failure.place}" if failure.place else ""


def drive(
    crew: Workers,
    units: Iterable[Unit],
    *,
    workers: int,
    max_attempts: int,
    units_per_worker: int = 1,
    allowed: Allowed = all_at_once,
) -> Generator[Event, None, None]:
    """Do all units with a crew of up to `workers`, and yield their events as they happen.

    `allowed` says how many more workers may start at a time. The crew is stopped at the end,
    however that comes. Raise the error that ends the run: a worker's own, or a WorkError if no
    worker starts.
    """
    schedule = Schedule(
        units,
        workers=workers,
        max_attempts=max_attempts,
        units_per_worker=units_per_worker,
        allowed=allowed,
    )
    try:
        while schedule.dispatch(crew):
            events = [schedule.heard(*heard) for heard in crew.hear()]
            yield from filter(None, events)
    finally:
        crew.stop()
