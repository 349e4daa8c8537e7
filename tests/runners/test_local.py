"""The runner of local processes: signals, exits, GPUs, and what it does without."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.kit.runner_work import AtExit, Cursed, Endless, Square, Visible
from tests.kit.runs import closed, is_running, numbers, pids, run
from wdsprep.errors import UsageError
from wdsprep.runners import make_runner


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
    with pytest.raises(UsageError, match="0 units at a time for a worker: give 1"):
        make_runner("local", units_per_worker=0)


def test_a_worker_leaves_as_soon_as_its_work_is_closed(tmp_path: Path) -> None:
    """Without what an interpreter does at its end, which with torch takes a second."""
    run("local", AtExit(str(tmp_path)), numbers(2), workers=1)
    assert {path.name for path in tmp_path.iterdir()} == {"opened", "closed"}


def test_where_workers_die_everywhere_each_unit_is_left_out(tmp_path: Path) -> None:
    work = Cursed(str(tmp_path), frozenset({0, 1}), deaths=0)
    _, finished, quarantined = run("local", work, numbers(4), max_attempts=2, gpus=("0", "1"))
    assert finished == []
    assert sorted(event.unit.value for event in quarantined) == [0, 1, 2, 3]
