"""The schedule of a run: who gets which unit, what a failure costs, when to give up.

These are the decisions of a runner, apart from how messages travel.

A `Schedule` draws a unit when a worker has room for it, or to justify starting one more
worker. Failed units go before fresh ones: what is held stays bounded however many fail.
A message costs O(1), and O(workers) only while a last attempt waits for a better place, or once no
unit waits any more.

A worker gets a second unit only when there is one for every worker that has none yet, and a fourth
only when there are two, so units spread over workers before they pile up on the first.

When a worker dies with several units, any of them may be the killer. From then on each of them runs
*alone*, in a worker that has nothing else, so the next death tells which it is. The shared death
counts as an attempt, but never as the last one. Units that run alone wait for a worker that holds
nothing, such as the one that replaces the dead: none is emptied for them.

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
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from itertools import count, islice, product
from typing import Protocol, TypeAlias

from wdsprep.errors import WorkError
from wdsprep.runners.base import (
    Event,
    Failure,
    Finished,
    Message,
    Quarantined,
    RunnerSettings,
    SlotMessage,
    Step,
    Unit,
)
from wdsprep.runners.stuck_workers import Watch
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

    def end(self, slot: int, *, is_stuck: bool = False) -> str:
        """End the worker of a slot, and return its place in words, or "" if that is not known.

        Nothing more is heard of the worker. One that `is_stuck` gets no time to clean up.
        """
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


@dataclass(slots=True, eq=False)
class _Streak:
    """Failures in a row at one place of a worker, those since a unit was last finished there."""

    finished: int
    """The number of units that the run had finished when the first of them came."""
    failures: int = 0
    units: int = 0
    """The number of different units that failed."""
    is_refuted: bool = False
    """True if one of these units was finished at another place."""
    is_given_up: bool = False


@dataclass(slots=True, eq=False)
class _Task:
    """A unit, and its failed attempts."""

    unit: Unit
    runs_alone: bool = False
    streaks: list[_Streak] = field(default_factory=list)
    """The streak to which each failed attempt belongs, for which the place may be to blame."""
    other_attempts: int = 0

    @property
    def attempts(self) -> int:
        """Count the failed attempts, without those at places that are known to be broken."""
        counted = [not (streak.is_given_up and streak.is_refuted) for streak in self.streaks]
        return self.other_attempts + sum(counted)


@dataclass(slots=True, eq=False)
class _OpenWorker:
    capacity: int
    """The number of units that it takes at once; 0 once nobody knows whether it lives."""
    tasks: dict[int, _Task] = field(default_factory=dict)
    """The units that it holds, by order."""
    is_proven: bool = False
    """True if it has finished a unit."""


class Schedule:
    """The units that wait and the workers that hold some, with what is known of both.

    Up to `workers` workers are started, of which `allowed` says how many more may start at a time.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        settings: RunnerSettings,
        *,
        workers: int,
        allowed: Allowed = all_at_once,
    ) -> None:
        self._source = iter(units)
        self._settings = settings
        self._allowed = allowed
        self._queues = {kind: deque[_Task]() for kind in product((True, False), repeat=2)}
        """The units that wait, by whether each runs alone, and whether its next attempt is the
        last."""
        self._empty = list(reversed(range(workers)))
        self._starting: set[int] = set()
        self._false_starts: dict[int, int] = {}
        self._opening: set[int] = set()
        """The starting workers that have their place."""
        self._ever_ready = False
        self._open: dict[int, _OpenWorker] = {}
        self._roomy: list[dict[int, None]] = [{} for _ in range(settings.units_per_worker)]
        """The open workers with room for a unit more, by how many they hold. One whose unit runs
        alone has none."""
        self._orders = count(1)
        self._finished = 0
        self._streaks: dict[int, _Streak] = {}
        """The failures in a row at each place at which the last unit failed."""
        self._broken: dict[int, str] = {}
        """The places whose workers are to be ended, and why."""
        self._given_up: dict[int, int] = {}
        """The places that were given up, with how many units are finished when one is tried again.
        Until then it takes room as if it were open, so that no other slot gets there."""
        self._watch = Watch(settings)

    def dispatch(self, crew: Workers) -> bool:
        """Give units to workers, and start workers.

        Return whether there is anything to wait for: False once all units have ended.
        """
        for slot, why in self._broken.items():
            if slot in self._open:  # else it was lost meanwhile
                crew.end(slot)
                self._watch.forget(slot)
                for task in self._close(slot):
                    self._put_back(task)
                self._give_up(slot, why)
        self._broken.clear()
        is_alone = not (self._open or self._starting)
        for slot, when in [*self._given_up.items()]:
            if is_alone or when <= self._finished:
                del self._given_up[slot]
                self._empty.append(slot)
        self._hand_out(crew, 0)
        more = 0
        if self._empty:
            more = self._allowed(len(self._open) + len(self._given_up), len(self._starting))
        while self._empty and more > 0 and self._draw(len(self._starting) + 1):
            more -= 1
            slot = self._empty.pop()
            only_last = not (self._queues[True, False] or self._queues[False, False])
            if self._empty and slot in self._streaks and only_last:  # one that has not failed
                self._empty[-1], slot = slot, self._empty[-1]
            self._starting.add(slot)
            crew.start(slot)
        for load in range(1, len(self._roomy)):
            # One for each worker to come, or more where those that are here have many; and one
            # more that does not run alone.
            kept = len(self._starting) * max(1, load - 1)
            alone = len(self._queues[True, False]) + len(self._queues[True, True])
            self._hand_out(crew, load, kept=max(kept, alone))
        return any(worker.tasks for worker in self._open.values()) or self._draw(1)

    def _hand_out(self, crew: Workers, load: int, *, kept: int = 0) -> None:
        """Give a unit more to workers that hold so many, as long as more units wait than `kept`."""
        roomy = self._roomy[load]
        while roomy and self._draw(kept + 1):
            last_wait = self._queues[True, True] or self._queues[False, True]
            least = min(map(self._risk, self._open)) if last_wait else 0
            for slot in reversed(roomy):  # mostly the first: to the others nothing can be given
                if task := self._take_for(slot, least):
                    break
            else:
                return
            del roomy[slot]
            order, worker = next(self._orders), self._open[slot]
            worker.tasks[order] = task
            if load + 1 < worker.capacity and not task.runs_alone:
                self._roomy[load + 1][slot] = None
            self._watch.given(slot, order)
            crew.give(slot, order, task.unit)

    def _risk(self, slot: int) -> int:
        """Return how likely a unit is to fail at the place of an open worker, for comparison.

        This is 0 if the last unit there was finished, else 1, and 1 more for each failure in a row.
        """
        streak = self._streaks.get(slot)
        return (not self._open[slot].is_proven) + (streak.failures if streak else 0)

    def _take_for(self, slot: int, least: int) -> _Task | None:
        """Take a unit for a worker, or None if there is none that it may do.

        A last attempt is for a place whose risk is the `least`. If that is not 0, other units go
        first.
        """
        risk = self._risk(slot)
        kinds = [False] if self._open[slot].tasks else [True, False]
        for runs_alone in kinds:
            if (last := self._queues[runs_alone, True]) and not risk:
                return last.popleft()
            if usual := self._queues[runs_alone, False]:
                return usual.popleft()
        must_wait = risk > 1 and len(self._queues[False, True]) >= MOST_WAITING
        if not must_wait and self._draw(sum(map(len, self._queues.values())) + 1):
            return self._queues[False, False].popleft()
        if risk > (min(least, 1) if self._opening else least):
            return None
        queues = [self._queues[runs_alone, True] for runs_alone in kinds]
        return next((queue.popleft() for queue in queues if queue), None)

    def _draw(self, wanted: int) -> bool:
        """Draw units until so many wait, and return whether there were enough."""
        missing = max(0, wanted - sum(map(len, self._queues.values())))
        drawn = [_Task(unit) for unit in islice(self._source, missing)]
        self._queues[False, False].extend(drawn)
        return len(drawn) == missing

    def end_stuck(self, crew: Workers) -> list[Event]:
        """End workers that came no further for too long. Return the events that this makes."""
        lost = [
            (slot, replace(failure, place=crew.end(slot, is_stuck=True)))
            for slot, failure in self._watch.overdue()
        ]
        events = [self.take(slot, 0, ("lost", failure)) for slot, failure in lost]
        return [event for event in events if event]

    def take(self, slot: int, order: int, message: Message) -> Event | None:
        """Take a message of a worker, or about it, and return the event that it makes, if any."""
        self._watch.take(slot, order, message)
        match message:
            case "progress", value:
                return Step(unit=self._open[slot].tasks[order].unit, value=value)
            case "done", result:
                task = self._take_back(slot, order)
                self._finished += 1
                self._streaks.pop(slot, None)
                self._open[slot].is_proven = True
                for streak in task.streaks:
                    streak.is_refuted = True
                return Finished(unit=task.unit, result=result)
            case "failed", failure:
                task = self._take_back(slot, order)
                if failure.is_of_unit or failure.is_hopeless:
                    task.other_attempts += 1
                elif why := self._note_failure(slot, task, failure.reason):
                    self._broken[slot] = why
                return self._try_or_quarantine(task, failure)
            case "unsure", _:
                if worker := self._open.get(slot):
                    worker.capacity = 0
                    self._leave_roomy(slot, worker)
            case "opening", _:
                self._opening.add(slot)
            case "ready", units:
                self._starting.remove(slot)
                self._opening.discard(slot)
                most = len(self._roomy)
                self._open[slot] = _OpenWorker(min(units or most, most))
                self._roomy[0][slot] = None
                self._false_starts.pop(slot, None)
                self._ever_ready = True
            case "fatal", (error, trace):
                raise error from RuntimeError(f"in a worker:\n{trace}")
            case "lost", failure if slot in self._starting:
                self._vacate(slot, failure)
            case "lost", failure:
                return self._lost(slot, failure)
        return None

    def _take_back(self, slot: int, order: int) -> _Task:
        worker = self._open[slot]
        self._leave_roomy(slot, worker)
        task = worker.tasks.pop(order)
        if len(worker.tasks) < worker.capacity:
            self._roomy[len(worker.tasks)][slot] = None
        return task

    def _leave_roomy(self, slot: int, worker: _OpenWorker) -> None:
        if len(worker.tasks) < len(self._roomy):
            self._roomy[len(worker.tasks)].pop(slot, None)

    def _close(self, slot: int) -> list[_Task]:
        """Forget the worker of a slot, and return the units that it held."""
        worker = self._open.pop(slot)
        self._leave_roomy(slot, worker)
        return list(worker.tasks.values())

    def _note_failure(self, slot: int, task: _Task, reason: str, *, is_death: bool = False) -> str:
        """Note that a unit failed at a place. If the place is broken, return why, and else "".

        It is broken if 3 or more different units in a row have failed there, and one of them was
        finished elsewhere; if each ended its worker, other units finished meanwhile are enough.
        """
        streak = self._streaks.setdefault(slot, _Streak(self._finished))
        streak.failures += 1
        streak.units += streak not in task.streaks
        task.streaks.append(streak)
        is_refuted = streak.is_refuted or (is_death and streak.finished < self._finished)
        if streak.units < MOST_IN_A_ROW or not is_refuted:
            return ""
        streak.is_given_up = True
        del self._streaks[slot]
        in_a_row = f"{streak.units} units in a row failed there"
        return f"{in_a_row}, while others were done elsewhere: {reason}"

    def _try_or_quarantine(self, task: _Task, failure: Failure) -> Quarantined | None:
        """Put a unit back that failed, or quarantine it if that was its last attempt."""
        reason, attempts = failure.reason, task.attempts
        if attempts < self._settings.max_attempts and not failure.is_hopeless:
            if _log.isEnabledFor(logging.INFO):
                _log.info("%s is tried again: %s", task.unit.name, reason)
            self._put_back(task)
            return None
        return Quarantined(unit=task.unit, attempts=attempts, reason=reason, trace=failure.trace)

    def _put_back(self, task: _Task) -> None:
        is_last = 0 < task.attempts >= self._settings.max_attempts - 1
        self._queues[task.runs_alone, is_last].append(task)

    def _lost(self, slot: int, failure: Failure) -> Quarantined | None:
        tasks = self._close(slot)
        _log.warning("a worker was lost with %s: %s", plural(len(tasks), "unit"), failure.reason)
        if failure.costs and len(tasks) == 1:
            (task,) = tasks
            task.runs_alone = True
            if why := self._note_failure(slot, task, failure.reason, is_death=True):
                self._give_up(slot, why)
            else:
                self._empty.append(slot)
            return self._try_or_quarantine(task, failure)
        self._empty.append(slot)
        for task in tasks:
            if failure.costs:
                task.runs_alone = True
                task.other_attempts += task.attempts < self._settings.max_attempts - 1
            self._put_back(task)
        return None

    def _give_up(self, slot: int, why: str) -> None:
        self._given_up[slot] = self._finished + TRIED_AGAIN
        _log.warning("a place is given up for now: %s", why)

    def _vacate(self, slot: int, failure: Failure) -> None:
        """Free the slot of a worker that did not get ready, for another try.

        After too many tries, give the slot up instead. Raise an error if the run cannot go on.
        """
        where = f" on {failure.place}" if failure.place else ""
        _log.warning("a worker could not begin%s: %s", where, failure.reason)
        self._starting.remove(slot)
        self._opening.discard(slot)
        most = self._settings.max_attempts
        if failure.costs:
            self._false_starts[slot] = self._false_starts.get(slot, 0) + 1
        is_over = self._false_starts.get(slot, 0) >= most
        if not is_over:
            self._empty.append(slot)
        if self._ever_ready:
            others = self._given_up.keys() - self._false_starts.keys()
            is_hopeless = not (self._empty or self._starting or self._open or others)
        else:
            untried = self._starting - self._false_starts.keys()
            is_hopeless = sum(self._false_starts.values()) >= most and not untried
            is_hopeless |= failure.error is not None and not self._starting
        if is_hopeless:
            cause = RuntimeError(f"in a worker:\n{failure.trace}") if failure.trace else None
            raise failure.error or WorkError(f"workers do not start: {failure.reason}") from cause
        if is_over:
            self._false_starts[slot] -= 1  # where it is tried again, once is enough
            self._give_up(slot, f"no worker can begin{where}: {failure.reason}")


def drive(
    crew: Workers,
    units: Iterable[Unit],
    settings: RunnerSettings,
    *,
    workers: int,
    allowed: Allowed = all_at_once,
) -> Generator[Event, None, None]:
    """Do all units with a crew of up to `workers`, and yield their events as they happen.

    `allowed` says how many more workers may start at a time. The crew is stopped at the end,
    however that comes. Raise the error that ends the run: a worker's own, or a WorkError if no
    worker starts.
    """
    schedule = Schedule(units, settings, workers=workers, allowed=allowed)
    try:
        while schedule.dispatch(crew):
            events = [schedule.take(*message) for message in crew.hear()]
            yield from filter(None, events)
            yield from schedule.end_stuck(crew)
    finally:
        crew.stop()
