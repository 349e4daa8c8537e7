"""Command lines that run in this process, code that runs in another, and what they print."""

import json
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from wdsprep.cli import main


class Printed(NamedTuple):
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def facts(self) -> Any:
        """The JSON of --json."""
        return json.loads(self.out)


class CommandLine:
    """A function that runs a command line whose exit code is to be `code`."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *words: object, code: int = 0) -> Printed:
        self._capture.readouterr()
        found = main([str(word) for word in words])
        printed = Printed(*self._capture.readouterr())
        assert found == code, printed
        return printed


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capfd)


def ran(*words: object, exit_code: int = 0, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a program, whose exit code is to be `exit_code`; return what it printed."""
    how = {"capture_output": True, "text": True, "timeout": 300, **options}
    done = subprocess.run([*map(str, words)], check=False, **how)
    assert done.returncode == exit_code, f"{words}: {done.stderr[-8000:]}"
    return done


def python(code: str, *words: object, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run code in another Python."""
    return ran(sys.executable, "-c", code, *words, **options)
