"""Long commands show how far they are: on a terminal in one row that goes, else now and then."""

import contextlib
import io
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit.damaged import pack_here
from tests.kit.encodes import in_this_process
from tests.kit.packs import BUCKETS, packing_here, photos
from tests.kit.terminals import Screen, draw_at_once
from wdsprep.cli import main
from wdsprep.cli.output.changes import DuplicatesOutput, SelectOutput
from wdsprep.cli.output.checks import VerifyOutput
from wdsprep.cli.output.exporting import ExportOutput
from wdsprep.cli.output.shared import CommandOutput, KeptLine, complain, echo, rejected_lines
from wdsprep.runners.job import JobStatus
from wdsprep.terminal import CLEAR, TERMINAL, LogLines, ProgressLine
from wdsprep.text import Counting

TINY = ("--model", "tiny", "--resolution", "64")
PARTS = [
    "12,345 images",
    "1,234 images/s",
    "1 h 02 min left",
    "slice 12 of 345",
    "56.7 MB/s",
    "98% fetched",
    "rejects: too_small 1,234, truncated 12, not_an_image 3",
]


class Clock:
    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    return clock


@pytest.fixture(autouse=True)
def of_this_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A terminal like any other, whatever started the tests; nothing goes on after the test."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    with TERMINAL.during_command():
        yield


def shown(line: ProgressLine, clock: Clock, seconds: int) -> None:
    """Ten texts a second, each with its time."""
    for tenth in range(1, seconds * 10 + 1):
        clock.now = 100 + tenth / 10
        line.show(f"at {tenth / 10}")


def test_on_a_terminal_one_line_is_drawn_over_after_the_first_second(clock: Clock) -> None:
    out = Screen()
    line = ProgressLine(out)
    shown(line, clock, 2)
    drawn = out.getvalue().split(CLEAR)
    assert drawn[:2] == ["", "at 1.0\r"]
    assert 5 <= len(drawn) <= 7
    line.clear()
    assert out.getvalue().endswith(CLEAR)
    assert "\n" not in out.getvalue()


def test_in_a_pipe_there_is_a_line_every_half_minute(clock: Clock) -> None:
    out = io.StringIO()
    line = ProgressLine(out)
    shown(line, clock, 29)
    assert out.getvalue() == ""
    shown(line, clock, 95)
    line.clear()
    assert out.getvalue() == "at 30.0\nat 60.0\nat 90.0\n"


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    """A terminal on which all progress is drawn."""
    draw_at_once(monkeypatch)
    yield Screen()
    TERMINAL.stop_ticking()
    TERMINAL.clear()


@pytest.mark.parametrize("width", [60, 80, 130])
def test_progress_takes_one_row_whatever_the_width(
    screen: Screen, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cursor goes back to its start, so a window made narrower leaves nothing above it."""
    monkeypatch.setattr("wdsprep.terminal.columns", lambda _out: width)
    line = ProgressLine(screen)
    for left in (2, 1):
        line.show([*PARTS[:2], f"{left} min left", *PARTS[3:]])
        row = screen.getvalue().rpartition(CLEAR)[2]
        assert row.startswith(f"12,345 images, 1,234 images/s, {left} min left")
        assert row.index("\r") == len(row) - 1 < width
    assert ("98% fetched" in row) is (width == 130)
    line.clear()
    assert screen.getvalue().endswith(f"\r{CLEAR}")


@pytest.mark.usefixtures("screen")
@pytest.mark.parametrize(
    ("kind", "first", "unit", "more"),
    [
        (ExportOutput, "2.0 MB of 8.0 MB", "shard 3 of 9", []),
        (VerifyOutput, "2.0 MB of 8.0 MB", "unit 3 of 9", ["7 findings"]),
        (DuplicatesOutput, "2.0 MB of 8.0 MB", "shard 3 of 9", ["40 images looked at"]),
        (SelectOutput, "40 samples", "shard 3 of 9", []),
    ],
)
def test_every_job_tells_the_same_in_the_same_order(
    kind: type[CommandOutput[Any]], first: str, unit: str, more: list[str]
) -> None:
    """What is done, the rate, what is left, the unit, and last what one command alone tells."""
    nbytes_of = 0 if kind is SelectOutput else 8 * 10**6
    status = JobStatus(
        samples=40, nbytes=2 * 10**6, nbytes_of=nbytes_of, findings=7, units_done=3, units=9
    )
    show = kind({}, as_json=False)
    show.on_status(lambda: status)
    done, rate, *others = show.parts(status)
    assert (done, others) == (first, [unit, *more])
    assert rate.endswith("/s")
    left = show.parts(replace(status, share_done=0.25))[2]
    assert left.endswith(" left")


def test_whatever_else_is_said_takes_the_line_away_first(screen: Screen) -> None:
    line = ProgressLine(screen)
    said = ["a note", "a log record", "a result", "wdsprep: an error"]
    record = logging.LogRecord("x", logging.WARNING, "", 0, said[1], (), None)
    for number, say in enumerate(
        (
            lambda: line.say(said[0]),
            lambda: LogLines(logging.INFO).handle(record),
            lambda: echo(said[2], err=True),
            lambda: complain("an error", traced=False),
        )
    ):
        line.show(PARTS)
        with contextlib.redirect_stderr(screen):
            say()
        assert screen.getvalue().rpartition(CLEAR)[2].lstrip("\r") == f"{said[number]}\n"


def test_an_interrupt_takes_the_line_away_with_what_the_terminal_echoes(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_folder: str, counting: Counting, _told: object) -> None:
        counting(1, 2)
        screen.write("^C")
        raise KeyboardInterrupt

    monkeypatch.setattr("wdsprep.dataset.reindex.index", interrupted)
    with contextlib.redirect_stderr(screen):
        assert main(["index", "somewhere"]) == 130
    last = "\rwdsprep: interrupted: run the same command to go on from here\n"
    assert screen.getvalue().endswith(f"^C{CLEAR}{last}")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("progress")
    photos(root / "photos", 8)
    return pack_here(root / "photos", root / "images")


COMMANDS = {
    "pack": (["pack", "{}/../photos", "{}/../again", *BUCKETS, "--workers", "1"], "images/s"),
    "encode": (["encode", "{}", "{}/../latents", *TINY, "--runner", "local"], "images/s"),
    "verify": (["verify", "{}"], "findings"),
    "repair": (["repair", "{}"], "findings"),
    "report": (["report", "{}", "-o", "{}/../page.html"], "samples read"),
    "index": (["index", "{}"], "0 of 4 tars done"),
    "rebuild": (["rebuild", "{}"], "receipts done"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_long_command_says_how_far_it_is(
    images: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_at_once(monkeypatch)
    words, wanted = COMMANDS[command]
    if command == "index":
        for path in images.rglob("*.idx"):
            path.unlink()
    with contextlib.redirect_stderr(Screen()) as screen, packing_here(), in_this_process():
        assert main([word.format(images) for word in words]) == 0
    assert wanted in screen.getvalue()
    assert screen.getvalue().endswith(CLEAR), "the line is gone when the result is printed"


@pytest.mark.parametrize(
    ("rejects", "samples", "said"),
    [
        (
            {"too_small": 14, "corrupt": 1},
            20,
            "warning: 15 of 35 were rejected, 14 of them as too_small: --upscale takes them",
        ),
        (
            {"corrupt": 1},
            8,
            "warning: 1 of 9 was rejected, all of them as corrupt: out/rejects/ says why for each",
        ),
        ({"too_small": 2}, 18, ""),
        ({"filtered": 50, "removed": 50, "http_4xx": 50, "too_small": 1}, 10, ""),
        (
            {"filtered": 3, "too_small": 1},
            0,
            "nothing was kept: 4 of 4 were rejected, 3 of them as filtered: out/rejects/ says why "
            "for each",
        ),
    ],
)
def test_over_a_tenth_of_rejects_is_a_warning_that_names_the_option_that_takes_them(
    rejects: dict[str, int], samples: int, said: str
) -> None:
    manifest = SimpleNamespace(rejects=rejects, samples=samples)
    outcome: Any = SimpleNamespace(manifest=manifest, quarantined=())
    lines = rejected_lines(outcome, "out", {"too_small": "--upscale takes them"})
    assert lines == ([said] if said else [])
    assert all(isinstance(line, KeptLine) for line in lines)
