"""The runner of local processes: signals, exits, GPUs, and what it does without."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.kit.command_lines import python
from tests.kit.packs import is_running
from tests.kit.runner_work import (
    Calls,
    Deafened,
    Endless,
    Square,
    Threadless,
    threads_of_a_product,
    visible_gpus,
)
from tests.kit.runs import closed, numbers, pids, run
from wdsprep.errors import WorkError
from wdsprep.runners.base import RunnerSettings
from wdsprep.runners.make_runner import make_runner


@pytest.mark.parametrize("count", [1, 3])
def test_a_worker_that_gets_sigterm_leaves_no_temporary_file(count: int, tmp_path: Path) -> None:
    runner = make_runner("local", RunnerSettings(workers=1, max_attempts=9, units_per_worker=count))
    with closing(runner.run(Endless(str(tmp_path)).open, numbers(count))) as events:
        while len(list(tmp_path.glob("*.tmp.*"))) < count:
            next(events)
        (first,) = pids(tmp_path)
        os.kill(first, signal.SIGTERM)
        while len(pids(tmp_path)) == 1:
            next(events)
        assert not is_running(first)
        assert list(tmp_path.glob(f"*.tmp.{first}")) == []
        assert closed(tmp_path) == {first: "0"}


def test_a_worker_ends_though_python_drops_what_its_signal_raises(
    capfd: pytest.CaptureFixture[str],
) -> None:
    _, finished, (quarantined,) = run("local", Deafened(), numbers(1), max_attempts=1)
    assert finished == []
    assert quarantined.reason == "worker exited with code 143"
    assert "Exception ignored" not in capfd.readouterr().err


def test_workers_see_the_gpus_in_turn() -> None:
    work = Calls(visible_gpus, 0.2)
    for workers, gpus in ((0, {"3", "5"}), (3, {"7"})):
        _, finished, _ = run("local", work, numbers(8), workers=workers, gpus=tuple(gpus))
        assert {e.result for e in finished} == gpus


def test_a_step_that_takes_long_is_interrupted(tmp_path: Path) -> None:
    events = make_runner("local", RunnerSettings(workers=1)).run(
        Endless(str(tmp_path), step_s=60.0).open, numbers(1)
    )
    next(events)
    time.sleep(0.2)
    started = time.monotonic()
    events.close()
    assert time.monotonic() - started < 2.0
    assert list(tmp_path.glob("*.tmp.*")) == []
    assert closed(tmp_path) == dict.fromkeys(pids(tmp_path), "0")


@pytest.mark.parametrize("count", [1, 3])
def test_a_unit_that_ends_its_thread_by_whatever_means_is_heard_of(count: int) -> None:
    work = Square({0: "interrupts"})
    _, finished, (quarantined,) = run("local", work, numbers(4), units_per_worker=count)
    assert len(finished) == 3
    assert quarantined.reason == "KeyboardInterrupt"


def test_a_worker_that_gets_no_thread_says_that_it_lacks_memory() -> None:
    _, _, quarantined = run("local", Threadless(), numbers(2), workers=1, units_per_worker=2)
    reason = "out of memory: fewer --workers take less of it"
    assert [failed.reason for failed in quarantined] == [reason] * 2


def no_process(slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on there are none for workers that see this GPU."""
    started = subprocess.Popen.__init__

    def start(process: Any, *words: Any, env: dict[str, str], **options: Any) -> None:
        if env["CUDA_VISIBLE_DEVICES"] == str(slot):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        started(process, *words, env=env, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", start)


def test_a_place_without_a_process_is_given_up_and_the_others_do_its_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_process(1, monkeypatch)
    assert len(run("local", Square(), numbers(20), gpus=("0", "1"))[1]) == 20
    no_process(0, monkeypatch)
    with pytest.raises(WorkError, match=r"a worker process could not be started: .*annot allocate"):
        run("local", Square(), numbers(20), gpus=("0", "1"))


def test_numpy_takes_no_threads_in_a_worker_or_a_command() -> None:
    """Where it cannot have them it sends a SIGINT, and a product waits for ever."""
    assert {e.result for e in run("local", Calls(threads_of_a_product), numbers(1))[1]} == {0}
    code = (
        "import os, sys; from wdsprep.__main__ import main; sys.argv[1:] = ['--version']; main();"
        "import numpy; assert len(os.listdir('/proc/self/task')) == 1"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    python(code, env=environment)
