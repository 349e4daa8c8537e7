"""Streams read several chunks ahead; what waits is on a disk unless the user says otherwise."""

import io
import os
import random
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wdsprep.errors import ShortReadError
from wdsprep.store import spool
from wdsprep.store.base import AHEAD, WATCHED_BEHIND, Chunks, write_bytes
from wdsprep.store.local import LocalStore
from wdsprep.store.spool import Spool, is_in_memory, spool_folder

CHUNK = 1000
DATA = random.Random(0).randbytes(20 * CHUNK + 7)


class Seen(LocalStore):
    """Tells of each read before it is done."""

    def __init__(self, root: Path, tell: Callable[[int], object] = lambda _start: None) -> None:
        super().__init__(str(root))
        write_bytes(self, "f", DATA)
        self.tell = tell

    def stream(self, **options: Any) -> io.BufferedReader:
        return Chunks(self, "f", chunk_nbytes=CHUNK, ahead=AHEAD, **options).as_stream()

    def read(self, name: str, /, *, start: int = 0, nbytes: int | None = None) -> bytes:
        self.tell(start)
        return super().read(name, start=start, nbytes=nbytes)


def test_several_chunks_are_on_their_way_at_once_and_no_more(tmp_path: Path) -> None:
    """They meet at a barrier: one after the other, they would wait for ever."""
    together, asked = threading.Barrier(AHEAD, timeout=20), list[int]()

    def tell(start: int) -> None:
        asked.append(start)
        if CHUNK <= start <= AHEAD * CHUNK:
            together.wait()

    with Seen(tmp_path, tell).stream() as file:
        assert file.read(CHUNK // 2) == DATA[: CHUNK // 2]
        assert asked == [0]  # who wants no more than the beginning gets no more
        for start in range(CHUNK // 2, len(DATA), CHUNK // 2):
            assert file.read(CHUNK // 2) == DATA[start : start + CHUNK // 2]
            assert max(asked) <= start + (AHEAD + 1) * CHUNK
        assert file.read(1) == b""


def test_nothing_is_asked_for_ahead_behind_the_end_that_is_known(tmp_path: Path) -> None:
    asked: list[int] = []
    with Seen(tmp_path, asked.append).stream(expected=len(DATA)) as file:
        assert file.read() == DATA
    assert sorted(asked) == list(range(0, len(DATA) + 1, CHUNK))


def test_a_chunk_that_failed_is_raised_in_its_turn_and_asked_for_anew(tmp_path: Path) -> None:
    failures = [5 * CHUNK]

    def tell(start: int) -> None:
        if start in failures:
            failures.remove(start)
            raise ShortReadError("it broke off")

    seen: list[bytes] = []
    with Seen(tmp_path, tell).stream(watch=seen.append) as file:
        assert file.read(5 * CHUNK) == DATA[: 5 * CHUNK]
        with pytest.raises(ShortReadError):
            file.read(1)
        assert file.read() == DATA[5 * CHUNK :]
    assert b"".join(seen) == DATA


def test_all_that_was_read_has_been_watched_in_order_when_the_stream_is_closed(
    tmp_path: Path,
) -> None:
    slow, seen = threading.Event(), list[bytes]()

    def watch(data: bytes) -> None:
        slow.wait(0.02)
        seen.append(data)

    with Seen(tmp_path).stream(watch=watch) as file:
        for n in range(1, 20):
            file.read(CHUNK)
            assert len(seen) >= n - WATCHED_BEHIND - 1  # of the one that is at hand
    assert seen == [DATA[n * CHUNK : (n + 1) * CHUNK] for n in range(19)]


def test_what_goes_wrong_in_watching_is_raised(tmp_path: Path) -> None:
    def watch(data: bytes) -> None:
        if data == DATA[2 * CHUNK : 3 * CHUNK]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Seen(tmp_path).stream(watch=watch) as file:
        file.read(3 * CHUNK)


def stream_threads() -> set[threading.Thread]:
    """Those of streams alone: what other tests started may end at any time."""
    return {t for t in threading.enumerate() if t.name.startswith(("read-ahead", "watch"))}


def test_a_stream_that_is_left_early_leaves_no_thread(tmp_path: Path) -> None:
    before = stream_threads()
    with Seen(tmp_path).stream(watch=len) as file:
        file.read(3 * CHUNK)
        assert {t.name.split("_")[0] for t in stream_threads() - before} == {"read-ahead", "watch"}
    assert not stream_threads() - before


def test_a_file_of_one_chunk_takes_no_thread(tmp_path: Path) -> None:
    before, seen = stream_threads(), list[bytes]()
    with Chunks(Seen(tmp_path), "f", watch=seen.append).as_stream() as file:
        assert file.read() == DATA
        assert seen == [DATA]
        assert not stream_threads() - before


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /tmp in memory, and two other folders: the first in memory too, the second on a disk."""
    for name in spool.ASKED_BY:
        monkeypatch.delenv(name, raising=False)
    spool._warn_of_memory.cache_clear()
    memory = str(tmp_path / "memory")
    monkeypatch.setattr(spool, "is_in_memory", lambda folder: folder.startswith(memory))
    monkeypatch.setattr(tempfile, "tempdir", memory)
    monkeypatch.setattr(spool, "ON_DISK", (memory, str(tmp_path)))
    return tmp_path


def test_a_folder_in_memory_is_told_from_one_on_a_disk(tmp_path: Path) -> None:
    assert not is_in_memory(str(Path(__file__).parent))
    assert not is_in_memory("/proc")
    assert is_in_memory("/dev/shm") or not Path("/dev/shm").is_dir()
    assert tmp_path.is_dir()


def test_mounts_whose_names_are_not_utf_8_are_told_apart_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path.stat().st_dev
    mount = f"1 1 {os.major(device)}:{os.minor(device)} / /caf\xe9 rw - tmpfs none rw\n"
    (tmp_path / "mounts").write_bytes(mount.encode("latin-1"))
    monkeypatch.setattr(spool, "MOUNTS", tmp_path / "mounts")
    assert is_in_memory(str(tmp_path))


def test_bytes_do_not_wait_in_memory_unasked(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spool_folder() == str(folders)
    waiting = Spool()
    place = waiting.put(b"some bytes")
    assert waiting.get(place) == b"some bytes"
    waiting.close()
    monkeypatch.setenv("TMPDIR", tempfile.gettempdir())
    assert spool_folder() == tempfile.gettempdir()


@pytest.mark.usefixtures("folders")
def test_if_there_is_no_disk_the_user_hears_of_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = tempfile.gettempdir()
    monkeypatch.setattr(spool, "ON_DISK", (memory, "/nowhere"))
    assert spool_folder() == spool_folder() == memory
    (line,) = caplog.messages
    assert line == f"what waits on disk waits in memory, where {memory} lies: set TMPDIR to a disk"
