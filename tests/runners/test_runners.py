"""What both runners promise, with real processes, a real Ray and real signals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tests.kit.command_lines import python
from tests.kit.packs import is_running
from tests.kit.runner_work import (
    BreakOnce,
    Collected,
    Cursed,
    Endless,
    HangsAtFirst,
    Number,
    Square,
    Together,
    Unopenable,
)
from tests.kit.runs import DRIVER, closed, numbers, pids, run, wait_until
from wdsprep.errors import FullError, UsageError, WorkError
from wdsprep.runners.base import Finished, RunnerSettings
from wdsprep.runners.make_runner import make_runner

# --- both runners


def test_every_unit_is_done_once_with_its_result_and_its_progress(kind: str) -> None:
    steps, finished, quarantined = run(kind, Square(), numbers(20))
    assert sorted((e.unit.value, e.result[0]) for e in finished) == [(n, n * n) for n in range(20)]
    assert 1 <= len({e.result[1] for e in finished}) <= 2
    assert [s.value for s in steps if s.unit.value == 7] == [0, 1, 2]
    assert quarantined == []


def test_a_worker_opens_its_work_without_a_full_garbage_collection(kind: str) -> None:
    """What a process begins with is in force again after that; this one has another, for tests."""
    usual = int(python("import gc; print(gc.get_threshold()[2])").stdout)
    _, finished, _ = run(kind, Collected(), numbers(1), workers=1)
    assert [e.result for e in finished] == [(0, usual)]


def test_a_unit_that_always_kills_its_worker_is_quarantined_and_the_rest_finished(
    kind: str,
) -> None:
    _, finished, (quarantined,) = run(kind, Square({2: "kills"}), numbers(6))
    assert sorted(e.unit.value for e in finished) == [0, 1, 3, 4, 5]
    assert (quarantined.unit, quarantined.attempts) == (Number(2), 3)
    expected = {
        "local": "worker was killed (signal 9), most often for lack of memory: fewer",
        "ray": "worker died: Worker unexpectedly exits with a connection error",
    }
    assert quarantined.reason.startswith(expected[kind])


def test_units_that_fail_are_quarantined_each_for_its_reason_and_their_worker_lives_on(
    kind: str,
) -> None:
    work = Square({0: "unpicklable", 1: "raises", 2: "despairs"})
    options = {"workers": 1, "units_per_worker": 3}
    steps, finished, quarantined = run(kind, work, numbers(6), **options)
    assert sorted(e.unit.value for e in finished) == [3, 4, 5]
    assert len({e.result[1] for e in finished}) == 1
    failed = sorted(quarantined, key=lambda event: event.unit.value)
    assert [(e.unit.value, e.attempts) for e in failed] == [(0, 3), (1, 3), (2, 1)]
    assert "lock" in failed[0].reason
    assert failed[1].reason == "ValueError: no square for this"
    assert "runner_work.py" in failed[1].trace
    assert failed[2].reason == "shard 256/000003.tar is truncated"
    assert [s.value for s in steps if s.unit.value == 1] == [0, 1, 2] * 3


def test_our_own_error_stops_the_run_and_comes_out_as_it_is(kind: str) -> None:
    with pytest.raises(FullError, match=r"^the disk is full: make room and run again$") as caught:
        run(kind, Square({3: "fills"}), numbers(1_000))
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


@pytest.mark.parametrize("how", ["full", "dies"])
def test_a_place_that_cannot_open_is_given_up_and_the_others_do_its_work(
    kind: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    work = Unopenable(how, frozenset({1}))
    _, finished, quarantined = run(kind, work, numbers(150), gpus=("0", "1"), max_attempts=2)
    assert (len(finished), quarantined) == (150, [])
    told = [line for line in caplog.messages if line.startswith("a worker could not begin")]
    assert len(told) >= 2
    if kind == "local":
        there = f"a worker could not begin on {socket.gethostname()}, GPU 1: "
        assert all(line.startswith(there) for line in told)
    assert any(line.startswith("a place is given up for now: no") for line in caplog.messages)


def test_what_no_place_can_change_ends_the_run_at_once(kind: str) -> None:
    work = Unopenable("request", frozenset({1}))
    with pytest.raises(UsageError, match="--text-length: 9 is too long"):
        run(kind, work, numbers(100_000), gpus=("0", "1"))


def test_units_are_read_as_workers_need_them(kind: str) -> None:
    drawn = []

    def units() -> Iterator[Number]:
        for number in numbers(1_000_000):
            drawn.append(number)
            yield number

    runner = make_runner(kind, RunnerSettings(workers=2))
    finished = 0
    with closing(runner.run(Square().open, units())) as events:
        for event in events:
            finished += isinstance(event, Finished)
            assert len(drawn) <= finished + 5
            if finished == 10:
                break


def test_closing_early_ends_all_workers_and_leaves_no_temporary_file(
    kind: str, tmp_path: Path
) -> None:
    runner = make_runner(kind, RunnerSettings(workers=2, units_per_worker=3))
    with closing(runner.run(Endless(str(tmp_path)).open, numbers(9))) as events:
        running: set[str] = set()
        while len(running) < 6:
            running.add(next(events).unit.name)
        assert len(list(tmp_path.glob("*.tmp.*"))) == 6
        started = time.monotonic()
    assert time.monotonic() - started < 4.0
    wait_until(lambda: not any(map(is_running, pids(tmp_path))), within_s=3.0)
    assert list(tmp_path.glob("*.tmp.*")) == []
    assert closed(tmp_path) == dict.fromkeys(pids(tmp_path), "0")


@pytest.mark.parametrize("kind", ["local", "ray"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_workers_never_outlive_their_driver(kind: str, how: signal.Signals, tmp_path: Path) -> None:
    words = [sys.executable, "-c", DRIVER, kind, str(tmp_path), "3"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    driver = subprocess.Popen(words, start_new_session=True, **pipes)  # type: ignore[call-overload]
    wait_until(lambda: len(list(tmp_path.glob("running-*"))) == 2 * 3, within_s=60.0)
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


@pytest.mark.system
def test_a_unit_that_finds_its_worker_broken_gets_another(kind: str, tmp_path: Path) -> None:
    work = BreakOnce(str(tmp_path))
    steps, finished, quarantined = run(kind, work, numbers(3), workers=1, units_per_worker=3)
    assert sorted(e.unit.value for e in finished) == [0, 1, 2]
    assert quarantined == []
    broken = int(Path(tmp_path, "broken").read_text())
    assert [e.unit.value for e in finished if e.result == broken] == []
    assert len({step.value for step in steps}) == 2
    assert not is_running(broken)
    assert list(tmp_path.glob("*.tmp")) == []


@pytest.mark.parametrize("lives_on", [False, True])
def test_a_place_where_all_units_fail_is_given_up_and_they_are_done_elsewhere(
    kind: str, lives_on: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    work = Cursed(str(tmp_path), frozenset({1}), deaths=3, lives_on=lives_on)
    options = {"max_attempts": 2, "gpus": ("0", "1")}
    _, finished, quarantined = run(kind, work, numbers(9), **options)
    assert [e.result for e in finished] == [0] * 9
    assert quarantined == []
    assert len(list(tmp_path.iterdir())) in (range(3, 9) if lives_on else [3])
    told = r"a place is given up for now: \d units in a row failed there, while others were done"
    assert sum(bool(re.match(told, line)) for line in caplog.messages) == 1
    assert ("NobodyKnewError: gone" in caplog.text) == lives_on


@pytest.mark.system
def test_a_worker_that_hangs_while_it_opens_is_ended_and_replaced(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    work = HangsAtFirst(str(tmp_path))
    _, finished, _ = run(kind, work, numbers(3), workers=1, opening_patience_s=6.0)
    assert len(finished) == 3
    assert "could not begin" in caplog.text
    assert "worker opened no further for 6 s, and was ended" in caplog.text
