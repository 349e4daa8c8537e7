"""SIGKILL at every operation of a writing process, locally and on S3: never half a file.

A child does four writes and kills itself before its n-th operation, for every n until one child
gets through. An operation is a system call (locally; a write may be cut in two), half a request
sent, or an answer received (S3). The children fork from a server that has imported everything.
"""

import contextlib
import fcntl
import itertools
import multiprocessing
import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from wdsprep.errors import ExistsError
from wdsprep.store import Store, write_bytes
from wdsprep.store.local import LocalStore
from wdsprep.store.s3 import S3Store

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["boto3", "test_store_kills"])
MIB = 1 << 20
OLD = b"old" * 1000
FINAL = {
    "a/small": b"small",
    "big": random.Random(0).randbytes(5 * MIB + 7),
    "once": b"once" * 999,
    "taken": b"new" * 2000,
}


def write_all(store: Store) -> None:
    for name, data in FINAL.items():
        with contextlib.suppress(ExistsError):
            write_bytes(store, name, data, exclusive=name == "once")


class Countdown:
    """Kills this process when it is called for the n-th time."""

    def __init__(self, n: int) -> None:
        self._calls, self._n, self._lock = 0, n, threading.Lock()

    def __call__(self, *_: object, **__: object) -> None:
        with self._lock:
            self._calls += 1
            if self._calls == self._n:
                os.kill(os.getpid(), signal.SIGKILL)

    def before(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self()
            return act(*args, **kwargs)

        return counted


def die_locally(root: str, n: int) -> None:
    tick, write_some = Countdown(n), os.write
    for owner, name in [
        (os, "open"),
        (os, "fsync"),
        (os, "link"),
        (os, "close"),
        (fcntl, "flock"),
        (Path, "mkdir"),
        (Path, "replace"),
        (Path, "unlink"),
    ]:
        setattr(owner, name, tick.before(getattr(owner, name)))
    half = tick.before(lambda fd, data: write_some(fd, data[: max(len(data) // 2, 4096)]))
    os.write = half
    write_all(LocalStore(root))


def die_on_s3(url: str, env: Mapping[str, str], n: int) -> None:
    os.environ.update(env)
    store = S3Store(url, part_nbytes=5 * MIB, first_pause_s=0.01)
    tick, send = Countdown(n), socket.socket.sendall

    def send_in_halves(self: socket.socket, data: bytes, *flags: int) -> None:
        tick()
        middle = len(data) // 2
        send(self, data[:middle], *flags)
        tick()
        send(self, data[middle:], *flags)

    store.client.meta.events.register("response-received.s3", tick)
    socket.socket.sendall = send_in_halves  # type: ignore[assignment,method-assign]
    write_all(store)
    tick()


def survives(die: Callable[..., None], *args: object) -> bool:
    """Whether a child that does this gets through; the alternative is its SIGKILL."""
    child = FORKING.Process(target=die, args=args)
    child.start()
    child.join()
    code = child.exitcode
    child.close()
    assert code in (0, -signal.SIGKILL)
    return code == 0


def check_nothing_partial(store: Store, n: int) -> None:
    listed = [entry.name for entry in store.list()]
    assert listed == sorted(set(listed)), n
    assert {"taken"} <= set(listed) <= set(FINAL), n
    for name in listed:
        whole = (FINAL[name], OLD) if name == "taken" else (FINAL[name],)
        assert store.read(name) in whole, (name, n)


def check_everything_there(store: Store) -> None:
    assert {entry.name: store.read(entry.name) for entry in store.list()} == FINAL


def files_of(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_local_writer_killed_at_any_operation_leaves_no_partial_file(tmp_path: Path) -> None:
    leftovers = 0
    for n in itertools.count(1):
        store = LocalStore(tmp_path / str(n))
        write_bytes(store, "taken", OLD)
        if survives(die_locally, store.url, n):
            break
        check_nothing_partial(store, n)
        write_all(store)
        check_everything_there(store)
        leftovers += store.sweep()
        assert files_of(store.root) == sorted(FINAL), n
        check_everything_there(store)
    check_everything_there(store)
    assert files_of(store.root) == sorted(FINAL)
    assert n > 40
    assert leftovers > 20


def test_s3_writer_killed_at_any_operation_leaves_no_partial_file(
    bucket: str, s3_env: dict[str, str]
) -> None:
    env = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    assert s3_env.items() <= env.items()
    root = S3Store(f"s3://{bucket}", first_pause_s=0.01)
    leftovers = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(root))
        for n in itertools.count(1):
            store = S3Store(f"{root.url}/{n}", part_nbytes=5 * MIB, first_pause_s=0.01)
            stack.enter_context(contextlib.closing(store))
            write_bytes(store, "taken", OLD)
            if survives(die_on_s3, store.url, env, n):
                break
            check_nothing_partial(store, n)
            assert root.sweep() == 0  # too young: their writer may be alive
            write_all(store)
            leftovers += root.abort_uploads(lambda _: True)
            assert root.abort_uploads(lambda _: True) == 0
            check_everything_there(store)
        check_everything_there(store)
    assert n > 20
    assert leftovers > 5
