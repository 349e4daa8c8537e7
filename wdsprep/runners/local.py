"""Workers as processes on this machine.

Each is a fresh interpreter over a socket pair, not a fork (unsafe beside threads) and not
multiprocessing's spawn (which imports the user's `__main__` again). It gets the driver's
`sys.path`, whole and from the start, so the current folder never shadows a module.

Where GPUs are named, a slot keeps its GPU from one worker to the next.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from wdsprep.cpus import usable_cpus
from wdsprep.errors import WorkError
from wdsprep.runners.base import Event, RunnerSettings, Unit, Work
from wdsprep.runners.schedule import Fatal, Lost, Opening, SlotMessage, drive
from wdsprep.runners.stuck_workers import (
    LOOK_S,
    ONE_BLAS_THREAD,
    PATIENCE_S,
    KillsCounted,
    Watch,
    reason_of_end,
)
from wdsprep.runners.worker import GRACE_S, place_of
from wdsprep.runners.worker_versions import installed, refusal
from wdsprep.version import __version__

_log = logging.getLogger("wdsprep")


@functools.cache
def _worker_program() -> str:
    """Return the Python source that a worker process runs, by `python -c`.

    The source compares the installed version with the driver's first: a driver may have run for
    days, and the package may have been upgraded meanwhile.
    """
    return f"""{inspect.getsource(installed)}
import sys; fd, units_at_once, version, *sys.path = sys.argv[1:]
if (there := installed())[0] != version:
    from multiprocessing.connection import Connection
    sys.exit(Connection(int(fd)).send((0, there)))
from wdsprep.runners.local_worker import main; main(int(fd), int(units_at_once))"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalRunner:
    """A runner of processes: one for each of `gpus`, or else one for each core, by default."""

    settings: RunnerSettings
    patience_s: float = PATIENCE_S
    opening_patience_s: float = PATIENCE_S

    def run(self, work: Work, units: Iterable[Unit]) -> Generator[Event, None, None]:
        return drive(
            _Processes(self, work),
            units,
            workers=self.settings.workers or len(self.settings.gpus) or usable_cpus(),
            max_attempts=self.settings.max_attempts,
            units_per_worker=self.settings.units_per_worker,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Connection


class _Processes:
    def __init__(self, runner: LocalRunner, work: Work) -> None:
        self._settings = runner.settings
        self._work = pickle.dumps(work)
        self._workers: dict[int, _Worker] = {}
        self._slots: dict[Connection, int] = {}
        self._news: list[SlotMessage] = []
        """Messages that workers which are started open, or could not be started."""
        self._watch = Watch(runner.patience_s, runner.opening_patience_s)
        self._kills = KillsCounted()

    def start(self, slot: int) -> None:
        # The child inherits the mask: Ctrl-C cannot hit it before it ignores SIGINT, nor
        # can it hit us between the start of a worker and the note of it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            worker = _spawn(self._settings.units_per_worker, self._environment(slot))
            self._workers[slot] = worker
            self._slots[worker.pipe] = slot
        except (OSError, MemoryError) as error:
            reason = f"a worker process could not be started: {error or 'out of memory'}"
            lost = Lost(reason=reason, place=self._place(slot), error=WorkError(reason))
            self._news.append((slot, 0, lost))
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._news.append((slot, 0, Opening()))
        _send(worker.pipe, self._work)

    def _environment(self, slot: int) -> dict[str, str]:
        gpus = self._settings.gpus
        visible = {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {}
        return {**ONE_BLAS_THREAD, **os.environ, **visible}

    def _place(self, slot: int) -> str:
        return place_of(self._environment(slot))

    def give(self, slot: int, order: int, unit: Unit) -> None:
        self._watch.given(slot, order)
        _send(self._workers[slot].pipe, pickle.dumps((order, unit)))

    def end(self, slot: int) -> None:
        self._bury(slot)
        self._watch.heard(slot, 0, Lost(reason="its place is broken"))

    def hear(self) -> Iterable[SlotMessage]:
        news, self._news = self._news, []
        for slot, order, message in news:
            self._watch.heard(slot, order, message)
            yield slot, order, message
        for pipe in wait(list(self._slots), 0 if news else LOOK_S):
            assert isinstance(pipe, Connection)  # noqa: S101  for mypy: we wait for nothing else
            slot = self._slots[pipe]
            try:
                order, message = pipe.recv()
                if isinstance(message, tuple):  # what a worker finds instead of our version
                    remedy = "run again, with what is installed now: it goes on from there"
                    error = WorkError(refusal("a worker process", message, __version__, remedy))
                    message = Fatal(error=error, trace="")
            except (EOFError, OSError):
                reason = reason_of_end(self._bury(slot), self._kills)
                order, message = 0, Lost(reason=reason, place=self._place(slot))
            else:
                if isinstance(message, Lost):
                    self._bury(slot)
            self._watch.heard(slot, order, message)
            yield slot, order, message
        for slot, lost in self._watch.overdue():
            self._workers[slot].process.kill()
            self._bury(slot)
            self._watch.heard(slot, 0, lost)
            yield slot, 0, replace(lost, place=self._place(slot))

    def _bury(self, slot: int) -> int:
        worker = self._workers.pop(slot)
        del self._slots[worker.pipe]
        _end([worker])
        return worker.process.returncode

    def stop(self) -> None:
        workers = list(self._workers.values())
        self._workers.clear()
        self._slots.clear()
        for worker in workers:
            worker.process.terminate()
        _end(workers)


def _spawn(units_at_once: int, environment: dict[str, str]) -> _Worker:
    ours, theirs = socket.socketpair()
    path = [entry or str(Path.cwd()) for entry in sys.path]
    arguments = [str(theirs.fileno()), str(units_at_once), __version__, *path]
    with ours, theirs:
        process = subprocess.Popen(  # noqa: S603  our own interpreter and module
            [sys.executable, "-c", _worker_program(), *arguments],
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=[theirs.fileno()],
        )
        return _Worker(process=process, pipe=Connection(ours.detach()))


def _send(pipe: Connection, data: bytes) -> None:
    try:
        pipe.send_bytes(data)
    except (BrokenPipeError, ConnectionResetError):
        return  # its death is heard of by the end of its stream


def _end(workers: list[_Worker]) -> None:
    """End workers: close their pipes, wait up to 5 s for all, and kill those that still run."""
    deadline = time.monotonic() + GRACE_S
    for worker in workers:
        worker.pipe.close()  # an idle worker leaves on this alone
    try:
        for worker in workers:
            worker.process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            _reap(worker.process)


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that was killed. After 5 s log a warning, and take the process as ended.

    A process that waits in the kernel for a lost device or disk cannot be killed.
    """
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.returncode = -signal.SIGKILL
        _log.warning("process %d cannot be killed: it waits for a device or a disk", process.pid)
