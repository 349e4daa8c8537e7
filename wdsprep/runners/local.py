"""Workers as processes on this machine.

Each is a fresh interpreter over a socket pair, not a fork (unsafe beside threads) and not
multiprocessing's spawn (which imports the user's `__main__` again). It gets the driver's
`sys.path`, whole and from the start, so the current folder never shadows a module.

Where GPUs are named, a slot keeps its GPU from one worker to the next.
"""

from __future__ import annotations

import inspect
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeAlias, cast

from wdsprep.cpus import usable_cpus
from wdsprep.errors import WorkError
from wdsprep.runners.base import Event, Failure, RunnerSettings, SlotMessage, Unit, Work
from wdsprep.runners.schedule import drive
from wdsprep.runners.stuck_workers import LOOK_S, ONE_BLAS_THREAD, count_kills, reason_of_end
from wdsprep.runners.worker import GRACE_S, place_of
from wdsprep.runners.worker_versions import installed, refusal
from wdsprep.version import __version__

_log = logging.getLogger("wdsprep")
OTHER_VERSION = "other version"
"""The kind of message in which a worker tells of a version that is not the driver's."""


PROGRAM = f"""{inspect.getsource(installed)}
import sys; fd, units_at_once, version, *sys.path = sys.argv[1:]
if (there := installed())[0] != version:
    from multiprocessing.connection import Connection
    sys.exit(Connection(int(fd)).send((0, ({OTHER_VERSION!r}, there))))
from wdsprep.runners.worker import main; main(int(fd), int(units_at_once))"""
"""The Python source that a worker process runs, by `python -c`. It compares the installed version
with the driver's first: a driver may have run for days, and the package may have been upgraded
meanwhile."""


_Worker: TypeAlias = tuple["subprocess.Popen[bytes]", Connection]


class LocalRunner:
    """A runner of processes: one for each of its GPUs, or else one for each core, by default."""

    def __init__(self, settings: RunnerSettings) -> None:
        self.settings = settings
        self._work = b""
        self._workers: dict[int, _Worker] = {}
        self._news: list[SlotMessage] = []
        """Messages that workers which are started open, or could not be started."""
        self._reason_of_kill = count_kills()

    def run(self, work: Work, units: Iterable[Unit]) -> Generator[Event, None, None]:
        self._work = pickle.dumps(work)
        settings = self.settings
        workers = settings.workers or len(settings.gpus) or usable_cpus()
        return drive(self, units, settings, workers=workers)

    def start(self, slot: int) -> None:
        # The child inherits the mask: Ctrl-C cannot hit it before it ignores SIGINT, nor
        # can it hit us between the start of a worker and the note of it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            worker = _spawn(self.settings.units_per_worker, self._environment(slot))
            self._workers[slot] = worker
        except (OSError, MemoryError) as error:
            reason = f"a worker process could not be started: {error or 'out of memory'}"
            lost = Failure(reason=reason, place=self._place(slot), error=WorkError(reason))
            self._news.append((slot, 0, ("lost", lost)))
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._news.append((slot, 0, ("opening", None)))
        _send(worker[1], self._work)

    def _environment(self, slot: int) -> dict[str, str]:
        gpus = self.settings.gpus
        visible = {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {}
        return {**ONE_BLAS_THREAD, **os.environ, **visible}

    def _place(self, slot: int) -> str:
        return place_of(self._environment(slot))

    def give(self, slot: int, order: int, unit: Unit) -> None:
        _send(self._workers[slot][1], pickle.dumps((order, unit)))

    def end(self, slot: int, *, is_stuck: bool = False) -> str:
        if is_stuck:
            self._workers[slot][0].kill()
        self._forget(slot)
        return self._place(slot)

    def hear(self) -> Iterator[SlotMessage]:
        news, self._news = self._news, []
        yield from news
        slots = {pipe: slot for slot, (_, pipe) in self._workers.items()}
        for pipe in cast("list[Connection]", wait(slots, 0 if news else LOOK_S)):
            slot = slots[pipe]
            try:
                order, message = pipe.recv()
            except (EOFError, OSError):
                reason = reason_of_end(self._forget(slot), self._reason_of_kill)
                order, message = 0, ("lost", Failure(reason=reason, place=self._place(slot)))
            else:
                if message[0] == "lost":
                    self._forget(slot)
                elif message[0] == OTHER_VERSION:
                    remedy = "run again, with what is installed now: it goes on from there"
                    error = WorkError(refusal("a worker process", message[1], __version__, remedy))
                    message = "fatal", (error, "")
            yield slot, order, message

    def _forget(self, slot: int) -> int:
        """End the process of a slot, and return its exit code."""
        worker = self._workers.pop(slot)
        _end([worker])
        return worker[0].returncode

    def stop(self) -> None:
        workers = list(self._workers.values())
        self._workers.clear()
        for process, _ in workers:
            process.terminate()
        _end(workers)


def _spawn(units_at_once: int, environment: dict[str, str]) -> _Worker:
    ours, theirs = socket.socketpair()
    path = [entry or str(Path.cwd()) for entry in sys.path]
    arguments = [str(theirs.fileno()), str(units_at_once), __version__, *path]
    with ours, theirs:
        process = subprocess.Popen(  # noqa: S603  our own interpreter and module
            [sys.executable, "-c", PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=[theirs.fileno()],
        )
        return process, Connection(ours.detach())


def _send(pipe: Connection, data: bytes) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # its stream tells of its death
        pipe.send_bytes(data)


def _end(workers: list[_Worker]) -> None:
    """End workers: close their pipes, wait up to 5 s for all, and kill those that still run."""
    deadline = time.monotonic() + GRACE_S
    for _, pipe in workers:
        pipe.close()  # an idle worker leaves on this alone
    try:
        for process, _ in workers:
            process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process, _ in workers:
            process.kill()
        for process, _ in workers:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:  # in the kernel, for a lost device or disk
                process.returncode = -signal.SIGKILL
                what = "process %d cannot be killed: it waits for a device or a disk"
                _log.warning(what, process.pid)
