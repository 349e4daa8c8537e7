"""Which workers a runner gives up: by itself, with a clock that the test turns."""

from pathlib import Path

import pytest

import wdsprep
from wdsprep.runners import stuck_workers
from wdsprep.runners.schedule import Done, Lost, Opening, Ready, Returned, UnitProgress
from wdsprep.runners.stuck_workers import LOOK_S, Watch

PATIENCE_S, OPENING_S = 60.0, 300.0
PAGE = Path(wdsprep.__file__).parent / "encoding/README.md"


def test_the_page_says_how_long_a_worker_may_make_no_progress() -> None:
    minutes = stuck_workers.PATIENCE_S / 60
    told = f"A worker that makes no progress for {minutes:.0f} minutes is ended"
    assert told in " ".join(PAGE.read_text().split())


class Time:
    """Goes on as the driver looks, every few seconds."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        patch.setattr("wdsprep.runners.stuck_workers.time.monotonic", lambda: self.now)
        self.watch = Watch(PATIENCE_S, OPENING_S)

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
        time.watch.heard(0, 1, UnitProgress(value="8 images"))
        time.watch.heard(1, 2, UnitProgress(value=f"{number} images"))
        assert time.passes(PATIENCE_S / 6) == [0] * (number == 5)
    time.watch.heard(0, 0, Lost(reason="ended"))
    assert time.watch.overdue() == []


def test_more_units_do_not_make_a_worker_look_alive(time: Time) -> None:
    time.watch.given(0, 1)
    assert time.passes(PATIENCE_S - LOOK_S) == []
    time.watch.given(0, 2)
    assert time.passes(LOOK_S) == [0]


@pytest.mark.parametrize("end", [Done(result=None), Returned()])
def test_a_worker_that_holds_nothing_may_be_silent(time: Time, end: Done | Returned) -> None:
    time.watch.heard(0, 0, Ready())
    time.watch.given(0, 1)
    time.watch.given(0, 2)
    time.watch.heard(0, 1, end)
    time.watch.heard(0, 2, end)
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
        time.watch.heard(slot, 0, Opening())
    for megabytes in range(10):
        time.watch.heard(1, 0, Opening(value=megabytes))
        assert time.passes(OPENING_S / 5) == [0] * (megabytes >= 4)
    ((slot, lost),) = time.watch.overdue()
    assert (slot, lost.reason) == (0, "worker opened no further for 300 s, and was ended")
    time.watch.heard(0, 0, lost)
    time.watch.heard(1, 0, Ready())
    assert time.passes(10 * OPENING_S) == []
