"""Real processes, a real Ray of one and of three nodes, real signals."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.clusters import ray_cluster
from tests.kit.paths import FIND_TESTS
from tests.kit.runner_work import (
    BreakOnce,
    Claimed,
    Endless,
    KillOnce,
    Number,
    Slow,
    Square,
    Together,
    Unopenable,
    Visible,
)
from wdsprep.errors import FullError, UsageError, WorkError
from wdsprep.runners import Finished, Quarantined, Step, make_runner
from wdsprep.runners.queue import (
    Done,
    Failed,
    Heard,
    Lost,
    Message,
    Progress,
    Ready,
    Returned,
    Schedule,
    drive,
)

DRIVER = f"""
{FIND_TESTS}
from tests.kit.runner_work import endless_driver; endless_driver(*sys.argv[1:])
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster(cpus=2) as cluster:
        yield cluster


@pytest.fixture(params=["local", "ray"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("cluster")
    return str(request.param)


def numbers(count: int) -> Iterator[Number]:
    return map(Number, range(count))


def run(kind: str, work: Any, units: Any, *, workers: int = 2, **options: Any) -> tuple[Any, ...]:
    runner = make_runner(kind, workers=workers, name="test", **options)
    events = list(runner.run(work, units))
    return tuple([e for e in events if isinstance(e, k)] for k in (Step, Finished, Quarantined))


def wait_until(claim: Callable[[], Any], *, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not claim():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def pids(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


def closed(folder: Path) -> dict[int, str]:
    """The workers whose work was closed, and how many units it still had then."""
    return {
        int(path.name.removeprefix("closed-")): path.read_text() for path in folder.glob("closed-*")
    }


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


# --- both runners


def test_every_unit_is_done_once_with_its_result_and_its_progress(kind: str) -> None:
    steps, finished, quarantined = run(kind, Square(), numbers(20))
    assert sorted((e.unit.value, e.result[0]) for e in finished) == [(n, n * n) for n in range(20)]
    assert 1 <= len({e.result[1] for e in finished}) <= 2
    assert [s.value for s in steps if s.unit.value == 7] == [0, 1, 2]
    assert quarantined == []


def test_no_units_need_no_worker(kind: str) -> None:
    assert run(kind, Unopenable("dies"), []) == ([], [], [])


def test_units_whose_worker_was_killed_are_done_by_another(kind: str, tmp_path: Path) -> None:
    _, finished, quarantined = run(kind, KillOnce(str(tmp_path)), numbers(12))
    assert sorted(e.result for e in finished) == list(range(12))
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [1, 5, 9]
    assert quarantined == []


def test_a_unit_that_always_kills_its_worker_is_quarantined_and_the_rest_finished(
    kind: str,
) -> None:
    _, finished, (quarantined,) = run(kind, Square(kills=frozenset({2})), numbers(6))
    assert sorted(e.unit.value for e in finished) == [0, 1, 3, 4, 5]
    assert (quarantined.unit, quarantined.attempts) == (Number(2), 3)
    expected = {
        "local": "worker was killed by SIGKILL (out of memory?)",
        "ray": "worker died: Worker unexpectedly exits with a connection error",
    }
    assert quarantined.reason.startswith(expected[kind])


def test_a_unit_that_raises_is_quarantined_with_its_trace(kind: str) -> None:
    steps, finished, (quarantined,) = run(kind, Square(raises=frozenset({1})), numbers(3))
    assert len(finished) == 2
    assert quarantined.attempts == 3
    assert quarantined.reason == "ValueError: no square for 1"
    assert "runner_work.py" in quarantined.trace
    assert [s.value for s in steps if s.unit.value == 1] == [0, 1, 2] * 3


def test_a_result_that_cannot_be_pickled_is_the_units_failure(kind: str) -> None:
    _, finished, (quarantined,) = run(kind, Square(unpicklable=frozenset({0})), numbers(2))
    assert [e.unit.value for e in finished] == [1]
    assert "lock" in quarantined.reason


def test_our_own_error_stops_the_run_and_comes_out_as_it_is(kind: str) -> None:
    with pytest.raises(FullError, match=r"^the disk is full: make room and run again$") as caught:
        run(kind, Square(fills=frozenset({3})), numbers(1_000))
    assert "runner_work.py" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("full", FullError, "no room for the model"),
        ("raises", WorkError, "workers do not start: ImportError: no module named gpu"),
        ("dies", WorkError, "workers do not start: worker "),
    ],
)
def test_workers_that_cannot_open_end_the_run(
    kind: str, how: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(kind, Unopenable(how), numbers(5))


def test_units_are_read_as_workers_need_them(kind: str) -> None:
    drawn = []

    def units() -> Iterator[Number]:
        for number in numbers(1_000_000):
            drawn.append(number)
            yield number

    runner = make_runner(kind, workers=2)
    finished = 0
    with closing(runner.run(Square(), units())) as events:
        for event in events:
            finished += isinstance(event, Finished)
            assert len(drawn) <= finished + 5
            if finished == 10:
                break


def test_an_error_of_the_source_comes_out(kind: str) -> None:
    def units() -> Iterator[Number]:
        yield Number(0)
        raise LookupError("the table is gone")

    with pytest.raises(LookupError, match="the table is gone"):
        run(kind, Square(), units())


@pytest.mark.parametrize("count", [1, 3])
def test_closing_early_ends_all_workers_and_leaves_no_temporary_file(
    kind: str, count: int, tmp_path: Path
) -> None:
    runner = make_runner(kind, workers=2, units_per_worker=count)
    with closing(runner.run(Endless(str(tmp_path)), numbers(9))) as events:
        running: set[str] = set()
        while len(running) < 2 * count:
            running.add(next(events).unit.name)
        assert len(list(tmp_path.glob("*.tmp.*"))) == 2 * count
        started = time.monotonic()
    assert time.monotonic() - started < 4.0
    wait_until(lambda: not any(map(is_running, pids(tmp_path))), within_s=3.0)
    assert list(tmp_path.glob("*.tmp.*")) == []
    assert closed(tmp_path) == dict.fromkeys(pids(tmp_path), "0")


@pytest.mark.parametrize("kind", ["local", "ray"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("count", [1, 3])
def test_workers_never_outlive_their_driver(
    kind: str, how: signal.Signals, count: int, tmp_path: Path
) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, kind, str(tmp_path), str(count)],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_until(lambda: len(list(tmp_path.glob("running-*"))) == 2 * count, within_s=60.0)
    descendants = psutil.Process(driver.pid).children(recursive=True)
    assert set(pids(tmp_path)) <= {process.pid for process in descendants}
    os.killpg(driver.pid, how) if how == signal.SIGINT else driver.kill()
    out, err = driver.communicate(timeout=20)
    workers = [process for process in descendants if process.pid in pids(tmp_path)]
    wait_until(lambda: not any(is_running(worker.pid) for worker in workers), within_s=10.0)
    assert driver.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    if kind == "local" or how == signal.SIGINT:
        assert list(tmp_path.glob("*.tmp.*")) == []
        assert closed(tmp_path) == dict.fromkeys(pids(tmp_path), "0")
    assert (out, err) == (b"", b"")


# --- several units in one worker


def test_several_units_are_in_flight_in_one_worker_each_in_its_thread(kind: str) -> None:
    steps, finished, _ = run(kind, Together(3), numbers(9), workers=1, units_per_worker=3)
    assert sorted(e.unit.value for e in finished) == list(range(9))
    processes, threads = zip(*(e.result for e in finished), strict=True)
    assert len(set(processes)) == 1
    assert len(set(threads)) >= 3
    assert len(steps) == 18
    assert all(step.value == step.unit.value for step in steps)


@pytest.mark.parametrize("max_attempts", [1, 3])
def test_a_killer_among_others_is_quarantined_alone(kind: str, max_attempts: int) -> None:
    work = Square(kills=frozenset({2}), step_s=0.05)
    options = {"units_per_worker": 3, "max_attempts": max_attempts}
    _, finished, (quarantined,) = run(kind, work, numbers(12), **options)
    assert sorted(e.unit.value for e in finished) == [n for n in range(12) if n != 2]
    assert (quarantined.unit, quarantined.attempts) == (Number(2), max_attempts)
    assert quarantined.reason.startswith("worker ")


def test_a_unit_is_never_given_twice_at_once(kind: str, tmp_path: Path) -> None:
    options = {"units_per_worker": 3, "max_attempts": 2}
    _, finished, quarantined = run(kind, Claimed(str(tmp_path)), numbers(18), **options)
    assert sorted(e.unit.value for e in quarantined) == [1, 7, 13], quarantined
    assert len({e.unit for e in finished}) == len(finished) == 15
    assert not any(e.result for e in finished)


@pytest.mark.parametrize("count", [1, 3])
def test_a_unit_that_finds_its_worker_broken_gets_another(
    kind: str, count: int, tmp_path: Path
) -> None:
    work = BreakOnce(str(tmp_path))
    steps, finished, quarantined = run(kind, work, numbers(3), workers=1, units_per_worker=count)
    assert sorted(e.unit.value for e in finished) == [0, 1, 2]
    assert quarantined == []
    broken = int(Path(tmp_path, "broken").read_text())
    assert [e.unit.value for e in finished if e.result == broken] == [0][: count == 1]
    assert len({step.value for step in steps}) == 2
    assert not is_running(broken)
    assert list(tmp_path.glob("*.tmp")) == []


@pytest.mark.parametrize("count", [1, 3])
def test_a_unit_that_always_finds_its_worker_broken_is_quarantined(kind: str, count: int) -> None:
    work = Square(breaks=frozenset({1}))
    _, finished, (quarantined,) = run(kind, work, numbers(5), units_per_worker=count)
    assert sorted(e.unit.value for e in finished) == [0, 2, 3, 4]
    assert (quarantined.unit, quarantined.attempts) == (Number(1), 3)
    assert quarantined.reason == "BrokenWorkerError: the GPU is poisoned"
    assert "runner_work.py" in quarantined.trace


@pytest.mark.parametrize("count", [1, 3])
def test_a_hopeless_unit_is_not_tried_again_and_its_worker_lives_on(kind: str, count: int) -> None:
    work = Square(despairs=frozenset({3}))
    options = {"workers": 1, "units_per_worker": count}
    _, finished, (quarantined,) = run(kind, work, numbers(6), **options)
    assert len({e.result[1] for e in finished}) == 1
    assert len(finished) == 5
    assert (quarantined.unit, quarantined.attempts) == (Number(3), 1)
    assert quarantined.reason == "shard 256/000003.tar is truncated"


def test_units_side_by_side_fail_and_end_the_run_as_one_by_one(kind: str) -> None:
    work = Square(raises=frozenset({1}), unpicklable=frozenset({2}), fills=frozenset({40}))
    quarantined = []

    def listen() -> None:
        for event in make_runner(kind, workers=2, units_per_worker=3).run(work, numbers(1_000)):
            if isinstance(event, Quarantined):
                quarantined.append((event.unit.value, event.attempts))

    with pytest.raises(FullError, match="make room"):
        listen()
    assert sorted(quarantined) == [(1, 3), (2, 3)]


# --- local processes


@pytest.mark.parametrize("count", [1, 3])
def test_a_worker_that_gets_sigterm_leaves_no_temporary_file(count: int, tmp_path: Path) -> None:
    runner = make_runner("local", workers=1, max_attempts=9, units_per_worker=count)
    with closing(runner.run(Endless(str(tmp_path)), numbers(count))) as events:
        while len(list(tmp_path.glob("*.tmp.*"))) < count:
            next(events)
        (first,) = pids(tmp_path)
        os.kill(first, signal.SIGTERM)
        while len(pids(tmp_path)) == 1:
            next(events)
        assert not is_running(first)
        assert list(tmp_path.glob(f"*.tmp.{first}")) == []
        assert closed(tmp_path) == {first: "0"}


def test_a_unit_that_leaves_its_thread_ends_the_worker() -> None:
    work = Square(leaves=frozenset({0}))
    _, finished, (quarantined,) = run("local", work, numbers(4), units_per_worker=3)
    assert len(finished) == 3
    assert quarantined.reason == "worker exited with code 143"


def test_a_signal_that_another_thread_takes_ends_the_worker() -> None:
    work = Square(signals=frozenset({0}))
    _, finished, (quarantined,) = run("local", work, numbers(1), units_per_worker=3)
    assert (finished, quarantined.reason) == ([], "worker exited with code 143")


def test_workers_see_the_gpus_in_turn() -> None:
    _, finished, _ = run("local", Visible(), numbers(8), workers=0, gpus=("3", "5"))
    assert {e.result for e in finished} == {"3", "5"}
    _, finished, _ = run("local", Visible(), numbers(6), workers=3, gpus=("7",))
    assert {e.result for e in finished} == {"7"}


def test_without_gpus_the_environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    assert {e.result for e in run("local", Visible(), numbers(2))[1]} == {"9"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert {e.result for e in run("local", Visible(), numbers(2))[1]} == {None}


def test_a_step_that_takes_long_is_interrupted(tmp_path: Path) -> None:
    events = make_runner("local", workers=1).run(Endless(str(tmp_path), step_s=60.0), numbers(1))
    next(events)
    time.sleep(0.2)
    started = time.monotonic()
    events.close()
    assert time.monotonic() - started < 2.0
    assert list(tmp_path.glob("*.tmp.*")) == []
    assert closed(tmp_path) == dict.fromkeys(pids(tmp_path), "0")


def test_a_worker_that_exits_is_reported_with_its_code() -> None:
    _, _, (quarantined,) = run("local", Square(exits=frozenset({0})), numbers(1))
    assert quarantined.reason == "worker exited with code 7"


def test_the_local_runner_does_not_import_ray() -> None:
    code = (
        "import sys; from wdsprep.runners import make_runner; make_runner('local');"
        "assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_runner_that_is_not_there_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="choose local or ray"):
        make_runner("slurm")


def test_a_worker_that_holds_nothing_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="cannot hold 0 units"):
        make_runner("local", units_per_worker=0)


# --- Ray


@pytest.mark.parametrize(("graceful", "count"), [(True, 1), (False, 1), (False, 2)])
def test_a_removed_node_costs_no_attempt(
    cluster: Any, graceful: bool, count: int, tmp_path: Path
) -> None:
    nodes = [cluster.add_node(num_cpus=1, num_gpus=1) for _ in range(2)]
    runner = make_runner(
        "ray", workers=2, gpus_per_worker=1, max_attempts=1, units_per_worker=count
    )
    lost: set[str] = set()
    finished = []
    for event in runner.run(Slow(str(tmp_path)), numbers(4)):
        assert not isinstance(event, Quarantined)
        if isinstance(event, Finished):
            finished.append(event.unit.value)
        elif not lost:
            (node,) = [node for node in nodes if node.node_id == event.value]
            cluster.remove_node(node, allow_graceful=graceful)
            nodes.remove(node)
            lost.add(event.value)
            Path(tmp_path, "go").touch()
    for node in nodes:
        cluster.remove_node(node)
    assert sorted(finished) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"),
        ("ray://head:10001", "give HOST:PORT"),
    ],
)
def test_an_address_where_no_ray_is_gives_one_clear_line(address: str, message: str) -> None:
    code = f"""
from wdsprep.errors import WorkError
from wdsprep.runners import make_runner
try:
    list(make_runner("ray", address={address!r}).run(object(), []))
except WorkError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert message in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


MENDED = """
import logging, os, sys
from wdsprep.errors import WorkError
from wdsprep.runners.cluster import connected
class Mend(logging.Handler):
    def emit(self, record):
        print(record.getMessage())
        if sys.argv[2] == "mend":
            del os.environ["RAY_TMPDIR"]
logging.getLogger("wdsprep").addHandler(Mend())
os.environ["RAY_TMPDIR"] = sys.argv[1]
try:
    with connected("local", cpus=1, dashboard=False):
        print("it runs")
except WorkError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("then", "last"),
    [
        ("mend", "it runs"),
        ("leave", r"Ray does not start on this machine \(.*AF_UNIX path length .*\): run the same"),
    ],
)
def test_a_ray_that_does_not_start_is_started_once_more(
    tmp_path: Path, then: str, last: str
) -> None:
    """Here since its sockets would have too long a name."""
    words = [sys.executable, "-c", MENDED, str(tmp_path / ("long" * 30)), then]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    told, end = done.stdout.splitlines()
    assert re.match(r"Ray did not start \(.*AF_UNIX path length .*\): trying once more", told)
    assert re.match(last, end)
    assert done.stderr == ""


# --- the queue by itself


class FakeCrew:
    """Answers every order at once; `how` says what becomes of a unit."""

    def __init__(self, how: Callable[[int, Any], list[Message]] | None = None) -> None:
        self.how = how or (lambda _slot, _unit: [Done(result=None)])
        self.messages: deque[Heard] = deque()
        self.started: list[int] = []
        self.stopped = False

    def start(self, slot: int) -> None:
        self.started.append(slot)
        self.messages.append((slot, 0, Ready()))

    def give(self, slot: int, order: int, unit: Any) -> None:
        self.messages.extend((slot, order, message) for message in self.how(slot, unit))

    def hear(self) -> list[Heard]:
        messages = list(self.messages)
        self.messages.clear()
        return messages

    def stop(self) -> None:
        self.stopped = True


@pytest.mark.parametrize("count", [1, 3])
def test_the_queue_bears_many_units_and_ten_thousand_workers(count: int) -> None:
    def cost(workers: int) -> float:
        crew = FakeCrew()
        started = time.process_time()
        orders = {"workers": workers, "max_attempts": 3, "units_per_worker": count}
        assert sum(1 for _ in drive(crew, range(100_000), **orders)) == 100_000
        assert crew.stopped
        return time.process_time() - started

    gc.disable()  # it goes through all that this process holds, the more often the more workers
    try:
        # An event costs the same, however many workers there are.
        assert cost(10_000) < 5 * cost(10)
    finally:
        gc.enable()


def test_whatever_happens_every_unit_ends_once_and_no_fault_of_a_node_is_counted() -> None:
    generator = random.Random(1)
    faults: dict[int, int] = {}

    def how(_slot: int, unit: int) -> list[Message]:
        chance = generator.random()
        if chance < 0.2:
            return [Progress(value=1), Lost(reason="node", costs=False)]
        if chance < 0.5:
            faults[unit] = faults.get(unit, 0) + 1
            return [[Failed(reason="r", trace="t")], [Lost(reason="r")]][chance < 0.4]
        return [Progress(value=1), Done(result=unit)]

    events = list(drive(FakeCrew(how), range(5_000), workers=7, max_attempts=3))
    finished = [e.unit for e in events if isinstance(e, Finished)]
    quarantined = [e.unit for e in events if isinstance(e, Quarantined)]
    assert sorted(finished + quarantined) == list(range(5_000))
    assert quarantined
    assert all((faults.get(unit, 0) >= 3) == (unit in quarantined) for unit in faults)


def test_failed_units_go_first_so_that_few_are_held() -> None:
    drawn = 0

    def units() -> Iterator[int]:
        nonlocal drawn
        while drawn < 10_000:
            yield drawn
            drawn += 1

    crew = FakeCrew(lambda _slot, _unit: [Failed(reason="r", trace="t")])
    events = drive(crew, units(), workers=4, max_attempts=3)
    for count, _ in enumerate(events):
        assert drawn <= count + 8


def test_a_place_where_no_worker_starts_is_given_up_and_the_others_do_its_work() -> None:
    class HalfCrew(FakeCrew):
        def start(self, slot: int) -> None:
            self.started.append(slot)
            self.messages.append((slot, 0, Lost(reason="no GPU") if slot else Ready()))

    crew = HalfCrew()
    events = list(drive(crew, range(100), workers=2, max_attempts=3))
    assert len(events) == 100
    assert crew.started.count(1) <= 3


def test_there_are_never_more_workers_than_units() -> None:
    crew = FakeCrew()
    assert len(list(drive(crew, range(3), workers=50, max_attempts=3))) == 3
    assert len(crew.started) == 3


class Desks(FakeCrew):
    """Answers nothing by itself: the test says what happens, and sees who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, dict[int, int]] = {}

    def give(self, slot: int, order: int, unit: Any) -> None:
        self.held[slot][order] = unit

    def start(self, slot: int) -> None:
        self.started.append(slot)
        self.held[slot] = {}

    def units(self, slot: int) -> list[int]:
        return sorted(self.held[slot].values())

    def done(self, schedule: Schedule, unit: int) -> None:
        self.say(schedule, unit, Done(result=None))

    def say(self, schedule: Schedule, unit: int, message: Message) -> Any:
        ((slot, order),) = [
            (slot, order)
            for slot, held in self.held.items()
            for order in held
            if held[order] == unit
        ]
        del self.held[slot][order]
        event = schedule.heard(slot, order, message)
        schedule.dispatch(self)
        return event

    def lose(self, schedule: Schedule, slot: int, *, costs: bool = True) -> Any:
        del self.held[slot]
        event = schedule.heard(slot, 0, Lost(reason="dead", costs=costs))
        schedule.dispatch(self)
        return event

    def ready(self, schedule: Schedule, *slots: int) -> None:
        for slot in slots:
            schedule.heard(slot, 0, Ready())
        schedule.dispatch(self)


def desks(units: int, *, workers: int, count: int, max_attempts: int = 3) -> tuple[Desks, Schedule]:
    crew = Desks()
    schedule = Schedule(
        range(units), workers=workers, max_attempts=max_attempts, units_per_worker=count
    )
    schedule.dispatch(crew)
    return crew, schedule


def test_workers_get_a_second_unit_when_each_has_a_first() -> None:
    crew, schedule = desks(5, workers=3, count=3)
    assert crew.started == [0, 1, 2]
    crew.ready(schedule, 0)
    assert len(crew.units(0)) == 3  # 5 units: one for each worker to come is left
    crew.ready(schedule, 1, 2)
    assert [len(crew.units(slot)) for slot in range(3)] == [3, 1, 1]


def test_units_go_to_the_worker_that_holds_fewest() -> None:
    crew, schedule = desks(100, workers=3, count=3)
    crew.ready(schedule, 0, 1, 2)
    assert [len(crew.units(slot)) for slot in range(3)] == [3, 3, 3]
    crew, schedule = desks(7, workers=3, count=3)
    crew.ready(schedule, 0, 1, 2)
    assert sorted(len(crew.units(slot)) for slot in range(3)) == [2, 2, 3]


@pytest.mark.parametrize("count", [1, 3])
def test_no_worker_is_started_without_a_unit_for_it(count: int) -> None:
    crew, schedule = desks(2, workers=9, count=count)
    assert crew.started == [0, 1]
    crew.ready(schedule, 0)
    assert len(crew.units(0)) == 1


def test_a_suspect_is_alone_until_it_is_over() -> None:
    crew, schedule = desks(100, workers=1, count=3)
    crew.ready(schedule, 0)
    assert crew.units(0) == [0, 1, 2]
    assert crew.lose(schedule, 0) is None
    crew.ready(schedule, 0)
    assert crew.units(0) == [0]
    crew.done(schedule, 0)
    assert crew.units(0) == [1]
    assert crew.say(schedule, 1, Failed(reason="r", trace="t")) is None
    assert crew.units(0) == [2]
    crew.done(schedule, 2)
    assert crew.units(0) == [1]
    assert crew.lose(schedule, 0).attempts == 3
    crew.ready(schedule, 0)
    assert crew.units(0) == [3, 4, 5]


def test_the_other_workers_go_on_beside_suspects() -> None:
    crew, schedule = desks(100, workers=2, count=2)
    crew.ready(schedule, 0, 1)
    suspects = crew.units(0)
    crew.lose(schedule, 0)
    for unit in crew.units(1):
        crew.done(schedule, unit)
        assert len(crew.units(1)) == 2
        assert not set(suspects) & set(crew.units(1))
    crew.ready(schedule, 0)
    assert crew.units(0) == suspects[:1]


def test_a_shared_death_is_never_the_last_attempt() -> None:
    crew, schedule = desks(2, workers=1, count=2, max_attempts=1)
    crew.ready(schedule, 0)
    assert crew.lose(schedule, 0) is None
    crew.ready(schedule, 0)
    assert crew.lose(schedule, 0).attempts == 1


def test_a_node_that_is_taken_away_makes_no_suspects() -> None:
    crew, schedule = desks(2, workers=1, count=2, max_attempts=1)
    crew.ready(schedule, 0)
    crew.lose(schedule, 0, costs=False)
    crew.ready(schedule, 0)
    assert crew.units(0) == [0, 1]


def test_a_unit_that_never_reached_its_worker_has_no_part_in_its_death() -> None:
    crew, schedule = desks(2, workers=1, count=2, max_attempts=1)
    crew.ready(schedule, 0)
    ((order, _),) = [item for item in crew.held[0].items() if item[1] == 1]
    schedule.heard(0, order, Returned())
    assert crew.lose(schedule, 0).unit == 0
    crew.ready(schedule, 0)
    assert crew.units(0) == [1]


def test_a_unit_without_hope_keeps_the_attempts_that_it_had() -> None:
    crew, schedule = desks(1, workers=1, count=2)
    crew.ready(schedule, 0)
    crew.say(schedule, 0, Failed(reason="r", trace="t"))
    event = crew.say(schedule, 0, Failed(reason="gone", trace="t", is_hopeless=True))
    assert (event.attempts, event.reason) == (2, "gone")


class Chaos(Desks):
    """Any message at any time; checks what it is given."""

    def __init__(self, chance: random.Random, count: int, killers: frozenset[int]) -> None:
        super().__init__()
        self.chance, self.count, self.killers = chance, count, killers
        self.opening: set[int] = set()
        self.suspects: set[int] = set()
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
        assert len(held) == 1 or not self.suspects & set(held)

    def hear(self) -> list[Heard]:
        slot = self.chance.choice(list(self.held))
        if slot in self.opening:
            self.opening.remove(slot)
            return [(slot, 0, Ready())]
        if not self.held[slot]:
            return []
        order, unit = self.chance.choice(list(self.held[slot].items()))
        roll = self.chance.random()
        if roll < 0.2:
            return [(slot, order, Progress(value=unit))]
        if roll < 0.3 or unit in self.killers:
            return [self._lost(slot, costs=roll > 0.25)]
        del self.held[slot][order]
        if roll < 0.4:
            self.failures[unit] = self.failures.get(unit, 0) + 1
            return [(slot, order, Failed(reason="r", trace="t"))]
        return [(slot, order, Done(result=unit))]

    def _lost(self, slot: int, *, costs: bool) -> Heard:
        units = self.held.pop(slot).values()
        if costs:
            self.suspects.update(units)
            for unit in units:
                self.failures[unit] = self.failures.get(unit, 0) + 1
        return slot, 0, Lost(reason="r", costs=costs)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 5),
    count=st.integers(1, 4),
    max_attempts=st.integers(1, 4),
    killers=st.frozensets(st.integers(0, 39), max_size=4),
)
def test_in_any_chaos_every_unit_ends_once_and_suspects_are_alone(
    seed: int, workers: int, count: int, max_attempts: int, killers: frozenset[int]
) -> None:
    crew = Chaos(random.Random(seed), count, killers)
    orders = {"workers": workers, "max_attempts": max_attempts, "units_per_worker": count}
    finished, quarantined = [], {}
    for event in drive(crew, range(40), **orders):
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
