"""The decisions of a runner, apart from how messages travel: who gets which unit, what a
failure costs, when to give up.

A `Schedule` draws a unit when a worker is idle, or to justify starting one more worker, so
at most one unit a worker is ever held. Failed units go before fresh ones: what is held stays
bounded however many fail. Everything is O(1) a message.

A worker that dies before it is ready held no unit, so no unit is blamed: its place is tried
`max_attempts` times in a row and then given up; with no place left the run is over, and it is
over at once when no worker has ever become ready.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from wdsprep.errors import WdsprepError, WorkError
from wdsprep.runners import Event, Finished, Quarantined, Step, Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """The worker is open and waits for its first unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    value: object


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    result: object


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The unit raised; its worker lives on."""

    reason: str
    trace: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Fatal:
    """The whole run cannot go on."""

    error: WdsprepError
    trace: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """The worker is gone. It costs nothing where its node was taken away."""

    reason: str
    trace: str = ""
    costs: bool = True


Message: TypeAlias = Ready | Progress | Done | Failed | Fatal | Lost


class Crew(Protocol):
    """Workers, each known by its slot: how orders reach them and messages come back."""

    def start(self, slot: int) -> None: ...

    def give(self, slot: int, unit: Unit) -> None: ...

    def hear(self) -> Iterable[tuple[int, Message]]:
        """Wait for the next messages. After `Lost`, the slot is empty."""
        ...

    def stop(self) -> None:
        """End every worker, whatever it is doing."""
        ...


class WorkerTraceback(Exception):  # noqa: N818  it is never raised, only shown as a cause
    """Carries a worker's traceback as the cause of the error that the driver raises."""


@dataclass(slots=True)
class _Ticket:
    unit: Unit
    attempts: int = 0


class Schedule:
    def __init__(self, units: Iterable[Unit], *, workers: int, max_attempts: int) -> None:
        self._source = iter(units)
        self._max_attempts = max_attempts
        self._waiting: deque[_Ticket] = deque()
        self._exhausted = False
        self._empty = list(reversed(range(workers)))
        self._starting: set[int] = set()
        self._idle: list[int] = []
        self._held: dict[int, _Ticket] = {}
        self._false_starts: dict[int, int] = {}
        self._ever_ready = False

    def dispatch(self, crew: Crew) -> bool:
        """Give what can be given; whether there is anything left to wait for."""
        while self._idle and self._draw(1):
            slot = self._idle.pop()
            ticket = self._held[slot] = self._waiting.popleft()
            crew.give(slot, ticket.unit)
        while self._empty and self._draw(len(self._starting) + 1):
            slot = self._empty.pop()
            self._starting.add(slot)
            crew.start(slot)
        return bool(self._held or self._waiting)

    def _draw(self, wanted: int) -> bool:
        while len(self._waiting) < wanted and not self._exhausted:
            try:
                self._waiting.append(_Ticket(next(self._source)))
            except StopIteration:
                self._exhausted = True
        return len(self._waiting) >= wanted

    def heard(self, slot: int, message: Message) -> Event | None:
        match message:
            case Progress(value=value):
                return Step(unit=self._held[slot].unit, value=value)
            case Done(result=result):
                self._idle.append(slot)
                return Finished(unit=self._held.pop(slot).unit, result=result)
            case Failed(reason=reason, trace=trace):
                self._idle.append(slot)
                return self._blame(self._held.pop(slot), reason, trace)
            case Ready():
                self._starting.remove(slot)
                self._idle.append(slot)
                self._false_starts.pop(slot, None)
                self._ever_ready = True
                return None
            case Fatal(error=error, trace=trace):
                raise error from WorkerTraceback(trace)
            case Lost():
                return self._lost(slot, message)

    def _blame(self, ticket: _Ticket, reason: str, trace: str) -> Quarantined | None:
        ticket.attempts += 1
        if ticket.attempts < self._max_attempts:
            self._waiting.append(ticket)
            return None
        return Quarantined(unit=ticket.unit, attempts=ticket.attempts, reason=reason, trace=trace)

    def _lost(self, slot: int, message: Lost) -> Quarantined | None:
        if slot in self._starting:
            self._starting.remove(slot)
            self._vacate(slot, message)
            return None
        self._empty.append(slot)
        ticket = self._held.pop(slot, None)
        if ticket is None:
            self._idle.remove(slot)  # rare enough to be O(workers)
            return None
        if message.costs:
            return self._blame(ticket, message.reason, message.trace)
        self._waiting.append(ticket)
        return None

    def _vacate(self, slot: int, message: Lost) -> None:
        """A worker died before it was ready: try its place again, give it up, or give up."""
        tries = self._false_starts.get(slot, 0) + message.costs
        self._false_starts[slot] = tries
        if tries < self._max_attempts:
            self._empty.append(slot)
        hopeless = not self._ever_ready and (sum(self._false_starts.values()) >= self._max_attempts)
        if hopeless or not (self._empty or self._starting or self._idle or self._held):
            trace = WorkerTraceback(message.trace) if message.trace else None
            raise WorkError(f"workers do not start: {message.reason}") from trace


def drive(
    crew: Crew, units: Iterable[Unit], *, workers: int, max_attempts: int
) -> Generator[Event, None, None]:
    """Do all units with this crew. Workers get their next order before events go out."""
    schedule = Schedule(units, workers=workers, max_attempts=max_attempts)
    try:
        while schedule.dispatch(crew):
            events = [schedule.heard(slot, message) for slot, message in crew.hear()]
            yield from filter(None, events)
    finally:
        crew.stop()
