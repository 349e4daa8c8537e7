"""Progress that is drawn as soon as there is any."""

import io

import pytest

from wdsprep import terminal


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def draw_at_once(monkeypatch: pytest.MonkeyPatch, *, on_pipes: bool = False) -> None:
    """Have lines of progress drawn without a pause before or between them."""
    for name in ("FIRST_S", "TERMINAL_S", *(["PIPE_S"] if on_pipes else [])):
        monkeypatch.setattr(terminal, name, 0)
