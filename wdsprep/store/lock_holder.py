"""Holding a name: who does, and how others wait for it.

A hold is how runs that meet take turns: nobody else is in a block that holds the same name. How a
store keeps that promise is its own affair, in `local` and `object_locks`.
"""

import functools
import json
import logging
import os
import random
import secrets
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from wdsprep.errors import BusyError
from wdsprep.text import human_time

LONGEST_PAUSE_S = 1.0
FIRST_WORD_S, NEXT_WORD_S = 10.0, 300.0
_log = logging.getLogger("wdsprep")


class Wait:
    """A wait for another process: growing pauses, a message from time to time, and a limit."""

    def __init__(self, what: str, limit_s: float) -> None:
        self._what, self._limit_s = what, limit_s
        self._began = time.monotonic()
        self._pause_s, self._next_word_s = 0.002, FIRST_WORD_S

    def pause(self, holder: str = "another run") -> None:
        """Sleep for a moment, longer each time, and log a warning from time to time.

        Raise BusyError if the limit has passed. `holder` is who is waited for, in words.
        """
        waited_s = time.monotonic() - self._began
        if waited_s > self._limit_s:
            raise BusyError(
                f"{self._what}: {holder} has locked it for {human_time(waited_s)}: wait for that "
                "run or end it, then run the same again"
            )
        if waited_s > self._next_word_s:
            self._next_word_s = waited_s + NEXT_WORD_S
            _log.warning("%s: waiting for %s, which has locked it", self._what, holder)
        time.sleep(random.uniform(self._pause_s / 2, self._pause_s))  # noqa: S311 (no secret)
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process that holds a lock, described so that others can tell whether it is alive.

    A pid means something in its own namespace alone, and is given to other processes later. The
    time of a process's start is not.
    """

    machine: str
    host: str
    pid: int
    started: str
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def to_bytes(self) -> bytes:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(fields, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Holder":
        return cls(**json.loads(data))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def is_known_dead(self) -> bool:
        """Return whether the process ran on this machine and has ended.

        It is False for a process of another machine, of which nothing is known here.
        """
        if not self.machine or self.machine != _machine() or self.started == _start(self.pid):
            return False
        return bool(_start(self.pid)) or not _may_live(self.pid)


def this_process() -> Holder:
    pid = os.getpid()
    return Holder(machine=_machine(), host=socket.gethostname(), pid=pid, started=_start(pid))


@functools.cache
def _machine() -> str:
    """Return an id of this boot of this machine and of the pid namespace; empty outside Linux."""
    try:
        return f"{boot()} {Path('/proc/self/ns/pid').readlink()}" if boot() else ""
    except OSError:
        return ""


@functools.cache
def boot() -> str:
    """Return an id of this boot of this machine; empty outside Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _may_live(pid: int) -> bool:
    """Return whether a process may be alive although `_start` found no start of it.

    Some machines hide the processes of other users in /proc.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not Path(f"/proc/{pid}").exists()


def _start(pid: int) -> str:
    """Return when a process started, in ticks since the boot, or "" if it has ended.

    A zombie has ended too.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]
