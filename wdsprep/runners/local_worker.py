"""The life of a local worker process: open the work once, then turn each unit into messages.

It ends by itself when its driver is gone, even in the middle of a long step, and on SIGTERM it
leaves through `SystemExit`. Whatever else ends it, such as memory that not even a thread can be had
for, it tells the driver, and ends at once: an interpreter that ends by itself waits for threads,
which may wait for ever. A worker that does one unit at a time does it in its main thread,
where that alone makes context managers remove half-written files. One that does several has
each in its own thread, which no exception reaches: they stop at their next yield. SIGINT is
the driver's business: Ctrl-C reaches both.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import NoReturn

from wdsprep.runners.base import Unit
from wdsprep.runners.schedule import Failed, Lost, Message
from wdsprep.runners.stuck_workers import report_opening
from wdsprep.runners.worker import GRACE_S, Worker, error_line, open_worker


def main(fd: int, units_at_once: int) -> NoReturn:
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the driver blocked it for us
    os.set_inheritable(fd, False)
    os.dup2(2, 1)  # stdout belongs to the driver's command
    channel = _Channel(Connection(fd))
    code = 0
    try:
        threading.Thread(target=_end_with_driver, args=(fd,), daemon=True).start()
        _serve(channel, units_at_once)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:  # noqa: BLE001  whatever it is, the driver must hear of it
        _tell_end(channel, error)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _exit_now(code)


def _tell_end(channel: _Channel, error: BaseException) -> NoReturn:
    """Tell the driver why this worker ends, if there is memory to say so, and end the process."""
    try:
        channel.send(0, Lost(reason=error_line(error), trace=traceback.format_exc()))
    finally:
        os._exit(1)


def _exit_now(code: int) -> NoReturn:
    """End the process at once.

    The work is closed by now. An interpreter that ends in the usual way takes its modules apart
    one by one, which is a second with torch, and the driver would wait for it.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(channel: _Channel, units_at_once: int) -> None:
    pipe = channel.pipe
    with _reporting(channel):
        worker, message = open_worker(lambda: pickle.loads(pipe.recv_bytes()))  # noqa: S301
    gc.freeze()  # or a full collection looks at all of torch: 0.2 s in which nothing runs
    channel.send(0, message)
    if worker is None:
        return
    with _stopping(worker), _woken_by_signals() as woken:
        while True:
            wait([pipe, woken])
            order, unit = pipe.recv()
            if units_at_once == 1:
                _work(worker, channel, order, unit)
            else:
                job = (worker, channel, order, unit)
                threading.Thread(target=_work_aside, args=job, name=unit.name, daemon=True).start()


@contextmanager
def _reporting(channel: _Channel) -> Iterator[None]:
    """Tell the driver of progress while the block, which opens the work, lasts."""
    is_over = threading.Event()

    def report() -> None:
        with suppress(OSError):  # no driver any more: the main thread hears of it too
            for message in report_opening(is_over):
                channel.send(0, message)

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        is_over.set()
        reporter.join()


@contextmanager
def _woken_by_signals() -> Iterator[socket.socket]:
    """Yield a socket that becomes readable when a signal arrives.

    A handler of signals runs in this thread, and only when it is awake. A bare `recv` would
    sleep on where a signal comes just before it, or to another thread.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno())
        try:
            yield ours
        finally:
            signal.set_wakeup_fd(-1)


@contextmanager
def _stopping(worker: Worker) -> Iterator[None]:
    """Stop the units of a worker and close its work, however the block ends.

    If units do not stop in time, the process ends at once. SIGTERM raises once at most, so if it
    comes while this cleans up, it hits the inner `finally`.
    """
    try:
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    finally:
        signal.alarm(round(GRACE_S))  # kills us, should a `close` hang
        if not worker.stop():
            os._exit(128 + signal.SIGTERM)  # an orderly end would trip over running threads


class _Channel:
    """The pipe to the driver, which takes one message at a time."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self._lock = threading.Lock()

    def send(self, order: int, message: Message) -> bool:
        """Send a message to the driver.

        Return False if it cannot be pickled: then a `Failed` that says so was sent instead.
        """
        is_sound = True
        try:
            data = pickle.dumps((order, message))
        except Exception as error:  # noqa: BLE001  pickling runs the values' own code
            failed = Failed(reason=error_line(error), trace=traceback.format_exc())
            data, is_sound = pickle.dumps((order, failed)), False
        with self._lock:
            self.pipe.send_bytes(data)
        return is_sound


def _work(worker: Worker, channel: _Channel, order: int, unit: Unit) -> None:
    with closing(worker.do(unit)) as messages:
        for message in messages:
            if not channel.send(order, message):
                break


def _work_aside(worker: Worker, channel: _Channel, order: int, unit: Unit) -> None:
    try:
        with suppress(OSError):  # no driver any more: the main thread hears of it too
            _work(worker, channel, order, unit)
    except SystemExit:  # it would end the thread alone, and the unit never
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException as error:  # noqa: BLE001  it too would end the thread alone
        _tell_end(channel, error)


def _terminate(_signum: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # cleaning up is not interrupted again
    raise SystemExit(128 + signal.SIGTERM)


def _end_with_driver(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, 0)  # nothing but the hang-up
    poll.poll()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)
