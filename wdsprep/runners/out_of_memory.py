"""Whether a worker that was killed lacked memory, and how that is said.

The kernel tells nobody whom it kills: the process ends by SIGKILL, as if a user had done it. It
counts such kills, though, for each control group and for the machine. One that is counted while
workers run, of which one ends by SIGKILL, settles it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

FEWER = "fewer --workers take less of it"
OUT_OF_MEMORY = f"worker was killed: out of memory: {FEWER}"
PERHAPS = f"worker was killed (signal 9), most often for lack of memory: {FEWER}"
GROUPS = Path("/sys/fs/cgroup")
OF_THE_MACHINE = Path("/proc/vmstat")


class KillsCounted:
    """Compares what the kernel counts now with what it counted when this was made, or asked."""

    def __init__(self) -> None:
        self._before = _count()

    def reason(self) -> str:
        """Of a worker that has ended by SIGKILL."""
        before, self._before = self._before, _count()
        return OUT_OF_MEMORY if self._before > before else PERHAPS


def _count() -> int:
    """Of the own control group; of the machine where that does not say."""
    for path in (*_own_groups(), OF_THE_MACHINE):
        try:
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    return 0


def _own_groups() -> Iterator[Path]:
    """In the second version of control groups, then in the first."""
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
