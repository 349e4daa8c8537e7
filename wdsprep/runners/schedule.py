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

A worker may also start each time and die of whatever it is given, as one whose GPU is broken. What
tells such a place from units that kill: there, `MOST_DEATHS` different ones die alone and none is
finished between them, while units are finished elsewhere. So that no good unit is lost with it, the
last of several attempts at a unit that died alone is made at another place, where one is open or
about to be.

A place is given up, for either reason, until `TRIED_AGAIN` more units are finished, or no other
place is open: it may have been mended, or its machine replaced.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol, TypeAlias

from wdsprep.errors import WdsprepError, WorkError
from wdsprep.runners.base import Event, Finished, Quarantined, Step, Unit
from wdsprep.text import plural

_log = logging.getLogger("wdsprep")

MOST_DEATHS = 3
"""The deaths of different units, at one place that finishes none, after which it is given up."""
TRIED_AGAIN = 100
"""Units that others finish before a place that was given up is tried again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """The message that a worker is open and waits for its first units."""

    units: int = 0
    """The number of units it takes at once; 0: as many as the schedule gives to one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitProgress:
    value: object


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    result: object


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The message that a unit raised an error, after which its worker lives on."""

    reason: str
    trace: str
    is_hopeless: bool = False
    """Another attempt would fail the same way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Returned:
    """The message that a unit never reached its worker, and so has no part in its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fatal:
    """The message that the whole run cannot go on."""

    error: WdsprepError
    trace: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """The message that a worker is gone, with all units it held.

    It `costs` them an attempt, unless the node of the worker was taken away.
    """

    reason: str
    trace: str = ""
    costs: bool = True
    place: str = ""
    """The place where that was, as far as the worker itself could say so."""
    error: WdsprepError | None = None
    """Why it could not open; raised as it is where that ends the run."""

    @property
    def where(self) -> str:
        return f" on {self.place}" if self.place else ""


Message: TypeAlias = Ready | UnitProgress | Done | Failed | Returned | Fatal | Lost
SlotMessage: TypeAlias = tuple[int, int, Message]
"""Slot, order, message. The order is 0 where the message is about the worker itself."""


class Workers(Protocol):
    """Workers, each known by its slot, that take units and send messages.

    Every giving of a unit is an *order* with a number of its own, which messages come back with: a
    unit that is given again is another order.
    """

    def start(self, slot: int) -> None: ...

    def give(self, slot: int, order: int, unit: Unit) -> None: ...

    def hear(self) -> Iterable[SlotMessage]:
        """Wait a while for messages of the workers, and return those that came: perhaps none.

        After `Lost` the slot is empty, and nothing more is heard of the units that its
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
class _Ticket:
    unit: Unit
    attempts: int = 0
    is_suspect: bool = False
    died_at: int | None = None
    """The slot whose worker died last when it held this unit alone."""


@dataclass(frozen=True, slots=True)
class _Deaths:
    """The units that died alone at a slot since it last finished one.

    `finished` is the number of units that the run had finished when the first of them died.
    """

    finished: int
    units: set[_Ticket] = field(default_factory=set)


class _Suspects:
    """A queue of suspects: units that may have ended a worker.

    A suspect may be barred from the slot whose worker it ended.
    """

    def __init__(self) -> None:
        self._free: deque[_Ticket] = deque()
        self._barred: dict[int, deque[_Ticket]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, ticket: _Ticket, barred: int | None) -> None:
        there = self._free if barred is None else self._barred.setdefault(barred, deque())
        there.append(ticket)
        self._count += 1

    def take(self, slot: int | None) -> _Ticket | None:
        """Remove and return a suspect that is not barred from a slot; without a slot, any suspect.

        Return None if there is none.
        """
        bars = (bar for bar in self._barred if bar != slot)
        if self._free:
            ticket = self._free.popleft()
        elif (bar := next(bars, None)) is not None:
            ticket = self._barred[bar].popleft()
            if not self._barred[bar]:
                del self._barred[bar]
        else:
            return None
        self._count -= 1
        return ticket

    def are_barred(self, slot: int) -> bool:
        """Return whether no unit of the queue may be given to the slot."""
        return len(self._barred.get(slot, ())) == self._count


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
        self._waiting: deque[_Ticket] = deque()
        self._suspects = _Suspects()
        self._empty = list(reversed(range(workers)))
        self._starting: set[int] = set()
        self._false_starts: dict[int, int] = {}
        self._deaths: dict[int, _Deaths] = {}
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
        self._try_again()
        idle, *others = self._roomy
        while idle and self._draw(1):
            slot = next(reversed(idle))
            if (ticket := self._take_for(slot)) is None:  # all that is left is barred from it
                slot = next(iter(idle))
                if (ticket := self._take_for(slot)) is None:
                    break
            self._give(crew, slot, 0, ticket)
        more = 0
        if self._empty:
            more = self._allowed(len(self._held) + len(self._given_up), len(self._starting))
        while self._empty and more > 0 and self._draw(len(self._starting) + 1):
            more -= 1
            slot = self._vacant()
            self._starting.add(slot)
            crew.start(slot)
        for load, roomy in enumerate(others, start=1):
            # One for each worker to come, or more where those that are here have many; and one
            # more that is not a suspect.
            kept = len(self._starting) * max(1, load - 1)
            while roomy and self._draw(max(kept, len(self._suspects)) + 1):
                self._give(crew, next(reversed(roomy)), load, self._waiting.popleft())
        return bool(self._in_flight or self._waiting or self._suspects)

    def _try_again(self) -> None:
        is_alone = not (self._held or self._starting)
        due = [s for s, when in self._given_up.items() if is_alone or when <= self._finished]
        for slot in due:
            del self._given_up[slot]
            self._empty.append(slot)

    def _take_for(self, slot: int) -> _Ticket | None:
        """Take a unit for an idle worker.

        A unit that is barred from this slot waits for another slot, if there is one. Return None if
        no unit may be given to this worker.
        """
        ticket = self._suspects.take(slot)
        if ticket is None and self._draw(len(self._suspects) + 1):
            ticket = self._waiting.popleft()
        if ticket is None and len(self._held) == 1 and not self._starting:
            ticket = self._suspects.take(None)
        return ticket

    def _vacant(self) -> int:
        """Take an empty slot to start a worker in.

        Prefer one that the waiting units are not barred from.
        """
        slot = self._empty.pop()
        if self._empty and not self._waiting and self._suspects.are_barred(slot):
            self._empty[-1], slot = slot, self._empty[-1]
        return slot

    def _draw(self, wanted: int) -> bool:
        missing = wanted - len(self._waiting) - len(self._suspects)
        while missing > 0 and not self._exhausted:
            try:
                self._waiting.append(_Ticket(next(self._source)))
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
            case UnitProgress(value=value):
                return Step(unit=self._held[slot][order].unit, value=value)
            case Done(result=result):
                self._deaths.pop(slot, None)
                self._finished += 1
                return Finished(unit=self._take_back(slot, order).unit, result=result)
            case Failed(reason=reason, trace=trace, is_hopeless=is_hopeless):
                ticket = self._take_back(slot, order)
                return self._blame(ticket, reason, trace, is_last=is_hopeless)
            case Returned():
                self._put_back(self._take_back(slot, order))
                return None
            case Ready(units=units):
                self._starting.remove(slot)
                self._most[slot] = min(units or len(self._roomy), len(self._roomy))
                self._held[slot] = {}
                self._roomy[0][slot] = None
                self._false_starts.pop(slot, None)
                self._ever_ready = True
                return None
            case Fatal(error=error, trace=trace):
                raise error from WorkerTraceback(trace)
            case Lost():
                return self._lost(slot, message)

    def _take_back(self, slot: int, order: int) -> _Ticket:
        held = self._held[slot]
        if len(held) < len(self._roomy):
            self._roomy[len(held)].pop(slot, None)
        ticket = held.pop(order)
        self._in_flight -= 1
        self._roomy[len(held)][slot] = None
        return ticket

    def _blame(
        self, ticket: _Ticket, reason: str, trace: str, *, is_last: bool = False
    ) -> Quarantined | None:
        ticket.attempts += 1
        if ticket.attempts < self._max_attempts and not is_last:
            if _log.isEnabledFor(logging.INFO):
                _log.info("%s is tried again: %s", ticket.unit.name, reason)
            self._put_back(ticket)
            return None
        return Quarantined(unit=ticket.unit, attempts=ticket.attempts, reason=reason, trace=trace)

    def _put_back(self, ticket: _Ticket) -> None:
        if not ticket.is_suspect:
            self._waiting.append(ticket)
            return
        is_last = ticket.attempts + 1 >= self._max_attempts
        self._suspects.add(ticket, ticket.died_at if is_last else None)

    def _lost(self, slot: int, message: Lost) -> Quarantined | None:
        if slot in self._starting:
            _log.warning("a worker could not begin%s: %s", message.where, message.reason)
            self._starting.remove(slot)
            self._vacate(slot, message)
            return None
        tickets = list(self._held.pop(slot).values())
        _log.warning("a worker was lost with %s: %s", plural(len(tickets), "unit"), message.reason)
        self._in_flight -= len(tickets)
        if len(tickets) < len(self._roomy):
            self._roomy[len(tickets)].pop(slot, None)
        if message.costs and len(tickets) == 1:
            tickets[0].is_suspect, tickets[0].died_at = True, slot
            self._leave(slot, tickets[0], message.reason)
            return self._blame(tickets[0], message.reason, message.trace)
        self._empty.append(slot)
        for ticket in tickets:
            if message.costs:
                ticket.is_suspect = True
                ticket.attempts = min(ticket.attempts + 1, self._max_attempts - 1)
            self._put_back(ticket)
        return None

    def _leave(self, slot: int, ticket: _Ticket, reason: str) -> None:
        """Note that a unit ended the worker of a slot, and free the slot for another worker.

        Give the slot up instead if 3 or more different units in a row have done so, and units were
        finished elsewhere meanwhile.
        """
        here = self._deaths.setdefault(slot, _Deaths(self._finished))
        here.units.add(ticket)
        if len(here.units) < MOST_DEATHS or here.finished == self._finished:
            self._empty.append(slot)
            return
        del self._deaths[slot]
        what = f"{MOST_DEATHS} units in a row ended its worker, while others were done elsewhere"
        self._give_up(slot, f"{what}: {reason}")

    def _give_up(self, slot: int, why: str) -> None:
        self._given_up[slot] = self._finished + TRIED_AGAIN
        _log.warning("a place is given up for now: %s", why)

    def _vacate(self, slot: int, message: Lost) -> None:
        """Free the slot of a worker that did not get ready, for another try.

        After too many tries, give the slot up instead. Raise an error if the run cannot go on.
        """
        if message.costs:
            self._false_starts[slot] = self._false_starts.get(slot, 0) + 1
        is_over = self._false_starts.get(slot, 0) >= self._max_attempts
        if not is_over:
            self._empty.append(slot)
        if self._is_hopeless(message):
            trace = WorkerTraceback(message.trace) if message.trace else None
            error = message.error or WorkError(f"workers do not start: {message.reason}")
            raise error from trace
        if is_over:
            self._false_starts[slot] -= 1  # where it is tried again, once is enough
            self._give_up(slot, f"no worker can begin{message.where}: {message.reason}")

    def _is_hopeless(self, message: Lost) -> bool:
        """Return whether the run is over because a worker could not start."""
        if self._ever_ready:
            others = self._given_up.keys() - self._false_starts.keys()
            return not (self._empty or self._starting or self._held or others)
        if message.error is not None and not self._starting:
            return True
        untried = self._starting - self._false_starts.keys()
        return sum(self._false_starts.values()) >= self._max_attempts and not untried


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
