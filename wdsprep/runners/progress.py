"""The line that shows how far a command, or a call from Python, is.

Commands add to it what they know (`wdsprep.cli.output.shared.CommandOutput`). A function that is
called without a listener draws it too: on a terminal, in a notebook, and every half minute where
stderr is a pipe. It does not in a worker process, nor on any rank of a trainer but the first.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from wdsprep import terminal
from wdsprep.runners.job import JobListener, JobStatus
from wdsprep.terminal import NOTHING_LOST, TERMINAL, LeftOff, LogLines, ProgressLine
from wdsprep.text import human_bytes, human_counts, human_time, plural

IN_WORKER = "RAY_RAYLET_PID"
"""The environment variable that Ray sets for the workers of a cluster."""


class JobProgress(JobListener):
    """A listener that draws a progress line of jobs: in bytes if a job counts these, or in samples.

    Its notes stay on the screen if a person looks on.
    """

    unit, done, touched = "shard", "done", "touched unit"
    """A unit of work, what becomes of it, and what is read again where dates alone have changed."""
    counted = "sample"
    """The noun for samples in the progress line."""
    waiting = "waiting for the first worker"
    """The words for the time until the first worker is heard of."""
    first = "waiting for the first sample"
    """The words for the time until the first sample."""

    def __init__(self, *, waits: bool = True) -> None:
        super().__init__()
        self._at_work = 0.0
        self.line = ProgressLine()
        if waits:
            self.line.wait_for("getting ready")

    @property
    def working_s(self) -> float:
        """Return the seconds since the first worker was heard of. Rates count from there."""
        return time.monotonic() - self._at_work

    def on_message(self, text: str) -> None:
        if self.line.is_seen:
            self.line.say(text)

    def on_listing(self, _place: str, done: int, _of: int) -> None:
        self.line.show(f"listing: {done:,} so far")

    def on_begin(self, _plan: Any) -> None:
        self.start_counting()

    def start_counting(self) -> None:
        """Begin a new progress line, which says that the job waits for its first worker."""
        self.line = ProgressLine()
        self.line.wait_for(self.waiting)

    def on_status(self, status: Callable[[], JobStatus]) -> None:
        self._at_work = self._at_work or time.monotonic()
        TERMINAL.left_off = lambda: self.left_off(status())
        self.line.offer(lambda: self.parts(status()))

    def parts(self, status: JobStatus) -> list[str]:
        """Return the parts of the progress line, the most important first: not all may fit.

        In the first second no rate is shown.
        """
        is_early = self.working_s < terminal.FIRST_S
        unit = f"{self.unit} {status.units_done:,} of {status.units:,}"
        if not (status.samples or status.rejects or status.nbytes_of):
            return [f"{self.first}, {human_time(self.working_s)}", unit]
        left = 0.0 if is_early else status.left_s(self.working_s)
        done, rate = self._pace(status)
        return [
            done,
            *([] if is_early else [rate]),
            *([f"{human_time(left)} left"] if left else []),
            unit,
            *self.details(status),
            *([f"rejects: {human_counts(status.rejects)}"] if status.rejects else []),
        ]

    def left_off(self, status: JobStatus) -> LeftOff:
        """Return what is kept and what is lost if the job ends now."""
        if not status.unfinished:
            return NOTHING_LOST
        lost = f"the work on {plural(status.unfinished, self.counted)}"
        if not status.units_done:
            return f"no {self.unit} was finished, and {lost} is lost", False
        kept = f"{status.units_done:,} of {plural(status.units, self.unit)} are kept"
        return f"{kept}, and {lost} of others is lost", True

    def _pace(self, status: JobStatus) -> tuple[str, str]:
        seconds = max(self.working_s, terminal.FIRST_S)
        if status.nbytes_of:
            done = f"{human_bytes(status.nbytes)} of {human_bytes(status.nbytes_of)}"
            return done, f"{human_bytes(status.nbytes / seconds)}/s"
        inputs = status.samples + sum(status.rejects.values())
        rate = inputs / seconds
        done = f"{status.samples:,} {self.counted}s"
        if status.samples_of:
            done = f"{inputs:,} of {plural(max(inputs, status.samples_of), self.counted)}"
        return done, f"{rate:,.{int(rate < 100)}f} {self.counted}s/s"

    def details(self, _status: JobStatus) -> list[str]:
        """Return further parts of the progress line: none, unless a command has some of its own."""
        return []

    def on_change(self, done: int, of: int) -> None:
        self.line.show(f"{self.unit} {done:,}{f' of {of:,}' if of else ''} changed")

    def on_step(self, step: Any) -> None:
        if isinstance(step, str):  # what a report does now
            self.line.show(step)

    def on_comparison(self, done: int, of: int) -> None:
        told = f"comparing {plural(of, self.touched)} with what was {self.done}"
        self.line.show(f"{told}: {done:,} so far")


@contextmanager
def progress_of_call(unit: str) -> Iterator[JobListener]:
    """Yield a listener that draws the progress of a call, and remove the line when the block ends.

    Meanwhile warnings of the log do not break the line. `unit` is the noun for a unit of work. If
    another process shows the progress (`is_worker`), the listener draws nothing.
    """
    if is_worker():
        yield JobListener()
        return
    progress = JobProgress()
    progress.unit = unit
    other, logging.lastResort = logging.lastResort, LogLines(logging.WARNING)
    try:
        yield progress
    finally:
        logging.lastResort = other
        progress.line.clear()


def is_worker() -> bool:
    """Return whether another process shows the progress of what this one does.

    That is so in a child of multiprocessing, in a worker of Ray, and on all ranks of a trainer
    but 0.
    """
    processes = sys.modules.get("multiprocessing.process")
    is_child = processes is not None and processes.parent_process() is not None
    return is_child or IN_WORKER in os.environ or os.environ.get("RANK", "0") not in ("", "0")
