"""The terminal: lines, log records, warnings of Python, and the progress of a long command or call.

The line of progress is on stderr, and never there for what takes less than a second. On a terminal
it is rewritten in place, on one row whatever the width: it is given as parts, the most telling
first, and those that fit are drawn. The cursor rests at its start, so that a window made narrower,
where a terminal breaks the line into several rows, leaves nothing above the cursor, and all below
it goes with the next drawing. Elsewhere, as in a pipe, in CI and where a notebook runs a command, a
plain line comes every half minute: a notebook would keep what is drawn over. A call from a cell of
a notebook draws in an output of that cell, which it replaces.

Written by hand after a trial of tqdm 4 and rich 15 with the same parts at 60, 80 and 130 columns.
tqdm cuts a part in the middle, rich squeezes all of them to `1,23…`. After the width had changed
four times, tqdm had left 9 rows and rich 6, this 1. In 3 s a notebook has kept 15 and 32 drawings,
and this line none. Either takes 50 ms to import, where `wdsprep --help` takes 150. To be looked at
again when one of them drops whole parts by importance and clears what a narrower window has broken.
"""

import logging
import os
import re
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from wdsprep.errors import values_without_secrets, without_secrets
from wdsprep.text import Counting, escape_controls, human_time, one_line, plural

TERMINAL_S, PIPE_S, FIRST_S, TICK_S = 0.2, 30.0, 1.0, 1.0
FEWEST_COLUMNS = 20
CLEAR = "\r\x1b[J"
COMMAND = re.compile(r"next: |\"wdsprep |^ {2,}")
"""Matches lines that are not broken: commands, and rows of tables."""

Parts = str | Sequence[str]


LeftOff = tuple[str, bool]
"""The words on a job that ends early: what is kept and lost; and whether any is kept."""
NOTHING_LOST: LeftOff = "", True


class Terminal:
    """The terminal that all output of this process goes through.

    It removes the secrets in URLs. It knows whether a progress line is drawn, and removes it
    before other output. It knows how much the user wants to read.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._drawn: TextIO | None = None
        self._ticker: threading.Event | None = None
        self.is_quiet = self.is_verbose = self.is_debugging = False
        self.left_off: Callable[[], LeftOff] = lambda: NOTHING_LOST
        """Returns what would be left of the job that is shown if it ended now."""

    @contextmanager
    def during_command(self) -> Iterator[None]:
        """Show warnings of logs and of Python while a command runs.

        At its end the progress line is removed. A command begins and ends neither quiet nor
        verbose.
        """
        self.is_quiet = self.is_verbose = self.is_debugging = False
        logging.lastResort = lines = LogLines(logging.WARNING)
        logging.captureWarnings(True)
        of_python = logging.getLogger("py.warnings")
        of_python.addHandler(lines)  # logging adds one that drops warnings if there is none
        try:
            yield
        finally:
            self.left_off = lambda: NOTHING_LOST
            self.is_quiet = self.is_verbose = self.is_debugging = False
            of_python.removeHandler(lines)
            logging.getLogger("wdsprep").setLevel(logging.NOTSET)
            logging.captureWarnings(False)
            self.stop_ticking()
            self.clear()

    def be_verbose(self) -> None:
        """Show the log records about each unit of work, and where an error was raised."""
        self.is_verbose = self.is_debugging = True
        logging.lastResort = LogLines(logging.INFO)
        logging.getLogger("wdsprep").setLevel(logging.INFO)

    def write(self, text: str, *, err: bool = False, out: TextIO | None = None) -> None:
        """Print a text without secrets, its long lines broken, in place of the progress line."""
        text = without_secrets(text)
        stream = out or (sys.stderr if err else sys.stdout)
        if stream.isatty():
            width = columns(stream)
            text = "\n".join(wrap_line(line, width) for line in text.split("\n"))
        with self._lock:
            self.clear()
            print(text, file=stream, flush=True)

    def draw(self, out: TextIO, parts: Parts) -> None:
        """Draw the progress line over the one before."""
        with self._lock:
            out.write(f"{CLEAR}{fit_parts(values_without_secrets(parts), columns(out) - 1)}\r")
            out.flush()
            self._drawn = out

    def clear(self) -> None:
        """Remove the progress line from the screen."""
        with self._lock:
            out, self._drawn = self._drawn, None
            if out is not None:
                out.write(CLEAR)
                out.flush()

    def start_ticking(self, draw: Callable[[], None]) -> None:
        """Call a function each second in a thread.

        The calls end with `stop_ticking`, or when another function is started.
        """
        self.stop_ticking()
        self._ticker = over = threading.Event()

        def tick() -> None:
            while not over.wait(TICK_S):
                with self._lock:
                    if not over.is_set():
                        draw()

        threading.Thread(target=tick, daemon=True).start()

    def stop_ticking(self) -> None:
        """Stop the calls that `start_ticking` has begun."""
        with self._lock:
            if self._ticker is not None:
                self._ticker.set()
                self._ticker = None


class LogLines(logging.Handler):
    """A handler that prints log records as lines, used if nobody has configured logging."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(without_secrets(super().format(record)))

    def emit(self, record: logging.LogRecord) -> None:
        TERMINAL.write(self.format(record).rstrip("\n"), err=True)  # warnings end with one


TERMINAL = Terminal()


def columns(out: TextIO) -> int:
    """Return the number of columns of the terminal now: at least 20, and 80 if it is not known."""
    try:
        found = os.get_terminal_size(out.fileno()).columns
    except (OSError, ValueError):
        found = 0
    return max(found or 80, FEWEST_COLUMNS)


def cells(text: str) -> int:
    """Count the columns that a text takes. Chinese, Japanese and Korean characters take two."""
    return sum(_cells_of(character) for character in text)


def _cells_of(character: str) -> int:
    if character.isascii():
        return 1
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def wrap_line(line: str, width: int) -> str:
    """Break a line that is too long between words.

    A line with a command stays whole, so that it can be copied; the row of a table stays whole too.
    """
    if cells(line) <= width or COMMAND.search(line):
        return line
    rows = [""]
    for word in line.split(" "):
        if rows[-1] and cells(f"{rows[-1]} {word}") > width:
            rows.append(word)
        else:
            rows[-1] = f"{rows[-1]} {word}" if rows[-1] else word
    return "\n".join(rows)


def fit_parts(parts: Parts, width: int) -> str:
    """Join the parts that fit into the width, by commas.

    The first is cut if it is too long; another that does not fit is left out.
    """
    first, *others = [parts] if isinstance(parts, str) else parts
    line = one_line(first)
    if cells(line) > width:
        while cells(line) >= width:
            line = line[:-1]
        line += "…"
    for part in map(one_line, others):
        if cells(f"{line}, {part}") <= width:
            line = f"{line}, {part}"
    return line


class NotebookCell:
    """An output of the cell that runs in a notebook, whose text is replaced with each drawing."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display
        self._shown: Any = None

    @classmethod
    def current(cls) -> "NotebookCell | None":
        """Return an output of the running notebook cell; None outside of a notebook."""
        ipython, display = sys.modules.get("IPython"), sys.modules.get("IPython.display")
        shell = ipython.get_ipython() if ipython else None
        if display is None or not hasattr(shell, "kernel"):
            return None
        return cls(display.display)

    def draw(self, text: str) -> None:
        data = {"text/plain": text}
        if self._shown is None:
            self._shown = self._display(data, raw=True, display_id=True)
        else:
            self._shown.update(data, raw=True)

    def clear(self) -> None:
        if self._shown is not None:
            self._shown.update({"text/plain": ""}, raw=True)
            self._shown = None


class ProgressLine:
    """The line that shows how far a command or call has come."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        env = os.environ  # in a notebook, a command draws no line in place
        is_dumb = env.get("TERM") == "dumb" or "JPY_PARENT_PID" in env
        self._terminal = self._out.isatty() and not is_dumb
        self._cell = None if out else NotebookCell.current()
        self._started = time.monotonic()
        self._next = self._started + (FIRST_S if self.is_seen else PIPE_S)

    @property
    def is_seen(self) -> bool:
        """Return whether a person looks on, at a terminal or a notebook."""
        return self._terminal or self._cell is not None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._next and not TERMINAL.is_quiet

    def show(self, parts: Parts) -> None:
        """Draw the parts if enough time has passed since the last drawing.

        This ends any `wait_for`.
        """
        self.offer(lambda: parts)

    def offer(self, parts: Callable[[], Parts]) -> None:
        """Compute and draw the parts if enough time has passed since the last drawing.

        This ends any `wait_for`.
        """
        TERMINAL.stop_ticking()
        self._draw(parts)

    def _draw(self, parts: Callable[[], Parts]) -> None:
        if not self.is_due:
            return
        self._next = time.monotonic() + (TERMINAL_S if self.is_seen else PIPE_S)
        found = parts()
        text = found if isinstance(found, str) else ", ".join(found)
        if self._cell is not None:
            self._cell.draw(without_secrets(one_line(text)))
        elif self._terminal:
            TERMINAL.draw(self._out, found)
        else:
            TERMINAL.write(one_line(text), out=self._out)

    def wait_for(self, what: str) -> None:
        """Show the text `what`, with the time since this call, until something else is shown.

        The text says what the command does: "waiting for the first worker".
        """
        began = time.monotonic()
        TERMINAL.start_ticking(
            lambda: self._draw(lambda: f"{what}, {human_time(time.monotonic() - began)}")
        )

    def counting(self, noun: str) -> Counting:
        """Return a function that shows how many things, such as files, are done."""
        return lambda done, of: self.show(f"{done:,} of {plural(of, noun)} done")

    def say(self, text: str) -> None:
        """Print a line that stays, unless the user wants a quiet command."""
        if not TERMINAL.is_quiet:
            TERMINAL.write(one_line(text), out=self._out)

    def clear(self) -> None:
        """Remove the line from the screen, so that what is printed next stands alone."""
        TERMINAL.stop_ticking()
        TERMINAL.clear()
        if self._cell is not None:
            self._cell.clear()
