"""Rivals take turns, each in a process of its own, and what each takes is measured from outside.

Turns make a busy machine slow all of them. Processor time is that of the process and of the
children that it has waited for; memory is the peak of the proportional share (PSS) of the process
and all its descendants, looked at five times a second.
"""

import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tools.benches import Group, Rival

LOOK_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one run took."""

    seconds: float
    cpu_s: float
    peak_mb: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A group with the runs of each rival, by name."""

    group: Group
    runs: dict[str, list[Taken]]

    def median(self, name: str, what: str = "seconds") -> float:
        return statistics.median(getattr(run, what) for run in self.runs[name])

    def ratio(self, name: str) -> float:
        """How many times as long as the first this one takes."""
        return self.median(name) / self.median(next(iter(self.runs)))


def in_turns(group: Group, rounds: int, told: Callable[[str], None]) -> Measured:
    runs: dict[str, list[Taken]] = {rival.name: [] for rival in group.rivals}
    for number in range(rounds):
        for rival in group.rivals:
            told(f"{group.title}: round {number + 1} of {rounds}: {rival.name}")
            runs[rival.name].append(run(rival))
    return Measured(group=group, runs=runs)


def run(rival: Rival) -> Taken:
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        started = time.perf_counter()
        process = subprocess.Popen(
            [str(word) for word in rival.command],
            env={**os.environ, **rival.env},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=errors,
        )
        peak: list[float] = [0.0]
        watcher = threading.Thread(target=_watch, args=(process.pid, peak), daemon=True)
        watcher.start()
        try:
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:  # so that nothing goes on in a folder that is removed
            for member in family(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(member, signal.SIGTERM)
            process.wait()
            raise
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        watcher.join()
        if rival.leaves is not None:
            shutil.rmtree(rival.leaves, ignore_errors=True)
        if process.returncode:
            errors.seek(0)
            sys.exit(f"{rival.name}: {' '.join(map(str, rival.command))}\n{errors.read()[-3000:]}")
        said.seek(0)
        text = said.read()
        own = re.findall(r"^took ([\d.e-]+)$", text, re.MULTILINE)
    return Taken(
        seconds=float(own[-1]) if own else seconds,
        cpu_s=used.ru_utime + used.ru_stime,
        peak_mb=peak[0],
        notes=tuple(re.findall(r"^note (.+)$", text, re.MULTILINE)),
    )


def _watch(pid: int, peak: list[float]) -> None:
    while members := family(pid):
        peak[0] = max(peak[0], sum(map(pss_kb, members)) / 1e3)
        time.sleep(LOOK_S)


def family(pid: int) -> list[int]:
    """A process and its descendants, as long as it lives."""
    try:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return []
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(member for child in children for member in family(int(child)))]


def pss_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
