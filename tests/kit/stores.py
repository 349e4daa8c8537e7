"""What writers do in tests of stores, the one line that an error is, and what was read."""

import contextlib
import multiprocessing
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.s3 import s3_client
from wdsprep.store.base import Entry, Store
from wdsprep.store.local import LocalStore
from wdsprep.store.remote import OverNetwork
from wdsprep.store.s3.s3_store import S3Store


def break_off(store: Store, error: BaseException, *, exclusive: bool = False) -> None:
    with store.write("f", exclusive=exclusive) as sink:
        sink.write(b"half")
        raise error


@contextlib.contextmanager
def one_line_error(kind: type[Exception], *parts: str) -> "Iterator[pytest.ExceptionInfo[Any]]":
    """Expect an error of just this kind, in one line that says all these parts."""
    with pytest.raises(kind) as caught:
        yield caught
    assert type(caught.value) is kind
    text = str(caught.value)
    assert "\n" not in text
    assert [part for part in parts if part not in text] == [], text


def names(store: Store, prefix: str = "") -> list[str]:
    return [entry.name for entry in store.list(prefix)]


class Far(OverNetwork):
    """A folder as a store that is not local, which notes the name, start and size of each read."""

    url = "s3://far/data"

    def __init__(self, root: Path) -> None:
        self._store = LocalStore(root)
        self.asked: list[tuple[str, int, int]] = []

    def list(self, prefix: str = "") -> Iterator[Entry]:
        return self._store.list(prefix)

    def read(self, name: str, *, start: int = 0, nbytes: int | None = None) -> bytes:
        data = self._store.read(name, start=start, nbytes=nbytes)
        self.asked.append((name, start, len(data)))
        return data


def note_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None, int]]:
    """Return the name of each local read from now on, how much was asked for, and how much came."""
    noted: list[tuple[str, int | None, int]] = []
    real = LocalStore.read

    def read(store: LocalStore, name: str, /, **part: Any) -> bytes:
        data = real(store, name, **part)
        noted.append((name, part.get("nbytes"), len(data)))
        return data

    monkeypatch.setattr(LocalStore, "read", read)
    return noted


# --- writers in other processes
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["boto3", "tests.kit.stores"])


def write_slowly(
    store: Store, env: dict[str, str], name: str, data: bytes, ready: Any, go_on: Any
) -> None:
    os.environ.update(env)
    with store.write(name) as sink:
        sink.write(data[: len(data) // 2])
        ready.set()
        go_on.wait(60)
        sink.write(data[len(data) // 2 :])


@contextlib.contextmanager
def writing(store: Store, data: bytes, *names: str) -> Iterator[list[tuple[Any, Any]]]:
    """Processes that have written half of a file each, and what makes them go on."""
    writers, env = [], {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    for name in names:
        ready, go_on = FORKING.Event(), FORKING.Event()
        writer = FORKING.Process(target=write_slowly, args=(store, env, name, data, ready, go_on))
        writer.start()
        writers.append((writer, ready, go_on))
    try:
        assert all(ready.wait(60) for _, ready, _ in writers)
        yield [(writer, go_on) for writer, _, go_on in writers]
    finally:
        for writer, _, _ in writers:
            writer.kill()
            writer.join()


# --- on S3

MIB = 1 << 20
BIG = random.Random(0).randbytes(11 * MIB)  # three parts


def uploads(bucket: str) -> list[str]:
    with s3_client() as client:
        return [u["Key"] for u in client.list_multipart_uploads(Bucket=bucket).get("Uploads", ())]


def begin_uploads(bucket: str, *keys: str) -> None:
    with s3_client() as client:
        for key in keys:
            client.create_multipart_upload(Bucket=bucket, Key=key)


@contextlib.contextmanager
def opened(url: str) -> Iterator[S3Store]:
    store = S3Store(url, part_nbytes=5 * MIB, first_pause_s=0.001)
    with contextlib.closing(store):
        yield store
