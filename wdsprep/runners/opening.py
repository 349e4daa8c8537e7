"""How far a worker is with its opening, while it loads models that may have to be downloaded.

Nobody knows how long that takes. What shows that it goes on is that bytes move: those that this
process reads and writes, and those that another process downloads for it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from wdsprep.runners.schedule import Opening

REPORT_S = 5.0
STEP_NBYTES = 1 << 20
"""The bytes that count as progress. A process that only waits moves some thousand."""

_growing: Counter[Path] = Counter()
_changing = threading.Lock()


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


def report_opening(is_over: threading.Event) -> Iterator[Opening]:
    """Yield a message now and then if bytes have moved, until the opening is over."""
    reported = 0
    while not is_over.wait(REPORT_S):
        with _changing:
            folders = [folder for folder, count in _growing.items() if count]
        moved = _own_nbytes() + sum(map(_nbytes_in, folders))
        if abs(moved - reported) >= STEP_NBYTES:
            reported = moved
            yield Opening(value=moved)


def _own_nbytes() -> int:
    """Return the bytes that this process has read and written, as far as the system tells."""
    with suppress(OSError):
        lines = Path("/proc/self/io").read_text().splitlines()
        counts = dict(line.split(": ") for line in lines)
        return int(counts["rchar"]) + int(counts["wchar"])
    return 0


def _nbytes_in(folder: Path) -> int:
    nbytes = 0
    for path in folder.glob("*"):
        with suppress(OSError):  # it has just got its final name
            nbytes += path.stat().st_size
    return nbytes
