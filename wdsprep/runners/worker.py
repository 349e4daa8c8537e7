"""A worker's side that both kinds of worker share: units become messages.

A `Worker` is where the units of one worker lie, each worked on in a thread of its own or one
after the other. What concerns them all meets here: they are told to stop together, and when
one of them finds the worker broken, all are put down before the worker reports itself lost.
"""

from __future__ import annotations

import gc
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, TypeAlias

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
from wdsprep.runners.base import BrokenWorkerError, HopelessError, Unit, Work
from wdsprep.runners.schedule import Done, Failed, Fatal, Lost, Message, Ready, UnitProgress
from wdsprep.runners.stuck_workers import FEWER, is_of_memory

GRACE_S = 5.0
"""The seconds that a worker may clean up before it is killed."""
CLOSING_S = 1.0
"""The part of these seconds that is kept for the work's own `close`."""

OF_THE_REQUEST = (FingerprintError, FormatError, SourceError, UsageError)
"""Errors that no other place can change. Any other reason not to open may be that of this place
alone: its GPU has too little memory left, its node has no weights or reaches no hub."""

NEVER = 1_000_000
"""A threshold of the garbage collector that is never reached."""

Call: TypeAlias = Callable[[Any], Generator[Any, None, Any]]


def open_worker(load: Callable[[], Work]) -> tuple[Worker | None, Message]:
    try:
        with without_full_collections():
            call = load().open()
        return Worker(call), Ready(units=getattr(call, "units_at_once", 0))
    except OF_THE_REQUEST as error:
        return None, Fatal(error=_make_picklable(error), trace=traceback.format_exc())
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


def _lost_at_start(reason: str, error: WdsprepError | None = None) -> Lost:
    place = place_of(os.environ)
    return Lost(reason=reason, trace=traceback.format_exc(), place=place, error=error)


def place_of(environment: Mapping[str, str]) -> str:
    """Return the name of this machine, and the GPUs that a worker with this environment sees."""
    gpus = environment.get("CUDA_VISIBLE_DEVICES", "")
    return socket.gethostname() + (f", GPU {gpus}" if gpus else "")


class Worker:
    def __init__(self, call: Call) -> None:
        self._call = call
        self._is_stopping = False
        self._lost: Lost | None = None
        # A set without a lock: a lock could stay taken when SIGTERM interrupts its holder.
        self._busy: set[object] = set()

    def do(self, unit: Unit) -> Generator[Message, None, None]:
        """Do a unit and yield its messages. The last is its outcome, unless it was stopped."""
        token = object()
        try:
            self._busy.add(token)
            with closing(self._attempt(unit)) as messages:
                for message in messages:
                    if isinstance(message, Lost):
                        self._lost = self._lost or message
                        self._is_stopping = True
                    else:
                        yield message
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

    def _attempt(self, unit: Unit) -> Generator[Message, None, None]:
        try:
            with closing(self._call(unit)) as steps:
                while not self._is_stopping:
                    try:
                        value = next(steps)
                    except StopIteration as end:
                        result = end.value
                        break
                    yield UnitProgress(value=value)
                else:
                    return
        except BusyError as error:  # whoever is in the way may not be for ever
            yield Failed(reason=_text(error), trace=traceback.format_exc(), is_of_unit=True)
        except NotAFileError as error:  # only this unit fails, until somebody moves it
            yield Failed(reason=_text(error), trace=traceback.format_exc(), is_hopeless=True)
        except WdsprepError as error:
            yield Fatal(error=_make_picklable(error), trace=traceback.format_exc())
        except BrokenWorkerError as error:
            yield Lost(reason=error_line(error), trace=traceback.format_exc())
        except HopelessError as error:
            reason = _text(error) or error_line(error)
            yield Failed(reason=reason, trace=traceback.format_exc(), is_hopeless=True)
        except Exception as error:  # noqa: BLE001  a unit may raise anything: it is counted
            yield Failed(reason=error_line(error), trace=traceback.format_exc())
        else:
            yield Done(result=result)


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
