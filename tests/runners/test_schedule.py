"""Who does which unit, and who is given up: the schedule itself, with workers that only pretend."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.pretend import Pretenders
from wdsprep.runners.base import (
    Failure,
    Finished,
    Message,
    Quarantined,
    RunnerSettings,
    SlotMessage,
)
from wdsprep.runners.schedule import MOST_IN_A_ROW, TRIED_AGAIN, Schedule, drive


@pytest.mark.parametrize("units", [20_000, pytest.param(100_000, marks=pytest.mark.system)])
def test_the_queue_bears_many_units_and_a_tenth_as_many_workers(units: int) -> None:
    def cost(workers: int) -> float:
        crew = Pretenders()
        started = time.process_time()
        settings = RunnerSettings(units_per_worker=3)
        assert sum(1 for _ in drive(crew, range(units), settings, workers=workers)) == units
        assert crew.is_stopped
        return time.process_time() - started

    gc.disable()  # it goes through all that this process holds, the more often the more workers
    try:
        # An event costs the same, however many workers there are.
        assert cost(units // 10) < 5 * cost(10)
    finally:
        gc.enable()


class Desks(Pretenders):
    """Answers nothing by itself: the test says what happens, and sees who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, dict[int, int]] = {}

    def give(self, slot: int, order: int, unit: Any) -> None:
        self.held[slot][order] = unit

    def start(self, slot: int) -> None:
        self.started.append(slot)
        self.held[slot] = {}

    def end(self, slot: int, *, is_stuck: bool = False) -> str:
        assert not is_stuck
        del self.held[slot]
        return ""

    def units(self, slot: int) -> list[int]:
        return sorted(self.held[slot].values())

    def done(self, schedule: Schedule, unit: int) -> None:
        self.say(schedule, unit, ("done", None))

    def say(self, schedule: Schedule, unit: int, message: Message) -> Any:
        places = {held[order]: (slot, order) for slot, held in self.held.items() for order in held}
        slot, order = places[unit]
        del self.held[slot][order]
        event = schedule.take(slot, order, message)
        schedule.dispatch(self)
        return event

    def lose(self, schedule: Schedule, slot: int, *, costs: bool = True) -> Any:
        del self.held[slot]
        event = schedule.take(slot, 0, ("lost", Failure(reason="dead", costs=costs)))
        schedule.dispatch(self)
        return event

    def ready(self, schedule: Schedule, *slots: int) -> None:
        for slot in slots:
            schedule.take(slot, 0, ("ready", 0))
        schedule.dispatch(self)


def desks(units: int, *, workers: int, count: int, max_attempts: int = 3) -> tuple[Desks, Schedule]:
    crew, rules = Desks(), RunnerSettings(max_attempts=max_attempts, units_per_worker=count)
    schedule = Schedule(range(units), rules, workers=workers)
    schedule.dispatch(crew)
    return crew, schedule


def test_a_worker_that_takes_fewer_units_than_the_run_gives_gets_no_more() -> None:
    crew, schedule = desks(40, workers=3, count=8)
    for slot, units in enumerate((3, 0, 99)):
        schedule.take(slot, 0, ("ready", units))
    schedule.dispatch(crew)
    assert [len(crew.units(slot)) for slot in range(3)] == [3, 8, 8]
    for unit in crew.units(0):
        crew.done(schedule, unit)
        assert [len(crew.units(slot)) for slot in range(3)] == [3, 8, 8]


def test_workers_get_a_second_unit_when_each_has_a_first() -> None:
    crew, schedule = desks(5, workers=3, count=3)
    assert crew.started == [0, 1, 2]
    crew.ready(schedule, 0)
    assert len(crew.units(0)) == 3  # 5 units: one for each worker to come is left
    crew.ready(schedule, 1, 2)
    assert [len(crew.units(slot)) for slot in range(3)] == [3, 1, 1]


def test_a_worker_that_may_be_dead_gets_no_more_units_and_what_it_still_says_counts() -> None:
    crew, schedule = desks(20, workers=2, count=2)
    crew.ready(schedule, 0, 1)
    silent = crew.units(0)
    schedule.take(0, 0, ("unsure", None))
    crew.done(schedule, silent[0])
    assert crew.units(0) == silent[1:]
    assert crew.lose(schedule, 0, costs=False) is None
    crew.ready(schedule, 0)
    assert silent[1] in [*crew.units(0), *crew.units(1)]


def test_a_unit_whose_worker_died_with_others_runs_alone_until_it_is_over() -> None:
    crew, schedule = desks(100, workers=1, count=3)
    crew.ready(schedule, 0)
    assert crew.units(0) == [0, 1, 2]
    assert crew.lose(schedule, 0) is None
    crew.ready(schedule, 0)
    assert crew.units(0) == [0]
    crew.done(schedule, 0)
    assert crew.units(0) == [1]
    assert crew.say(schedule, 1, ("failed", Failure(reason="r", trace="t"))) is None
    assert crew.units(0) == [2]
    crew.done(schedule, 2)
    assert crew.units(0) == [1]
    assert crew.lose(schedule, 0).attempts == 3
    crew.ready(schedule, 0)
    assert crew.units(0) == [3, 4, 5]


def test_a_shared_death_is_never_the_last_attempt() -> None:
    crew, schedule = desks(2, workers=1, count=2, max_attempts=1)
    crew.ready(schedule, 0)
    assert crew.lose(schedule, 0) is None
    crew.ready(schedule, 0)
    assert crew.lose(schedule, 0).attempts == 1


def test_the_last_attempt_of_a_unit_that_runs_alone_is_made_at_another_place() -> None:
    crew, schedule = desks(100, workers=2, count=1)
    crew.ready(schedule, 0, 1)
    (unit,) = crew.units(0)
    crew.lose(schedule, 0)
    crew.ready(schedule, 0)
    assert crew.units(0) == [unit]
    crew.lose(schedule, 0)
    crew.ready(schedule, 0)
    assert crew.units(0) != [unit]
    crew.done(schedule, *crew.units(1))
    assert crew.units(1) == [unit]


def test_beyond_the_least_few_workers_wait_for_a_place_at_a_time() -> None:
    from wdsprep.runners.ray.cluster import AHEAD, ahead_of_open

    crew, least, most = Desks(), 20, 100
    allowed = partial(ahead_of_open, least)
    schedule = Schedule(range(10_000), RunnerSettings(), workers=most, allowed=allowed)
    schedule.dispatch(crew)
    assert len(crew.started) == least
    for opened in range(1, most + 1):
        crew.ready(schedule, crew.started[opened - 1])
        assert len(crew.started) - opened <= max(least - opened, AHEAD, opened // 4)
    assert len(crew.started) == most


def test_without_a_number_workers_follow_the_room_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from wdsprep.runners.ray import cluster

    resources, now = {"CPU": 2}, {"s": 0.0}
    monkeypatch.setattr(cluster.ray, "nodes", lambda: [{"Alive": True, "Resources": resources}])
    monkeypatch.setattr(cluster.time, "monotonic", lambda: now["s"])
    crew, allowed = Desks(), cluster.room_now(RunnerSettings(), 2)
    alone = RunnerSettings(max_attempts=1)
    schedule = Schedule(range(1_000), alone, workers=cluster.MOST, allowed=allowed)
    schedule.dispatch(crew)
    assert crew.started == [0, 1]
    resources["CPU"] = 4
    crew.ready(schedule, 0, 1)
    assert crew.started == [0, 1], "the room is not looked at all the time"
    now["s"] += cluster.LOOK_S + 1
    schedule.dispatch(crew)
    assert crew.started == [0, 1, 2, 3]
    resources["CPU"] = 1
    now["s"] += cluster.LOOK_S + 1
    crew.lose(schedule, 0, costs=False)
    assert crew.started == [0, 1, 2, 3]


def dying_at(slots: Collection[int], units: Collection[int]) -> Pretenders:
    """Of some units, or of any at some places."""

    def how(slot: int, unit: int) -> Message:
        is_fatal = slot in slots or unit in units
        return ("lost", Failure(reason="died")) if is_fatal else ("done", None)

    return Pretenders(how)


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_units_in_a_row_that_kill_are_left_out_and_all_others_done(workers: int) -> None:
    crew, killers = dying_at((), range(10, 16)), range(10, 16)
    events = list(drive(crew, range(40), RunnerSettings(), workers=workers))
    assert sorted(e.unit for e in events if isinstance(e, Quarantined)) == list(killers)
    finished = {e.unit for e in events if isinstance(e, Finished)}
    assert finished == {*range(40)} - {*killers}


def test_a_place_that_was_given_up_is_tried_again_later() -> None:
    crew = dying_at({0}, ())
    events = drive(crew, range(400), RunnerSettings(), workers=2)
    assert sum(isinstance(event, Finished) for event in events) == 400
    assert 3 * MOST_IN_A_ROW <= crew.started.count(0) < 400 / TRIED_AGAIN * (MOST_IN_A_ROW + 2)


class Chaos(Desks):
    """Any message at any time; checks what it is given."""

    def __init__(self, chance: random.Random, count: int, killers: frozenset[int]) -> None:
        super().__init__()
        self.chance, self.count, self.killers = chance, count, killers
        self.opening: set[int] = set()
        self.alone: set[int] = set()
        self.failures: dict[int, int] = {}

    def start(self, slot: int) -> None:
        super().start(slot)
        self.opening.add(slot)

    def give(self, slot: int, order: int, unit: Any) -> None:
        assert all(unit not in held.values() for held in self.held.values())
        assert slot not in self.opening
        super().give(slot, order, unit)
        held = self.units(slot)
        assert len(held) <= self.count
        assert len(held) == 1 or not self.alone & set(held)

    def hear(self) -> Iterable[SlotMessage]:
        slot = self.chance.choice(list(self.held))
        if slot in self.opening:
            self.opening.remove(slot)
            return [(slot, 0, ("ready", 0))]
        if not self.held[slot]:
            return []
        order, unit = self.chance.choice(list(self.held[slot].items()))
        roll = self.chance.random()
        if roll < 0.2:
            return [(slot, order, ("progress", unit))]
        if roll < 0.3 or unit in self.killers:
            return [self._lost(slot, costs=roll > 0.25)]
        del self.held[slot][order]
        if roll < 0.4:
            self.failures[unit] = self.failures.get(unit, 0) + 1
            return [(slot, order, ("failed", Failure(reason="r", trace="t")))]
        return [(slot, order, ("done", unit))]

    def _lost(self, slot: int, *, costs: bool) -> SlotMessage:
        units = self.held.pop(slot).values()
        if costs:
            self.alone.update(units)
            for unit in units:
                self.failures[unit] = self.failures.get(unit, 0) + 1
        return slot, 0, ("lost", Failure(reason="r", costs=costs))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 5),
    count=st.integers(1, 4),
    max_attempts=st.integers(1, 4),
    killers=st.frozensets(st.integers(0, 39), max_size=4),
)
def test_in_any_chaos_every_unit_ends_once_and_none_runs_beside_one_that_may_kill(
    seed: int, workers: int, count: int, max_attempts: int, killers: frozenset[int]
) -> None:
    crew = Chaos(random.Random(seed), count, killers)
    rules = RunnerSettings(max_attempts=max_attempts, units_per_worker=count)
    finished, quarantined = [], {}
    for event in drive(crew, range(40), rules, workers=workers):
        if isinstance(event, Finished):
            assert event.unit == event.result
            finished.append(event.unit)
        elif isinstance(event, Quarantined):
            assert event.unit not in quarantined
            quarantined[event.unit] = event.attempts
        else:
            assert event.unit == event.value
    assert sorted([*finished, *quarantined]) == list(range(40))
    assert killers <= quarantined.keys()
    assert set(quarantined.values()) <= {max_attempts}
    assert all(crew.failures[unit] >= max_attempts for unit in quarantined)
