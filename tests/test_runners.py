"""Real processes, a real Ray of one and of three nodes, real signals."""

from __future__ import annotations

import os
import random
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
from work_for_runners import (
    Endless,
    KillOnce,
    Number,
    Slow,
    Square,
    Unopenable,
)

from wdsprep.errors import FullError, UsageError, WorkError
from wdsprep.runners import Finished, Quarantined, Step, make_runner
from wdsprep.runners.queue import Done, Failed, Lost, Message, Progress, Ready, drive

DRIVER = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from work_for_runners import endless_driver; endless_driver(*sys.argv[1:])
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(params=["local", "ray"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("cluster")
    return str(request.param)


def numbers(count: int) -> Iterator[Number]:
    return map(Number, range(count))


def run(kind: str, work: Any, units: Any, *, workers: int = 2) -> tuple[Any, ...]:
    events = list(make_runner(kind, workers=workers, name="test").run(work, units))
    return tuple([e for e in events if isinstance(e, k)] for k in (Step, Finished, Quarantined))


def wait_until(claim: Callable[[], Any], *, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not claim():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def pids(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


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
    assert "work_for_runners.py" in quarantined.trace
    assert [s.value for s in steps if s.unit.value == 1] == [0, 1, 2] * 3


def test_a_result_that_cannot_be_pickled_is_the_units_failure(kind: str) -> None:
    _, finished, (quarantined,) = run(kind, Square(unpicklable=frozenset({0})), numbers(2))
    assert [e.unit.value for e in finished] == [1]
    assert "lock" in quarantined.reason


def test_our_own_error_stops_the_run_and_comes_out_as_it_is(kind: str) -> None:
    with pytest.raises(FullError, match=r"^the disk is full: make room and run again$") as caught:
        run(kind, Square(fills=frozenset({3})), numbers(1_000))
    assert "work_for_runners.py" in str(caught.value.__cause__)


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


def test_closing_early_ends_all_workers_and_leaves_no_temporary_file(
    kind: str, tmp_path: Path
) -> None:
    with closing(make_runner(kind, workers=2).run(Endless(str(tmp_path)), numbers(9))) as events:
        running = {next(events).unit.name for _ in range(8)}
        wait_until(lambda: len(pids(tmp_path)) == 2)
        assert running
        assert list(tmp_path.glob("*.tmp"))
        started = time.monotonic()
    assert time.monotonic() - started < 4.0
    wait_until(lambda: not any(map(is_running, pids(tmp_path))), within_s=3.0)
    assert list(tmp_path.glob("*.tmp")) == []


@pytest.mark.parametrize("kind", ["local", "ray"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_workers_never_outlive_their_driver(kind: str, how: signal.Signals, tmp_path: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, kind, str(tmp_path)],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_until(lambda: len(list(tmp_path.glob("running-*"))) == 2, within_s=60.0)
    descendants = psutil.Process(driver.pid).children(recursive=True)
    assert set(pids(tmp_path)) <= {process.pid for process in descendants}
    os.killpg(driver.pid, how) if how == signal.SIGINT else driver.kill()
    out, err = driver.communicate(timeout=20)
    workers = [process for process in descendants if process.pid in pids(tmp_path)]
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert alive == []
    assert driver.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    if kind == "local" or how == signal.SIGINT:
        assert list(tmp_path.glob("*.tmp")) == []
    assert (out, err) == (b"", b"")


# --- local processes


def test_a_step_that_takes_long_is_interrupted(tmp_path: Path) -> None:
    events = make_runner("local", workers=1).run(Endless(str(tmp_path), step_s=60.0), numbers(1))
    next(events)
    time.sleep(0.2)
    started = time.monotonic()
    events.close()
    assert time.monotonic() - started < 2.0
    assert list(tmp_path.glob("*.tmp")) == []


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


# --- Ray


@pytest.mark.parametrize("graceful", [True, False])
def test_a_removed_node_costs_no_attempt(cluster: Any, graceful: bool, tmp_path: Path) -> None:
    nodes = [cluster.add_node(num_cpus=1, num_gpus=1) for _ in range(2)]
    runner = make_runner("ray", workers=2, gpus_per_worker=1, max_attempts=1)
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


# --- the queue by itself


class FakeCrew:
    """Answers every order at once; `how` says what becomes of a unit."""

    def __init__(self, how: Callable[[int, Any], list[Message]] | None = None) -> None:
        self.how = how or (lambda _slot, _unit: [Done(result=None)])
        self.messages: deque[tuple[int, Message]] = deque()
        self.started: list[int] = []
        self.stopped = False

    def start(self, slot: int) -> None:
        self.started.append(slot)
        self.messages.append((slot, Ready()))

    def give(self, slot: int, unit: Any) -> None:
        self.messages.extend((slot, message) for message in self.how(slot, unit))

    def hear(self) -> list[tuple[int, Message]]:
        messages = list(self.messages)
        self.messages.clear()
        return messages

    def stop(self) -> None:
        self.stopped = True


def test_the_queue_bears_many_units_and_ten_thousand_workers() -> None:
    crew = FakeCrew()
    started = time.perf_counter()
    count = sum(1 for _ in drive(crew, range(300_000), workers=10_000, max_attempts=3))
    assert count == 300_000
    assert crew.stopped
    assert count / (time.perf_counter() - started) > 50_000


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
            self.messages.append((slot, Lost(reason="no GPU") if slot else Ready()))

    crew = HalfCrew()
    events = list(drive(crew, range(100), workers=2, max_attempts=3))
    assert len(events) == 100
    assert crew.started.count(1) <= 3


def test_there_are_never_more_workers_than_units() -> None:
    crew = FakeCrew()
    assert len(list(drive(crew, range(3), workers=50, max_attempts=3))) == 3
    assert len(crew.started) == 3
