"""Which workers a runner gives up, what tells that one gets further, and why one was killed."""

import threading
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError

import wdsprep
from wdsprep.runners import base, stuck_workers
from wdsprep.runners.base import Failure, RunnerSettings
from wdsprep.runners.ray.runner import death_reason
from wdsprep.runners.stuck_workers import (
    LOOK_S,
    OUT_OF_MEMORY,
    PERHAPS,
    STEP_NBYTES,
    Watch,
    awaiting,
    count_kills,
    find_counters,
    report_opening,
)

PATIENCE_S, OPENING_S = 60.0, 300.0
PAGE = Path(wdsprep.__file__).parent / "encoding/README.md"


def test_the_page_says_how_long_a_worker_may_make_no_progress() -> None:
    minutes = base.PATIENCE_S / 60
    told = f"A worker that makes no progress for {minutes:.0f} minutes is ended"
    assert told in " ".join(PAGE.read_text().split())


class Time:
    """Goes on as the driver looks, every few seconds."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        patch.setattr("wdsprep.runners.stuck_workers.time.monotonic", lambda: self.now)
        self.watch = Watch(RunnerSettings(patience_s=PATIENCE_S, opening_patience_s=OPENING_S))

    def passes(self, seconds: float) -> list[int]:
        found = []
        for _ in range(round(seconds / LOOK_S)):
            self.now += LOOK_S
            found = [slot for slot, _ in self.watch.overdue()]
        return found


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def test_a_worker_that_comes_no_further_is_overdue_whatever_it_says(time: Time) -> None:
    time.watch.given(0, 1)
    time.watch.given(1, 2)
    for number in range(6):
        time.watch.take(0, 1, ("progress", "8 images"))
        time.watch.take(1, 2, ("progress", f"{number} images"))
        assert time.passes(PATIENCE_S / 6) == [0] * (number == 5)
    time.watch.take(0, 0, ("lost", Failure(reason="ended")))
    assert time.watch.overdue() == []


def test_more_units_do_not_make_a_worker_look_alive(time: Time) -> None:
    time.watch.given(0, 1)
    assert time.passes(PATIENCE_S - LOOK_S) == []
    time.watch.given(0, 2)
    assert time.passes(LOOK_S) == [0]


@pytest.mark.parametrize("end", ["done", "failed"])
def test_a_worker_that_holds_nothing_may_be_silent(time: Time, end: Any) -> None:
    time.watch.take(0, 0, ("ready", 0))
    time.watch.given(0, 1)
    time.watch.given(0, 2)
    time.watch.take(0, 1, (end, None))
    time.watch.take(0, 2, (end, None))
    assert time.passes(10 * PATIENCE_S) == []
    time.watch.given(0, 3)
    assert time.passes(PATIENCE_S - LOOK_S) == []
    assert time.passes(LOOK_S) == [0]


def test_a_driver_that_was_stopped_itself_gives_nobody_up(time: Time) -> None:
    time.watch.given(0, 1)
    time.now += 100 * PATIENCE_S
    assert time.watch.overdue() == []
    assert time.passes(PATIENCE_S - LOOK_S) == [0]


def test_a_worker_that_opens_no_further_is_overdue_and_one_that_downloads_is_not(
    time: Time,
) -> None:
    for slot in (0, 1):
        time.watch.take(slot, 0, ("opening", None))
    for megabytes in range(10):
        time.watch.take(1, 0, ("opening", megabytes))
        assert time.passes(OPENING_S / 5) == [0] * (megabytes >= 4)
    ((slot, lost),) = time.watch.overdue()
    assert (slot, lost.reason) == (0, "worker opened no further for 300 s, and was ended")
    time.watch.take(0, 0, ("lost", lost))
    time.watch.take(1, 0, ("ready", 0))
    assert time.passes(10 * OPENING_S) == []


@pytest.fixture
def is_over(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    monkeypatch.setattr(stuck_workers, "REPORT_S", 0.01)
    return threading.Event()


def test_bytes_that_a_process_reads_or_another_downloads_are_progress(
    tmp_path: Path, is_over: threading.Event
) -> None:
    (tmp_path / "there").write_bytes(bytes(STEP_NBYTES))
    reports = report_opening(is_over)
    values = [next(reports)[1]]
    (tmp_path / "there").read_bytes()
    values.append(next(reports)[1])
    with awaiting(tmp_path):
        values.append(next(reports)[1])
    assert len({*values}) == 3
    is_over.set()
    assert list(reports) == []


def test_a_process_that_only_waits_reports_nothing(is_over: threading.Event) -> None:
    reports = report_opening(is_over)
    next(reports)
    threading.Timer(0.3, is_over.set).start()
    assert list(reports) == []


def test_a_kill_that_the_kernel_has_counted_since_was_for_lack_of_memory(tmp_path: Path) -> None:
    counted = tmp_path / "memory.events"
    counted.write_text("oom 1\noom_kill 3\noom_group_kill 0\n")
    reason = count_kills([tmp_path / "no", counted])
    assert reason() == PERHAPS
    counted.write_text("oom 2\noom_kill 4\noom_group_kill 0\n")
    assert [reason(), reason()] == [OUT_OF_MEMORY, PERHAPS]


def test_the_counter_of_this_machine_is_found() -> None:
    assert any("oom_kill " in path.read_text() for path in find_counters() if path.is_file())


def test_what_ray_says_of_memory_is_said_in_one_sentence() -> None:
    low = "1 worker(s) were killed due to the node running low on memory. Refer to the docs"
    assert death_reason(OutOfMemoryError(low)) == OUT_OF_MEMORY
    dead = RayActorError(error_msg="Worker exit detail: it ended. Some common causes: OOM killer")
    assert death_reason(dead).startswith(
        "worker died: it ended: it may have lacked memory: fewer --work"
    )
