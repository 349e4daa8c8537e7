"""What tells that a worker which opens gets further."""

import threading
from pathlib import Path

import pytest

from wdsprep.runners import opening
from wdsprep.runners.opening import STEP_NBYTES, awaiting, report_opening


@pytest.fixture
def is_over(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    monkeypatch.setattr(opening, "REPORT_S", 0.01)
    return threading.Event()


def test_bytes_that_a_process_reads_or_another_downloads_are_progress(
    tmp_path: Path, is_over: threading.Event
) -> None:
    (tmp_path / "there").write_bytes(bytes(STEP_NBYTES))
    reports = report_opening(is_over)
    values = [next(reports).value]
    (tmp_path / "there").read_bytes()
    values.append(next(reports).value)
    with awaiting(tmp_path):
        values.append(next(reports).value)
    assert len({*values}) == 3
    is_over.set()
    assert list(reports) == []


def test_a_process_that_only_waits_reports_nothing(is_over: threading.Event) -> None:
    reports = report_opening(is_over)
    next(reports)
    threading.Timer(0.3, is_over.set).start()
    assert list(reports) == []
