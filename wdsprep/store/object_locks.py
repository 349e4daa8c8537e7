"""Holds where there are no locks: marks, which are objects that are created only where none is.

1. A hold is an object at its name, the *mark*, made on condition that there is none. It says which
   process made it, and its holder deletes it at the end.
2. Of a holder that is dead, the mark stays. Who comes then makes a further mark, `NAME.1`, on the
   same condition, and holds the name if after that the marks are those that were dead and its own.
   The last mark holds; it is deleted after the others.
3. Dead is a holder whose process has ended, as far as that can be seen from here, or whose mark is
   `DEAD_S` old. A holder that takes longer makes a further mark in time.
4. Nothing that a holder asks for happens later than that. It sends no request after `FRESH_S`
   without a further mark, and looks at the clock just before.

On S3 the age of a mark is by the server's clock, and that look is when the request has its
signature already: a server refuses what was signed more than `SKEW_S` ago, by a clock that it lets
differ as much. So there a process that was stopped for an hour, in the middle of a deletion even,
does no harm. What is left is a request that got no answer, was repeated with success, and is
carried out by the server once more after the hold has ended. GCS and Azure tell no time and have no
such limit: there the age is by the clock of who asks, which may be wrong by half an hour, and what
is left is also a process that was stopped for that long between its look and its request, a
few microseconds later.

How any lock is waited for is here too (`Wait`), also for locks of files in `local`.
"""

import builtins
import functools
import json
import logging
import os
import random
import re
import secrets
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from wdsprep.errors import (
    AccessError,
    BusyError,
    ExistsError,
    NotFoundError,
    StoreError,
    UsageError,
)
from wdsprep.store.base import Entry, FileSink, check_name
from wdsprep.store.remote import FIRST_PAUSE_S, PART_NBYTES, OverNetwork, PartSink, PerProcess
from wdsprep.store.schemes import root_and_name
from wdsprep.text import human_time

LONGEST_PAUSE_S = 1.0
FIRST_WORD_S, NEXT_WORD_S = 10.0, 300.0
FRESH_S = 60.0
SKEW_S = 15 * 60.0
DEAD_S = FRESH_S + 2 * SKEW_S + 60
LONGEST_WAIT_S = DEAD_S + 60
IN_FLIGHT_S = 5.0  # what a process sent before it died has arrived by then
_log = logging.getLogger("wdsprep")
Marks = Mapping[int, str]
"""The ETags of marks by their number. No two marks are alike."""


# --- who has a lock, and how others wait for it
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


Holder = Mapping[str, Any]
"""A process that holds a lock, described so that others can tell whether it is alive.

A pid means something in its own namespace alone, and is given to other processes later. The time of
a process's start is not."""


def this_process() -> Holder:
    return {
        "machine": _machine(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _start(os.getpid()),
        "token": secrets.token_hex(8),
    }


def is_known_dead(holder: Holder) -> bool:
    """Return whether the process ran on this machine and has ended.

    It is False for a process of another machine, of which nothing is known here. Some machines
    hide the processes of other users in /proc.
    """
    pid, start = holder["pid"], _start(holder["pid"])
    if not holder["machine"] or holder["machine"] != _machine() or holder["started"] == start:
        return False
    if start:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return Path(f"/proc/{pid}").exists()


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


def _start(pid: int) -> str:
    """Return when a process started, in ticks since the boot, or "" if it has ended.

    A zombie has ended too.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


# --- locks of marks
Mark = tuple[bytes, str, float]
"""The object that marks a name as locked: its content, its ETag and its age in seconds."""


class MarkedStore(OverNetwork):
    """A store over a network that can be written to, whose locks are marks.

    Its errors are StoreErrors. Before any request it calls `refresh_locks`, and `check_locks` when
    the request is about to be sent.
    """

    def __init__(
        self, url: str, *, part_nbytes: int = PART_NBYTES, first_pause_s: float = FIRST_PAUSE_S
    ) -> None:
        place, folder = root_and_name(url)
        scheme, _, self.bucket = place.partition("://")
        if not self.bucket:
            raise UsageError(f"{url} has no bucket: give {scheme}://BUCKET/PREFIX")
        super().__init__(place, folder, first_pause_s)
        self.part_nbytes = part_nbytes
        self.clients = PerProcess(self.new_clients)
        self._held = threading.local()
        """The locks that a thread has, or is about to take, as `locks`."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        options: Any = {"part_nbytes": self.part_nbytes, "first_pause_s": self.first_pause_s}
        return partial(type(self), **options), (self.url,)

    @abstractmethod
    def new_clients(self) -> Any:
        """Return what this process speaks to the store with."""

    @abstractmethod
    def new_sink(self, name: str, *, exclusive: bool) -> PartSink:
        """Return what uploads a file. Nothing is sent before bytes are written to it."""

    @contextmanager
    def write(self, name: str, /, *, exclusive: bool = False) -> Iterator[PartSink]:
        sink = self.new_sink(name, exclusive=exclusive)
        try:
            yield sink
            if sink.failure is not None:
                raise sink.failure
            self._finish(name, sink)
        except BaseException:
            sink.abort()
            raise

    def _finish(self, name: str, sink: PartSink) -> None:
        """Let a file appear under its name.

        A repeated request may be refused because an earlier one, whose answer was lost, has made
        the file. If the object there is by this writer, that is a success.
        """
        try:
            sink.finish()
        except StoreError as error:
            if error.status == 404 or isinstance(error, ExistsError | NotFoundError):
                with suppress(StoreError):  # the refusal is the news, not this
                    if self.writer_of(name) == sink.writer:
                        sink.abort()  # of which nothing is left
                        return
            raise

    @abstractmethod
    def writer_of(self, name: str, /) -> str:
        """Return the id that the last writer of an object has left on it, or "" if none has."""

    @abstractmethod
    def list(self, prefix: str = "", /) -> Iterator[Entry]: ...

    @abstractmethod
    def read_mark(self, name: str, /) -> Mark: ...

    @abstractmethod
    def make_mark(self, name: str, data: bytes, /) -> str:
        """Create an object and return its ETag. Raise ExistsError if there is one."""

    @abstractmethod
    def delete(self, name: str, /) -> None: ...

    @contextmanager
    def hold(self, name: str, /, *, giving: Sequence[FileSink] = ()) -> Iterator[None]:
        del giving  # what is stopped in the middle of it is waited for until it counts as dead
        with self._lock(name) as lock:
            try:
                lock.begin()
                yield
            finally:
                lock.end()

    def let_go(self, name: str, /) -> None:
        with self._lock(name) as lock:
            if lock.begin_after_a_death():
                lock.end()

    @contextmanager
    def _lock(self, name: str) -> Iterator["_Lock"]:
        """Yield a lock that is yet to be taken.

        While the block lasts, `refresh_locks` and `check_locks` deal with it too, if this thread
        calls them.
        """
        lock = _Lock(self, check_name(name))
        locks: builtins.list[_Lock] = self._held.__dict__.setdefault("locks", [])
        locks.append(lock)
        try:
            yield lock
        finally:
            locks.remove(lock)

    def refresh_locks(self) -> None:
        """Renew the locks of this thread that are old. Raise BusyError if one has been lost."""
        for lock in getattr(self._held, "locks", ()):
            lock.refresh()

    def check_locks(self, **_event: object) -> None:
        """Raise BusyError if a lock of this thread is so old that it may have been lost.

        It can be a callback of botocore, whose arguments are ignored.
        """
        for lock in getattr(self._held, "locks", ()):
            lock.check()


class _Lock:
    def __init__(self, store: MarkedStore, name: str) -> None:
        self._store, self._name, self._shown = store, name, f"{store.url}/{name}"
        self._marks: Marks = {}  # while it is held, the last one is ours
        self._made_at = read_clocks()
        self._is_checked = self._is_renewed = False
        self._first_seen_dead: dict[bytes, float] = {}

    def begin(self) -> None:
        wait = Wait(self._shown, LONGEST_WAIT_S)
        while True:
            marks = self._list_marks()
            holder = next(filter(None, map(self._living_holder, marks)), "")
            if not holder and self._add(marks):
                return
            wait.pause(holder or "another run")

    def begin_after_a_death(self) -> bool:
        """Try to take over the lock of a process that died. Return whether that succeeded.

        Return False if there is no lock, or the process is not known to be dead.
        """
        marks = self._list_marks()
        if not marks or (self._living_holder(max(marks)) and not self._first_seen_dead):
            return False
        while any(map(self._living_holder, marks)):
            if self._list_marks() != marks:  # somebody else was quicker
                return False
            time.sleep(0.1)
        return self._add(marks)

    def refresh(self) -> None:
        if self._is_renewed and _since(self._made_at) > FRESH_S / 2:
            self._is_renewed = False
            older = self._marks
            if not self._add(older):
                raise self._lost_error()
            self._delete(older)
            self._marks = {number: self._marks[number] for number in self._marks.keys() - older}

    def check(self) -> None:
        if self._is_checked and _since(self._made_at) > FRESH_S:
            raise self._lost_error()

    def end(self) -> None:
        try:
            self.refresh()  # what came last may have taken long
            self._is_renewed = False
            self._delete(self._marks)
        except AccessError:  # the next hold would wait for this one
            raise
        except StoreError:
            pass

    def _lost_error(self) -> BusyError:
        return BusyError(f"{self._shown}: this process slept and may have lost its lock: run again")

    def _mark_name(self, number: int) -> str:
        return f"{self._name}.{number}" if number else self._name

    def _list_marks(self) -> Marks:
        ends = {e.name[len(self._name) :]: e.stamp for e in self._store.list(self._name)}
        return {int(end[1:] or 0): tag for end, tag in ends.items() if re.fullmatch(r"|\.\d+", end)}

    def _living_holder(self, number: int) -> str:
        """Return which process holds a lock, in words, or "" if that process is dead.

        `number` is that of the mark that it made. For IN_FLIGHT_S after its death was noticed it
        counts as alive, as requests that it sent may still arrive.
        """
        try:
            data, _, age_s = self._store.read_mark(self._mark_name(number))
        except NotFoundError:  # it has just been let go
            return "another run"
        if age_s > DEAD_S:
            return ""
        try:
            holder = json.loads(data)
            shown, is_dead = f"process {holder['pid']} on {holder['host']}", is_known_dead(holder)
        except (ValueError, TypeError, KeyError, OverflowError):  # no such mark of ours
            return "another run"
        if is_dead:
            since = self._first_seen_dead.setdefault(data, time.monotonic())
            if time.monotonic() - since >= IN_FLIGHT_S:
                return ""
        return shown

    def _add(self, marks: Marks) -> bool:
        """Create a further mark. Return whether that gives us the lock.

        It does if there are then no marks but the new one and those given. Otherwise the new mark
        is deleted again.
        """
        self._is_checked = False  # nothing that exists can be harmed by it, however late
        number, began = max(marks, default=-1) + 1, read_clocks()
        tag = self._make(number)
        self._made_at, self._is_checked = began, True
        if not tag:
            return False
        self._marks = {number: tag}
        if self._list_marks() == {**marks, number: tag}:
            self._marks = {**marks, number: tag}
            self._is_renewed = True
            return True
        self._delete(self._marks)
        self._marks = {}
        return False

    def _make(self, number: int) -> str:
        """Create the mark of a lock, and return its ETag.

        Return "" if another process has made it already, or it cannot be read.
        """
        data = json.dumps(this_process(), sort_keys=True).encode()
        try:
            return self._store.make_mark(self._mark_name(number), data)
        except ExistsError:
            # A request whose answer was lost is sent again, and then finds the mark that it made.
            with suppress(StoreError):
                content, tag, _ = self._store.read_mark(self._mark_name(number))
                return tag if content == data else ""
        return ""

    def _delete(self, marks: Marks) -> None:
        for number in sorted(marks):
            self._store.delete(self._mark_name(number))


Moment = tuple[float, float]


def read_clocks() -> Moment:
    """Return the time by two clocks.

    One clock goes on while the machine sleeps; the other is the wall clock.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)), time.time()


def _since(then: Moment) -> float:
    return max(now - before for now, before in zip(read_clocks(), then, strict=True))
