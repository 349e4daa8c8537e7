"""A worker's side: units become messages. Below that, the life of a local worker process.

A `Worker` is where the units of one worker lie, each worked on in a thread of its own or one
after the other. What concerns them all meets here: they are told to stop together, and when
one of them finds the worker broken, all are put down before the worker reports itself lost.

A local worker process opens the work once, then turns each unit into messages. It ends by itself
when its driver is gone, even in the middle of a long step, and on SIGTERM it leaves through
`SystemExit`. Whatever else ends it, such as memory that not even a thread can be had for, it tells
the driver, and ends at once: an interpreter that ends by itself waits for threads, which may wait
for ever. A worker that does one unit at a time does it in its main thread, where that alone makes
context managers remove half-written files. One that does several has each in its own thread, which
no exception reaches: they stop at their next yield. SIGINT is the driver's business: Ctrl-C reaches
both.
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
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import NoReturn, TypeAlias

from wdsprep.errors import (
    BusyError,
    FingerprintError,
    FormatError,
    NotAFileError,
    SourceError,
    UsageError,
    WdsprepError,
    WorkError,
    without_secrets,
)
from wdsprep.runners.base import (
    BrokenWorkerError,
    Call,
    Failure,
    HopelessError,
    Message,
    Unit,
    Work,
)
from wdsprep.runners.stuck_workers import FEWER, is_of_memory, report_opening

GRACE_S = 5.0
"""The seconds that a worker may clean up before it is killed."""
CLOSING_S = 1.0
"""The part of these seconds that is kept for the work's own `close`."""

OF_THE_REQUEST = (FingerprintError, FormatError, SourceError, UsageError)
"""Errors that no other place can change. Any other reason not to open may be that of this place
alone: its GPU has too little memory left, its node has no weights or reaches no hub."""

NEVER = 1_000_000
"""A threshold of the garbage collector that is never reached."""

Send: TypeAlias = Callable[[int, Message], bool]


def open_worker(load: Callable[[], Work]) -> tuple[Worker | None, Message]:
    try:
        with without_full_collections():
            call = load()()
        return Worker(call), ("ready", getattr(call, "units_at_once", 0))
    except OF_THE_REQUEST as error:
        return None, ("fatal", (_make_picklable(error), traceback.format_exc()))
    except WdsprepError as error:
        return None, _lost_at_start(_text(error), _make_picklable(error))
    except Exception as error:  # noqa: BLE001  whatever it is, the driver must hear of it
        return None, _lost_at_start(error_line(error))


@contextmanager
def without_full_collections() -> Iterator[None]:
    """Keep the garbage collector from going through all objects while the block lasts.

    Imports of `encode` make half a million objects that all stay. Going through them again and
    again while they become more is a fifth of the processor time of these imports.
    """
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, full)


def _lost_at_start(reason: str, error: WdsprepError | None = None) -> Message:
    place = place_of(os.environ)
    failure = Failure(reason=reason, trace=traceback.format_exc(), place=place, error=error)
    return "lost", failure


def place_of(environment: Mapping[str, str]) -> str:
    """Return as one text this machine and the GPUs that a worker with this environment sees."""
    gpus = environment.get("CUDA_VISIBLE_DEVICES", "")
    return socket.gethostname() + (f", GPU {gpus}" if gpus else "")


class Worker:
    """The units of one worker, and the function that does them."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._is_stopping = False
        self._lost: Message | None = None
        # A set without a lock: a lock could stay taken when SIGTERM interrupts its holder.
        self._busy: set[object] = set()

    def do(self, unit: Unit) -> Generator[Message, None, None]:
        """Do a unit and yield its messages. The last is its outcome, unless it was stopped."""
        token = object()
        outcome: Message | None = None
        try:
            self._busy.add(token)
            try:
                with closing(self._call(unit)) as steps:
                    while not (self._is_stopping or outcome):
                        try:
                            value = next(steps)
                        except StopIteration as end:
                            outcome = "done", end.value
                        else:
                            yield "progress", value
            except Exception as error:  # noqa: BLE001  a unit may raise anything: it is counted
                outcome = _message_of(error)
            if outcome and outcome[0] == "lost":
                self._lost = self._lost or outcome
                self._is_stopping = True
            elif outcome:
                yield outcome
        finally:
            self._busy.discard(token)
        if self._lost:
            self._wait_until_idle()  # once the driver hears of it, nobody gets time to clean up
            yield self._lost

    def stop(self) -> bool:
        """Close all units at their next yield, and then the work.

        Return False after 4 s if a unit is still not closed; the work is not closed then.
        """
        self._is_stopping = True
        if not self._wait_until_idle():
            return False
        if close := getattr(self._call, "close", None):
            close()
        return True

    def _wait_until_idle(self) -> bool:
        deadline = time.monotonic() + GRACE_S - CLOSING_S
        while self._busy and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self._busy


def _message_of(error: Exception) -> Message:
    """Return the message about an error of a unit that is being handled."""
    trace = traceback.format_exc()
    match error:
        case BusyError():  # whoever is in the way may not be for ever
            return "failed", Failure(reason=_text(error), trace=trace, is_of_unit=True)
        case NotAFileError():  # only this unit fails, until somebody moves it
            return "failed", Failure(reason=_text(error), trace=trace, is_hopeless=True)
        case WdsprepError():
            return "fatal", (_make_picklable(error), trace)
        case BrokenWorkerError():
            return "lost", Failure(reason=error_line(error), trace=trace)
        case HopelessError():
            reason = _text(error) or error_line(error)
            return "failed", Failure(reason=reason, trace=trace, is_hopeless=True)
    return "failed", Failure(reason=error_line(error), trace=trace)


def error_line(error: BaseException) -> str:
    if is_of_memory(error):
        return f"out of memory: {FEWER}"
    text = _text(error)
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


def _text(error: BaseException) -> str:
    return without_secrets(" ".join(str(error).split()))[:300]


def _make_picklable(error: WdsprepError) -> WdsprepError:
    """Return an error, or its message alone as a WorkError if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes
    except Exception:  # noqa: BLE001  whatever its own code raises
        return WorkError(str(error))
    return error


# --- the life of a local worker process
def main(fd: int, units_at_once: int) -> NoReturn:
    signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = _terminate_again
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the driver blocked it for us
    os.set_inheritable(fd, False)
    os.dup2(2, 1)  # stdout belongs to the driver's command
    pipe = Connection(fd)
    send = _sender(pipe)
    code = 0
    try:
        threading.Thread(target=_end_with_driver, args=(fd,), daemon=True).start()
        _serve(pipe, send, units_at_once)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:  # noqa: BLE001  whatever it is, the driver must hear of it
        _tell_end(send, error)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The work is closed by now. An interpreter that ends in the usual way takes its modules apart
    # one by one, which is a second with torch, and the driver would wait for it.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _tell_end(send: Send, error: BaseException) -> NoReturn:
    """Tell the driver why this worker ends, if there is memory to say so, and end the process."""
    try:
        lost = Failure(reason=error_line(error), trace=traceback.format_exc())
        send(0, ("lost", lost))
    finally:
        os._exit(1)


def _serve(pipe: Connection, send: Send, units_at_once: int) -> None:
    is_over = threading.Event()

    def report() -> None:
        with suppress(OSError):  # no driver any more: the main thread hears of it too
            for progress in report_opening(is_over):
                send(0, progress)

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        worker, message = open_worker(lambda: pickle.loads(pipe.recv_bytes()))  # noqa: S301
    finally:
        is_over.set()
        reporter.join()
    gc.freeze()  # or a full collection looks at all of torch: 0.2 s in which nothing runs
    send(0, message)
    if worker is None:
        return
    with _stopping(worker), _woken_by_signals() as woken:
        while True:
            wait([pipe, woken])
            order, unit = pipe.recv()
            if units_at_once == 1:
                _work(worker, send, order, unit)
            else:
                job = (worker, send, order, unit)
                threading.Thread(target=_work_aside, args=job, name=unit.name, daemon=True).start()


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


def _sender(pipe: Connection) -> Send:
    """Return a function that sends the driver a message about an order; threads may share it.

    It returns False if the message cannot be pickled: then a failure that says so was sent instead.
    """
    lock = threading.Lock()

    def send(order: int, message: Message) -> bool:
        is_sound = True
        try:
            data = pickle.dumps((order, message))
        except Exception as error:  # noqa: BLE001  pickling runs the values' own code
            failure = Failure(reason=error_line(error), trace=traceback.format_exc())
            data, is_sound = pickle.dumps((order, ("failed", failure))), False
        with lock:
            pipe.send_bytes(data)
        return is_sound

    return send


def _work(worker: Worker, send: Send, order: int, unit: Unit) -> None:
    with closing(worker.do(unit)) as messages:
        for message in messages:
            if not send(order, message):
                break


def _work_aside(worker: Worker, send: Send, order: int, unit: Unit) -> None:
    try:
        with suppress(OSError):  # no driver any more: the main thread hears of it too
            _work(worker, send, order, unit)
    except SystemExit:  # it would end the thread alone, and the unit never
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException as error:  # noqa: BLE001  it too would end the thread alone
        _tell_end(send, error)


def _terminate(_signum: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # cleaning up is not interrupted again
    raise SystemExit(128 + signal.SIGTERM)


def _terminate_again(lost: sys.UnraisableHookArgs) -> None:
    """End this worker a moment later if Python has dropped its end, as `wdsprep.__main__` says."""
    if issubclass(lost.exc_type, SystemExit):
        signal.signal(signal.SIGTERM, _terminate)
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGTERM]).start()
    else:
        sys.__unraisablehook__(lost)


def _end_with_driver(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, 0)  # nothing but the hang-up
    poll.poll()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)
