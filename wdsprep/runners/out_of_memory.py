"""Whether a worker that ended lacked memory, and how that is said.

The kernel tells nobody whom it kills: the process ends by SIGKILL, as if a user had done it. It
counts such kills, though, for each control group and for the machine. One that is counted while
workers run, of which one ends by SIGKILL, settles it.

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
from collections.abc import Iterator, Sequence
from pathlib import Path

from wdsprep.text import human_bytes

FEWER = "fewer --workers take less of it"
OUT_OF_MEMORY = f"worker was killed: out of memory: {FEWER}"
PERHAPS = f"worker was killed (signal 9), most often for lack of memory: {FEWER}"
ONE_BLAS_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""Goes into the environment before NumPy is imported, unless the user has set it."""
ENDS_OF_OURS = (0, 128 + signal.SIGTERM)
"""Codes with which a worker ends that was told to, or saw its driver gone."""
LACKED = ("can't start new thread", "failed to map segment", "cannot allocate memory")
"""So Python and the loader of libraries say that there was no memory."""
GROUPS = Path("/sys/fs/cgroup")
OF_THE_MACHINE = Path("/proc/vmstat")


class KillsCounted:
    """A count of the processes that the kernel has killed for lack of memory."""

    def __init__(self, counters: Sequence[Path] | None = None) -> None:
        """Begin to count. `counters` are files that may state how many processes were killed.

        The first that does is used. By default they are those of this process's control groups,
        then that of the machine.
        """
        self._counters = find_counters() if counters is None else counters
        self._before = self._count()

    def reason(self) -> str:
        """Return the likely reason why a worker was ended by SIGKILL.

        The reason is a lack of memory if the kernel has counted another such kill since the last
        call, or since counting began. Otherwise that is only named as the most frequent reason.
        """
        before, self._before = self._before, self._count()
        return OUT_OF_MEMORY if self._before > before else PERHAPS

    def _count(self) -> int:
        for path in self._counters:
            try:
                found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
            except OSError:
                continue
            if found:
                return int(found[1])
        return 0


def is_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory, or address space, has run out."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    is_other = isinstance(error, ImportError | OSError | RuntimeError)
    return is_other and any(words in str(error).lower() for words in LACKED)


def reason_of_end(returncode: int, kills: KillsCounted) -> str:
    """Return the reason why a worker ended, by the exit code of its process."""
    if -returncode == signal.SIGKILL:
        return kills.reason()
    if returncode < 0:
        how = f"worker was killed by {signal.Signals(-returncode).name}"
    else:
        how = f"worker exited with code {returncode}"
    return how if returncode in ENDS_OF_OURS else how + _address_space_hint()


def _address_space_hint() -> str:
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    limits = [limit for limit in limits if limit != resource.RLIM_INFINITY]
    if not limits:
        return ""
    return f": it may have lacked memory, which is limited to {human_bytes(min(limits))} (ulimit)"


def find_counters() -> list[Path]:
    """Return the files that may count kills for lack of memory.

    Those of this process's control groups come before that of the machine.
    """
    return [*_own_groups(), OF_THE_MACHINE]


def _own_groups() -> Iterator[Path]:
    """Yield the files of this process's control groups that may count kills for lack of memory."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _number, kinds, path = line.split(":", 2)
        if not kinds:
            yield GROUPS / path.lstrip("/") / "memory.events"
        elif "memory" in kinds.split(","):
            yield GROUPS / "memory" / path.lstrip("/") / "memory.oom_control"
