"""SIGKILL at every operation of a writing process, locally and on S3: never half a file.

A child does four writes and kills itself before its n-th operation, for every n until one child
gets through. An operation is a system call (locally; a write is cut in two), or half of a
request's header or body sent, or an answer received (S3). The children fork from a server that
has imported everything.
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

import pytest

from tests.kit.s3 import s3_client
from wdsprep.errors import ExistsError
from wdsprep.store.base import Store, write_bytes
from wdsprep.store.local import LocalStore
from wdsprep.store.s3.s3_store import S3Store

pytestmark = pytest.mark.system

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["boto3", "tests.store.test_kills"])
MIB = 1 << 20
BLOCK_NBYTES = 128 * 1024  # how boto3 sends a body; one block in ten is cut
OLD = b"old" * 1000
FINAL = {
    "a/small": b"small",
    "big": random.Random(0).randbytes(5 * MIB + 7),
    "once": b"once" * 999,
    "taken": b"new" * 2000,
}


Files = dict[str, bytes]


def below(prefix: str, big_nbytes: int) -> Files:
    return {prefix + name: data[:big_nbytes] for name, data in FINAL.items()}


def write_all(store: Store, files: Files) -> None:
    for name, data in files.items():
        with contextlib.suppress(ExistsError):
            write_bytes(store, name, data, exclusive=name.endswith("once"))


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


def die_locally(root: str, files: Files, n: int) -> None:
    tick, writev = Countdown(n), os.writev
    for owner, name in [
        (os, "open"),
        (os, "write"),
        (os, "fsync"),
        (os, "link"),
        (os, "close"),
        (fcntl, "flock"),
        (Path, "mkdir"),
        (Path, "replace"),
        (Path, "unlink"),
    ]:
        setattr(owner, name, tick.before(getattr(owner, name)))
    os.writev = tick.before(lambda fd, pieces: writev(fd, [_half(b"".join(pieces))]))
    write_all(LocalStore(root), files)


def _half(data: bytes) -> bytes:
    return data[: max(len(data) // 2, 65536)]


def die_on_s3(url: str, env: Mapping[str, str], files: Files, n: int) -> None:
    os.environ.update(env)
    store = S3Store(url, part_nbytes=5 * MIB, first_pause_s=0.001)
    tick, send, blocks = Countdown(n), socket.socket.sendall, itertools.count()

    def send_in_halves(self: socket.socket, data: bytes, *flags: int) -> None:
        middle = len(data) // 2
        send(self, data[:middle], *flags)
        if len(data) < BLOCK_NBYTES or next(blocks) % 10 == 0:
            tick()
        send(self, data[middle:], *flags)

    store.client.meta.events.register("response-received.s3", tick)
    socket.socket.sendall = send_in_halves  # type: ignore[assignment,method-assign]
    write_all(store, files)


def survives(die: Callable[..., None], *args: object) -> bool:
    """Whether a child that does this gets through; the alternative is its SIGKILL."""
    child = FORKING.Process(target=die, args=args)
    child.start()
    child.join()
    code = child.exitcode
    child.close()
    assert code in (0, -signal.SIGKILL)
    return code == 0


def check_nothing_partial(store: Store, prefix: str, files: Files) -> None:
    listed = [entry.name for entry in store.list(prefix)]
    assert {f"{prefix}taken"} <= set(listed) <= set(files)
    for name in listed:
        whole = (files[name], OLD) if name.endswith("taken") else (files[name],)
        assert store.read(name) in whole, name


def check_everything_there(store: Store, prefix: str, files: Files) -> None:
    assert {entry.name: store.read(entry.name) for entry in store.list(prefix)} == files


def files_of(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_local_writer_killed_at_any_operation_leaves_no_partial_file(tmp_path: Path) -> None:
    leftovers, files = 0, below("", MIB)
    for n in itertools.count(1):
        store = LocalStore(tmp_path / str(n))
        write_bytes(store, "taken", OLD)
        if survives(die_locally, store.url, files, n):
            break
        check_nothing_partial(store, "", files)
        write_all(store, files)
        check_everything_there(store, "", files)
        leftovers += store.sweep()[0]
        assert files_of(store.root) == set(files), n
        check_everything_there(store, "", files)
    assert files_of(store.root) == set(files)
    check_everything_there(store, "", files)
    assert n > 40
    assert leftovers > 20


def test_s3_writer_killed_at_any_operation_leaves_no_partial_file(bucket: str) -> None:
    env = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    leftovers = unknown = 0
    store = S3Store(f"s3://{bucket}/data", part_nbytes=5 * MIB, first_pause_s=0.001)
    with contextlib.closing(store):
        for n in itertools.count(1):
            prefix = f"{n:03}/"
            files = below(prefix, 6 * MIB)
            write_bytes(store, f"{prefix}taken", OLD)
            if survives(die_on_s3, store.url, env, files, n):
                break
            check_nothing_partial(store, prefix, files)
            write_all(store, files)
            leftovers += store.sweep()[0]
            unknown += abort_uploads(bucket)
            check_everything_there(store, prefix, files)
        check_everything_there(store, prefix, files)
    assert n > 20
    assert leftovers > 5
    assert unknown <= 1  # the one whose writer was killed before it learned of its upload


def abort_uploads(bucket: str) -> int:
    with s3_client() as client:
        found = client.list_multipart_uploads(Bucket=bucket).get("Uploads", ())
        for each in found:
            upload = {"Key": each["Key"], "UploadId": each["UploadId"]}
            client.abort_multipart_upload(Bucket=bucket, **upload)
        return len(found)
