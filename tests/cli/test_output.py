"""Long commands show how far they are: on a terminal in one line that goes, else now and then."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.damaged import pack_here
from tests.kit.packs import BUCKETS, photos
from wdsprep.cli.output import ProgressLine, rejects_lines

EAGER = """
import sys
from wdsprep.cli import output
from wdsprep.cli import main
output.FIRST_S = output.TERMINAL_S = output.PIPE_S = 0
sys.exit(main(sys.argv[1:]))
"""

TINY = ("--model", "tiny", "--resolution", "64")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def shown(line: ProgressLine, clock: Clock, seconds: int) -> None:
    """Ten texts a second, each with its time."""
    for tenth in range(1, seconds * 10 + 1):
        clock.now = 100 + tenth / 10
        line.show(f"at {tenth / 10}")


def test_on_a_terminal_one_line_is_drawn_over_after_the_first_second(clock: Clock) -> None:
    out = Terminal()
    line = ProgressLine(out)
    shown(line, clock, 2)
    drawn = out.getvalue().split("\r\x1b[K")
    assert drawn[:2] == ["", "at 1.0"]
    assert 5 <= len(drawn) <= 7
    line.clear()
    assert out.getvalue().endswith("\r\x1b[K")
    assert "\n" not in out.getvalue()


def test_in_a_pipe_there_is_a_line_every_half_minute(clock: Clock) -> None:
    out = io.StringIO()
    line = ProgressLine(out)
    shown(line, clock, 29)
    assert out.getvalue() == ""
    shown(line, clock, 95)
    assert out.getvalue() == "at 30.0\nat 60.0\nat 90.0\n"
    line.clear()
    assert out.getvalue().endswith("at 90.0\n")


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


SLOW = pytest.param("encode", marks=pytest.mark.system)


@pytest.mark.parametrize("command", [SLOW if name == "encode" else name for name in COMMANDS])
def test_every_long_command_says_how_far_it_is(images: Path, command: str) -> None:
    words, wanted = COMMANDS[command]
    if command == "index":
        for path in images.rglob("*.idx"):
            path.unlink()
    eager = [sys.executable, "-c", EAGER, *(word.format(images) for word in words)]
    ours, theirs = pty.openpty()
    done = subprocess.run(eager, stdout=subprocess.PIPE, stderr=theirs, timeout=240, check=False)
    os.close(theirs)
    said = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0, said
    assert wanted in said
    assert said.endswith("\r\x1b[K"), "the line is gone when the result is printed"


def test_samples_that_a_tar_has_in_pieces_are_told_with_what_brings_them_together() -> None:
    (count, advice) = rejects_lines({"tar_scattered": 1}, "out")
    assert count == "1 reject (tar_scattered 1): see out/rejects/"
    assert advice.startswith("of 1 sample the members stand apart in the tar, so captions may")
    assert "tar --sort=name" in advice
