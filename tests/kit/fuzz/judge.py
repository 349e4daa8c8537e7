"""What is wrong with how a run went: what it said, took and touched."""

import contextlib
import io
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.fuzz.cases import Run

MOST_NBYTES = 1_500_000_000
"""How much more memory a run may take than its process had before."""
MOST_ADDRESSES = 4_000_000_000
"""How much more it could take: the machine is not lost, and what is asked for shows."""
MOST_CPU_S, LONGEST_S = 30.0, 180.0
"""The most of a core, and the longest, on a machine that others use too."""
LONGEST_LINE = 3_000
EXIT_CODES = (0, 1, 2, 3)  # 3: whole, with rejects or findings
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
FORBIDDEN = ("/etc/passwd",)
"""What mutations name and nothing of ours has to read."""


class TooLongError(BaseException):
    """A run that did not end in its time."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    name: str
    code: int
    seconds: float
    nbytes: int
    """The memory that it took at most."""
    wrong: tuple[str, ...]


class Watch:
    """Hears of each file that this process opens to write, or changes, outside of one folder.

    Hooks of Python cannot be taken off, so there is one watch to a process. Libraries that are not
    Python are not heard: `seen` shows what they left. Python keeps no compiled modules meanwhile.
    """

    def __init__(self, root: Path) -> None:
        self._root = f"{root.resolve()}/"
        self._found: list[str] = []
        self._is_on = False
        sys.addaudithook(self._hear)

    @contextlib.contextmanager
    def listening(self) -> Iterator[list[str]]:
        self._found = found = []
        self._is_on, keeps_none = True, sys.dont_write_bytecode
        sys.dont_write_bytecode = True
        try:
            yield found
        finally:
            self._is_on, sys.dont_write_bytecode = False, keeps_none

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on or not arguments:
            return
        if event == "open":
            path, _mode, flags = arguments
            if isinstance(path, int) or path is None:
                return
            name = os.path.abspath(os.fsdecode(path))
            if name in FORBIDDEN:
                self._found.append(f"it read {name}")
            elif isinstance(flags, int) and flags & WRITES:
                self._touch(name)
        elif event in CHANGES:
            for path in arguments[:2]:
                if isinstance(path, str | bytes) and path:
                    self._touch(os.path.abspath(os.fsdecode(path)))

    def _touch(self, name: str) -> None:
        if not name.startswith((self._root, "/dev/null", "/dev/tty", "/proc/self/")):
            self._found.append(f"it touched {name}")


def judged(run: Run, watch: Watch) -> Judged:
    """Run it in its bounds, and say what is wrong with it."""
    out, err = io.StringIO(), io.StringIO()
    wrong: list[str] = []
    code = 1
    before = _reset_peak()
    began, cpu = time.monotonic(), time.process_time()
    with watch.listening() as touched:
        try:
            with (
                limited_memory(),
                at_most(LONGEST_S),
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
            ):
                code = run.act()
        except TooLongError:
            wrong.append(f"it did not end in {LONGEST_S:.0f} s")
        except Exception:  # noqa: BLE001 (which is what is looked for)
            wrong.append(traceback.format_exc()[-1500:])
    took, nbytes = time.monotonic() - began, _peak_nbytes() - before
    wrong += dict.fromkeys(touched)
    wrong += wrong_words(code, err.getvalue(), out.getvalue()) if not wrong else []
    if (worked := time.process_time() - cpu) > MOST_CPU_S:
        wrong.append(f"it took {worked:.0f} s of a core")
    if nbytes > MOST_NBYTES:
        wrong.append(f"it took {nbytes / 1e9:.1f} GB")
    return Judged(name=run.name, code=code, seconds=took, nbytes=max(nbytes, 0), wrong=tuple(wrong))


def wrong_words(code: int, err: str, out: str = "") -> list[str]:
    """Say what is wrong with an exit code and what was said with it."""
    lines = [*err.splitlines(), *out.splitlines()]
    wrong = [line[:400] for line in lines if "a bug:" in line or "Traceback (" in line]
    wrong += [f"it asked for memory: {line[:200]}" for line in lines if "out of memory:" in line]
    errors = [line for line in err.splitlines() if line.startswith("wdsprep: ")]
    if code not in EXIT_CODES:
        wrong.append(f"exit code {code}: {err[-300:]}")
    if code in (1, 2) and len(errors) != 1:
        wrong.append(f"exit code {code} with {len(errors)} lines of error: {err[-300:]!r}")
    if (longest := max(map(len, err.splitlines()), default=0)) > LONGEST_LINE:
        wrong.append(f"a line of {longest:,} characters")
    return wrong


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """End what takes longer with a `TooLongError`."""

    def stop(_number: int, _frame: object) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def limited_memory(nbytes: int = MOST_ADDRESSES) -> Iterator[None]:
    """Let this process have no more addresses than so many beside what it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _reset_peak() -> int:
    """Let the kernel measure the most memory anew; what there is now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_nbytes()


def _peak_nbytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def seen(root: Path, *but: Path) -> dict[str, tuple[int, int]]:
    """Size and time of each file and folder below a folder, but for some."""
    left_out = {str(path) for path in but}
    found = {}
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if f"{folder}/{name}" not in left_out]
        for name in (*names, *files):
            status = os.lstat(f"{folder}/{name}")
            is_folder = name in names
            found[f"{folder}/{name}"] = (
                (0, 0) if is_folder else (status.st_size, status.st_mtime_ns)
            )
    return found
