"""Output on the terminal, which belongs to this module alone.

Results, errors, notes, log records, warnings of Python, and the line that shows how far a long
command is, all go through here.

That line is on stderr, and never there for what takes less than a second. On a terminal it is
rewritten in place, on one row whatever the width: it is given as parts, the most telling first, and
those that fit are drawn. The cursor rests at its start, so that a window made narrower, where a
terminal breaks the line into several rows, leaves nothing above the cursor, and all below it goes
with the next drawing. Elsewhere, as in a pipe, in CI and in a notebook, a plain line comes every
half minute: a notebook would keep what is drawn over.

Written by hand after a trial of tqdm 4 and rich 15 with the same parts at 60, 80 and 130 columns.
tqdm cuts a part in the middle, rich squeezes all of them to `1,23…`. After the width had changed
four times, tqdm had left 9 rows and rich 6, this 1. In 3 s a notebook has kept 15 and 32 drawings,
and this line none. Either takes 50 ms to import, where `wdsprep --help` takes 150. To be looked at
again when one of them drops whole parts by importance and clears what a narrower window has broken.

What several commands show alike while they run and when they end is here too.
"""

import json
import logging
import os
import re
import sys
import threading
import time
import traceback
import unicodedata
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TextIO, TypeVar

import click

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.shapes import shape_counts
from wdsprep.errors import values_without_secrets, without_secrets
from wdsprep.text import (
    Counting,
    LogFormatter,
    harmless,
    human_bytes,
    human_counts,
    human_time,
    one_line,
    plural,
    printed,
)

if TYPE_CHECKING:
    from wdsprep.dataset.manifest import Manifest
    from wdsprep.runners.job import JobStatus
    from wdsprep.runners.run import Outcome

TERMINAL_S, PIPE_S, FIRST_S, TICK_S = 0.2, 30.0, 1.0, 1.0
FEWEST_COLUMNS = 20
CLEAR = "\r\x1b[J"
COMMAND = re.compile(r"next: |\"wdsprep |^ {2,}")
"""What lines hold that are not broken: commands, and rows of tables."""

Parts = str | Sequence[str]


class Terminal:
    """The terminal that all output goes through.

    It removes the secrets in URLs. It knows whether a progress line is drawn, and removes it
    before other output. It knows how much the user wants to read.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._drawn: TextIO | None = None
        self._ticker: threading.Event | None = None
        self.is_quiet = self.is_verbose = self.is_debugging = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While a command runs: as much is said as usual, and of log records the warnings."""
        self.is_quiet = self.is_verbose = self.is_debugging = False
        logging.lastResort = lines = LogLines(logging.WARNING)
        logging.getLogger("wdsprep").setLevel(logging.NOTSET)
        logging.captureWarnings(True)
        of_python = logging.getLogger("py.warnings")
        of_python.addHandler(lines)  # which logging gives one that drops them, where it has none
        try:
            yield
        finally:
            of_python.removeHandler(lines)
            logging.captureWarnings(False)
            self.still()
            self.clear()

    def be_verbose(self) -> None:
        """Say what becomes of each unit, which is logged, and where an error was raised."""
        self.is_verbose = self.is_debugging = True
        logging.lastResort = LogLines(logging.INFO)
        logging.getLogger("wdsprep").setLevel(logging.INFO)

    def write(self, text: str, *, err: bool = False, out: TextIO | None = None) -> None:
        text = without_secrets(text)
        stream = out or (sys.stderr if err else sys.stdout)
        if stream.isatty():
            width = columns(stream)
            text = "\n".join(wrapped(line, width) for line in text.split("\n"))
        with self._lock:
            self.clear()
            click.echo(text, file=out, err=err)

    def draw(self, out: TextIO, parts: Parts) -> None:
        with self._lock:
            out.write(f"{CLEAR}{fitted(values_without_secrets(parts), columns(out) - 1)}\r")
            out.flush()
            self._drawn = out

    def clear(self) -> None:
        """Take the progress line away."""
        with self._lock:
            out, self._drawn = self._drawn, None
            if out is not None:
                out.write(CLEAR)
                out.flush()

    def tick(self, draw: Callable[[], None]) -> None:
        """Call this every second until `still`, or another, is called."""
        self.still()
        self._ticker = over = threading.Event()

        def tick() -> None:
            while not over.wait(TICK_S):
                with self._lock:
                    if not over.is_set():
                        draw()

        threading.Thread(target=tick, daemon=True).start()

    def still(self) -> None:
        with self._lock:
            if self._ticker is not None:
                self._ticker.set()
                self._ticker = None


class LogLines(logging.Handler):
    """Log records as lines of ours, where nobody has given them another place."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.setFormatter(LogFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        TERMINAL.write(self.format(record).rstrip("\n"), err=True)  # warnings end with one


TERMINAL = Terminal()


def echo(text: str, *, err: bool = False) -> None:
    """Print what the user asked for, even with --quiet."""
    TERMINAL.write(harmless(text), err=err)


def complain(text: str, *, traced: bool = True) -> None:
    """Print an error as one line, after its traceback where --verbose asks for it."""
    TERMINAL.still()
    if traced and TERMINAL.is_debugging:
        echo(traceback.format_exc(), err=True)
    over_ctrl_c = "\r" * sys.stderr.isatty()
    TERMINAL.write(f"{over_ctrl_c}wdsprep: {one_line(text)}", err=True)


# --- the progress line
def columns(out: TextIO) -> int:
    """Return the width of the terminal at this moment."""
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


def wrapped(line: str, width: int) -> str:
    """Break a line that is too long between words.

    A line with a command stays whole, so that it can be copied: the terminal breaks it.
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


def fitted(parts: Parts, width: int) -> str:
    """Join as many of the parts as fit into the width. Only the first may be cut."""
    first, *others = [parts] if isinstance(parts, str) else parts
    line = _cut(one_line(first), width)
    for part in map(one_line, others):
        if cells(f"{line}, {part}") <= width:
            line = f"{line}, {part}"
    return line


def _cut(text: str, width: int) -> str:
    if cells(text) <= width:
        return text
    while cells(text) >= width:
        text = text[:-1]
    return f"{text}…"


def _is_terminal(out: TextIO) -> bool:
    """Return whether the output is a terminal on which a line can be drawn over."""
    env = os.environ
    return out.isatty() and env.get("TERM") != "dumb" and "JPY_PARENT_PID" not in env


class ProgressLine:
    """Shows the latest of what it is given."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._terminal = _is_terminal(self._out)
        self._started = time.monotonic()
        self._next = self._started + (FIRST_S if self._terminal else PIPE_S)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._next and not TERMINAL.is_quiet

    def show(self, parts: Parts) -> None:
        """Draw it if it is time to."""
        self.offer(lambda: parts)

    def offer(self, parts: Callable[[], Parts]) -> None:
        """Draw what takes a while to tell, if it is time to."""
        TERMINAL.still()
        self._draw(parts)

    def _draw(self, parts: Callable[[], Parts]) -> None:
        if not self.due:
            return
        self._next = time.monotonic() + (TERMINAL_S if self._terminal else PIPE_S)
        found = parts()
        if self._terminal:
            TERMINAL.draw(self._out, found)
        else:
            text = found if isinstance(found, str) else ", ".join(found)
            TERMINAL.write(one_line(text), out=self._out)

    def wait_for(self, what: str) -> None:
        """Until something else is shown: what is waited for, and how long by now."""
        began = time.monotonic()
        TERMINAL.tick(lambda: self._draw(lambda: f"{what}, {human_time(time.monotonic() - began)}"))

    def counting(self, noun: str) -> Counting:
        """Return a function that shows how many things are done."""
        return lambda done, of: self.show(f"{done:,} of {plural(of, noun)} done")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if not TERMINAL.is_quiet:
            TERMINAL.write(one_line(text), out=self._out)

    def clear(self) -> None:
        """Take the line away, so that what is printed next stands alone."""
        TERMINAL.still()
        TERMINAL.clear()


# --- what runs show alike
class Kept(str):
    """A line that stays with --quiet: a finding, a warning, JSON that was asked for."""

    __slots__ = ()


def tell(lines: Iterable[str]) -> None:
    """Print the last lines of a command. With --quiet only those that are `Kept`."""
    if text := printed(line for line in lines if isinstance(line, Kept) or not TERMINAL.is_quiet):
        echo(text)


T = TypeVar("T")


class Show(ABC, Generic[T]):
    """The output of a command: notes that stay, a progress line, and the result at the end.

    The progress of a job is shown in bytes, or in samples where these are `counted`.
    """

    unit, done, touched = "shard", "done", "touched unit"
    """A unit of work, what becomes of it, and what is read again where dates alone have changed."""
    counted = ""
    """What the samples are called."""
    spared = ""
    """The option that takes less memory if it is smaller."""

    def __init__(self, *, as_json: bool, waits: bool = True) -> None:
        """Prepare the output. With `waits`, say at once that the command gets ready.

        A command that asks a question cannot do so.
        """
        self.as_json = as_json
        self._at_work = 0.0
        self.line = ProgressLine()
        if waits:
            self.line.wait_for("getting ready")

    def result(self, found: T) -> list[str]:
        """Return the end, for a person or for a program."""
        self.line.clear()
        if self.as_json:
            return [Kept(json.dumps(each, sort_keys=True)) for each in self.facts(found)]
        return list(self.summary(found))

    @abstractmethod
    def facts(self, found: T) -> Iterable[Mapping[str, Any]]:
        """Yield the objects that a program is told."""

    @abstractmethod
    def summary(self, found: T) -> Iterable[str]:
        """Yield the lines that a person is told."""

    # --- on the way
    @property
    def working_s(self) -> float:
        """Since the first worker was heard of: rates count from there."""
        return time.monotonic() - self._at_work

    def told(self, text: str) -> None:
        self.line.say(text)

    def start_counting(self) -> None:
        """Note that the work begins."""
        self.line = ProgressLine()
        self.line.wait_for("waiting for the first worker")

    def status(self, status: "Callable[[], JobStatus]") -> None:
        self._at_work = self._at_work or time.monotonic()
        self.line.offer(lambda: self.parts(status()))

    def parts(self, status: "JobStatus") -> list[str]:
        """Return the parts of the progress line, the most important first: not all may fit.

        In the first second no rate is shown.
        """
        is_early = self.working_s < FIRST_S
        left = 0.0 if is_early else status.left_s(self.working_s)
        done, rate = self._pace(status)
        return [
            done,
            *([] if is_early else [rate]),
            *([f"{human_time(left)} left"] if left else []),
            f"{self.unit} {status.units_done:,} of {status.units:,}",
            *self.details(status),
            *([f"rejects: {human_counts(status.rejects)}"] if status.rejects else []),
        ]

    def _pace(self, status: "JobStatus") -> tuple[str, str]:
        seconds = max(self.working_s, FIRST_S)
        if not self.counted:
            done = f"{human_bytes(status.nbytes)} of {human_bytes(status.nbytes_of)}"
            return done, f"{human_bytes(status.nbytes / seconds)}/s"
        rate = (status.samples + sum(status.rejects.values())) / seconds
        done = f"{status.samples:,} {self.counted}s"
        return done, f"{rate:,.{int(rate < 100)}f} {self.counted}s/s"

    def details(self, _status: "JobStatus") -> list[str]:
        """Return what one command has to tell and not the others."""
        return []

    def asked(self, _what: object) -> bool:
        """Ask whether to go on, where somebody can answer."""
        return sys.stdin.isatty() and click.confirm("do this?", err=True)

    def changed(self, done: int, of: int) -> None:
        self.line.show(f"{self.unit} {done:,}{f' of {of:,}' if of else ''} changed")

    def compared(self, done: int, of: int) -> None:
        told = f"comparing {plural(of, self.touched)} with what was {self.done}"
        self.line.show(f"{told}: {done:,} so far")

    # --- what came of runs
    def headline(self, outcomes: "Sequence[Outcome]", more: str = "") -> str:
        """Return what this run has done, and `more` of it."""
        units = sum(outcome.units_before for outcome in outcomes)
        before = f"{plural(units, self.unit)} {self.done} before"
        has_all = sum(len(outcome.manifest.receipts) for outcome in outcomes) == units
        if has_all and not any(outcome.quarantined for outcome in outcomes):
            return f"nothing left to do: {before}"
        samples = sum(outcome.samples for outcome in outcomes)
        took = human_time(self.line.elapsed_s)
        new = f"{plural(samples, self.counted)} {self.done} in {took}{more}"
        return new + (f", after {before}" if units else "")

    def left_out(self, outcome: "Outcome") -> Iterator[str]:
        """Yield the units of a dataset that failed, each with the reason."""
        for failed in outcome.quarantined:
            times = f" (failed {failed.attempts} times)" if failed.attempts > 1 else ""
            yield Kept(f"{self.unit} {failed.unit.name} is left out: {failed.reason}{times}")

    def again(self, outcomes: "Sequence[Outcome]") -> list[str]:
        """Return what to do about those, where there are any."""
        failed = [one for outcome in outcomes for one in outcome.quarantined]
        less = f"fewer --workers or a smaller {self.spared} takes less of it"
        is_short = bool(self.spared) and any("memory" in one.reason for one in failed)
        lines = [f"where memory is short, {less}"] if is_short else []
        retried = Kept("run the same command again to retry what is left out")
        return [*lines, retried] if failed else []


def shapes_lines(manifest: "Manifest") -> list[str]:
    """Return how many samples have which shape, where there are several."""
    counts = shape_counts(manifest.settings, manifest.counts)
    return [f"in {plural(len(counts), 'shape')}: {human_counts(counts, 8)}"] if counts else []


def rejects_lines(rejects: Mapping[str, int], url: str) -> list[str]:
    """Return how many rejects have which codes, and where they are listed."""
    if not rejects:
        return []
    count = plural(sum(rejects.values()), "reject")
    lines = [f"{count} ({human_counts(rejects, 8)}): see {url}/rejects/"]
    if scattered := rejects.get(Code.TAR_SCATTERED.value):
        apart = f"of {plural(scattered, 'sample')} the members stand apart in the tar"
        remedy = "make the tars again in the order of names (tar --sort=name), then --overwrite"
        lines.append(Kept(f"{apart}, so captions may be lost: {remedy}"))
    return lines


def void_line(rejects: Mapping[str, int], url: str, remedies: Mapping[str, str]) -> str:
    """Return the line for a run that kept nothing: the main reason, and what to do."""
    worst = max(sorted(rejects), key=lambda code: rejects[code])
    count, everything = rejects[worst], sum(rejects.values())
    all_are = f"{count:,} of {plural(everything, 'reject')} are"
    if count == everything:
        all_are = f"all {everything:,} rejects are" if everything > 1 else "the one reject is"
    remedy = remedies.get(worst, "mend the source")
    return Kept(f"nothing was kept: {all_are} {worst}: {remedy}; {url}/rejects/ says why of each")


def broken_tars_lines(count: int, url: str) -> list[str]:
    """Return the line about tars of which an unknown part is lost."""
    if not count:
        return []
    lost = f"{plural(count, 'tar')} cannot be read to the end, and what follows there is lost"
    remedy = f"{url}/rejects/ says where and why; mend or replace them, then start over"
    return [Kept(f"{lost}: {remedy}")]


def left_out_lines(kinds: Mapping[str, int]) -> list[str]:
    """Return the line about files that were no input, by their kind."""
    if not kinds:
        return []
    parts = [f"{count:,} {kind}" for kind, count in Counter(kinds).most_common()]
    formats = [kind[1:] for kind in (".parquet", ".csv", ".tsv", ".jsonl") if kind in kinds]
    formats += ["tars"] if {".tar", ".tgz"} & kinds.keys() else []
    hint = f" (--input-format {' or '.join(formats)} packs those)" if formats else ""
    return [f"left out, neither images nor captions by their names: {', '.join(parts)}{hint}"]
