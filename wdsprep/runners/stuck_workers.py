"""Tell workers that hang from workers that take long, and those that lacked memory from the rest.

A worker that is stopped, or waits for ever, does not die: nobody hears of it, and it alone holds up
the end of the run. What shows it is that nothing it holds comes further, for far longer than any
step takes. It is ended then, and judged like one that died. Where it goes on after all, as on a
machine that was paused, there are two attempts at one unit, which is harmless.

A worker that opens is watched too, from when it has its place. Nobody knows how long it takes to
load models that may have to be downloaded. What shows that it goes on is that bytes move: those
that the worker's process reads and writes, and those that another process downloads for it.

Time is counted as the driver lives it: one that was stopped itself finds nobody overdue.

The kernel tells nobody whom it kills for lack of memory: the process ends by SIGKILL, as if a user
had done it. It counts such kills, though, for each control group and for the machine. One that is
counted while workers run, of which one ends by SIGKILL, settles it.

Where a limit on address space (`ulimit -v`) is what is lacked, nobody is killed: anything fails,
each in words of its own, and libraries abort. OpenBLAS, on which NumPy multiplies, takes a thread
for each core as it is imported, and where it cannot have them it sends its own process a SIGINT: a
command takes that for Ctrl-C, and a worker, which ignores those, waits for the missing thread at
its first product. We multiply little, and have a worker for each core, so it gets no thread.
"""

from __future__ import annotations

import errno
import re
import resource
import signal
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from wdsprep.cpus import control_groups
from wdsprep.runners.base import Failure, Message, RunnerSettings
from wdsprep.text import human_bytes

LOOK_S = 5.0
"""The most seconds between two looks."""

REPORT_S = 5.0
STEP_NBYTES = 1 << 20
"""The bytes that count as progress. A process that only waits moves some thousand."""

_growing: Counter[Path] = Counter()
_changing = threading.Lock()


class Watch:
    """The progress of all workers, those that open and those that hold units."""

    def __init__(self, settings: RunnerSettings) -> None:
        self._settings = settings
        self._now_s, self._looked = 0.0, time.monotonic()
        self._held: dict[int, dict[int, object]] = {}
        """The progress that each order of a worker reported last; the order 0 is its opening."""
        self._working: OrderedDict[int, float] = OrderedDict()
        """When each worker that holds units last made progress, the longest ago first."""
        self._opening: OrderedDict[int, float] = OrderedDict()

    def given(self, slot: int, order: int) -> None:
        self._held.setdefault(slot, {})[order] = None
        self._working.setdefault(slot, self._now_s)

    def take(self, slot: int, order: int, message: Message) -> None:
        """Take note of a message of a worker, or about it."""
        kind, value = message
        held = self._held.setdefault(slot, {})
        if kind in ("opening", "progress"):
            if order in held and held[order] == value:
                return
            held[order] = value
        elif kind == "lost":
            self.forget(slot)
            return
        elif kind != "unsure":
            held.pop(order, None)
        for since in (self._opening, self._working):
            since.pop(slot, None)
        if held:
            (self._opening if 0 in held else self._working)[slot] = self._now_s

    def forget(self, slot: int) -> None:
        for kept in (self._held, self._opening, self._working):
            kept.pop(slot, None)

    def overdue(self) -> list[tuple[int, Failure]]:
        """Return the slots of workers that came no further for too long, and what to say of each.

        Call this after each wait for messages: each call counts the time since the last one, but
        at most 5 s.
        """
        before, self._looked = self._looked, time.monotonic()
        self._now_s += min(self._looked - before, LOOK_S)
        settings = self._settings
        overdue = []
        for since, patience_s, fault in (
            (self._working, settings.patience_s, "made no progress"),
            (self._opening, settings.opening_patience_s, "opened no further"),
        ):
            failure = Failure(reason=f"worker {fault} for {patience_s:,.0f} s, and was ended")
            for slot, moved_s in since.items():
                if self._now_s - moved_s < patience_s:
                    break
                overdue.append((slot, failure))
        return overdue


# --- in a worker that opens
@contextmanager
def awaiting(folder: Path) -> Iterator[None]:
    """Count what arrives in a folder as progress of this worker while the block lasts."""
    with _changing:
        _growing[folder] += 1
    try:
        yield
    finally:
        with _changing:
            _growing[folder] -= 1


def report_opening(is_over: threading.Event) -> Iterator[Message]:
    """Yield a message now and then if bytes have moved, until the opening is over."""
    reported = 0
    while not is_over.wait(REPORT_S):
        with _changing:
            folders = [folder for folder, count in _growing.items() if count]
        moved = 0
        with suppress(OSError):  # as far as the system tells what this process reads and writes
            lines = Path("/proc/self/io").read_text().splitlines()
            counts = dict(line.split(": ") for line in lines)
            moved += int(counts["rchar"]) + int(counts["wchar"])
        for path in (path for folder in folders for path in folder.glob("*")):
            with suppress(OSError):  # it has just got its final name
                moved += path.stat().st_size
        if abs(moved - reported) >= STEP_NBYTES:
            reported = moved
            yield "opening", moved


FEWER = "fewer --workers take less of it"
OUT_OF_MEMORY = f"worker was killed: out of memory: {FEWER}"
PERHAPS = f"worker was killed (signal 9), most often for lack of memory: {FEWER}"
ONE_BLAS_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""Goes into the environment before NumPy is imported, unless the user has set it."""
ENDS_OF_OURS = (0, 128 + signal.SIGTERM)
"""Codes with which a worker ends that was told to, or saw its driver gone."""
LACKED = ("can't start new thread", "failed to map segment", "cannot allocate memory")
"""So Python and the loader of libraries say that there was no memory."""
OF_THE_MACHINE = Path("/proc/vmstat")


def count_kills(counters: Sequence[Path] | None = None) -> Callable[[], str]:
    """Return a function that returns the likely reason why a worker was ended by SIGKILL.

    The reason is a lack of memory if the kernel has counted another such kill since the last call,
    or since now. Otherwise that is only named as the most frequent reason. `counters` are files
    that may state how many processes were killed; the first that does is used. By default they are
    those of this process's control groups, then that of the machine.
    """
    paths = find_counters() if counters is None else counters

    def count() -> int:
        for path in paths:
            with suppress(OSError):
                line = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
                if line:
                    return int(line[1])
        return 0

    counted = count()

    def reason() -> str:
        nonlocal counted
        before, counted = counted, count()
        return OUT_OF_MEMORY if counted > before else PERHAPS

    return reason


def is_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory, or address space, has run out."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    is_other = isinstance(error, ImportError | OSError | RuntimeError)
    return is_other and any(words in str(error).lower() for words in LACKED)


def reason_of_end(returncode: int, reason_of_kill: Callable[[], str]) -> str:
    """Return the reason why a worker ended, by the exit code of its process."""
    if -returncode == signal.SIGKILL:
        return reason_of_kill()
    if returncode < 0:
        how = f"worker was killed by {signal.Signals(-returncode).name}"
    else:
        how = f"worker exited with code {returncode}"
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    limits = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    if returncode in ENDS_OF_OURS or not limits:
        return how
    least = human_bytes(min(limits))
    return f"{how}: it may have lacked memory, which is limited to {least} (ulimit)"


def find_counters() -> list[Path]:
    """Return the files that may count kills for lack of memory.

    Those of this process's control groups come before that of the machine.
    """
    names = "memory.events", "memory.oom_control"
    groups = [group for _, group in control_groups("memory")]
    return [*(group / name for group in groups for name in names), OF_THE_MACHINE]
