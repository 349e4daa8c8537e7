"""The worker's side: open the work once, then turn each unit into messages.

`main` is the life of a local worker process. It ends by itself when its driver is gone, even
in the middle of a long step, and on SIGTERM it leaves through `SystemExit`, so that context
managers remove half-written files. SIGINT is the driver's business: Ctrl-C reaches both.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from wdsprep.errors import WdsprepError, WorkError
from wdsprep.runners import Unit, Work
from wdsprep.runners.queue import Done, Failed, Fatal, Lost, Message, Progress, Ready

GRACE_S = 5.0
"""How long a worker may clean up before it is killed."""

Call: TypeAlias = Callable[[Any], Generator[Any, None, Any]]


def open_work(load: Callable[[], Work]) -> tuple[Call | None, Message]:
    try:
        return load().open(), Ready()
    except WdsprepError as error:
        return None, _fatal(error)
    except Exception as error:  # noqa: BLE001  whatever it is, the driver must hear of it
        return None, Lost(reason=one_line(error), trace=traceback.format_exc())


def attempt(call: Call, unit: Unit) -> Generator[Message, None, None]:
    """Do one unit; the last message is the outcome."""
    try:
        with closing(call(unit)) as steps:
            while True:
                try:
                    value = next(steps)
                except StopIteration as end:
                    result = end.value
                    break
                yield Progress(value=value)
    except WdsprepError as error:
        yield _fatal(error)
    except Exception as error:  # noqa: BLE001  a unit may raise anything: it is counted
        yield Failed(reason=one_line(error), trace=traceback.format_exc())
    else:
        yield Done(result=result)


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


def _fatal(error: WdsprepError) -> Fatal:
    trace = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes
    except Exception:  # noqa: BLE001  an error that cannot travel still has a message
        error = WorkError(str(error))
    return Fatal(error=error, trace=trace)


def main(fd: int) -> None:
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the driver blocked it for us
    os.set_inheritable(fd, False)
    os.dup2(2, 1)  # stdout belongs to the driver's command
    threading.Thread(target=_end_with_driver, args=(fd,), daemon=True).start()
    try:
        with Connection(fd) as driver:
            _serve(driver)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _serve(driver: Connection) -> None:
    call, message = open_work(lambda: pickle.loads(driver.recv_bytes()))  # noqa: S301
    driver.send(message)
    while call is not None:
        unit = driver.recv()
        with closing(attempt(call, unit)) as messages:
            for message in messages:
                if not _send(driver, message):
                    break


def _send(driver: Connection, message: Message) -> bool:
    """False if the message could not be pickled, and the unit failed by that."""
    try:
        data = pickle.dumps(message)
    except Exception as error:  # noqa: BLE001  pickling runs the values' own code
        trace = traceback.format_exc()
        driver.send(Failed(reason=one_line(error), trace=trace))
        return False
    driver.send_bytes(data)
    return True


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
