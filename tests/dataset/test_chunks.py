"""Files are read in chunks, several ahead, and watched in order."""

import io
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wdsprep.dataset.chunks import AHEAD, WATCHED_BEHIND, Chunks
from wdsprep.errors import ShortReadError
from wdsprep.store.base import write_bytes
from wdsprep.store.local import LocalStore

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
    return {t for t in threading.enumerate() if t.name.startswith(("wdsprep-ahead", "watch"))}


def test_a_stream_that_is_left_early_leaves_no_thread(tmp_path: Path) -> None:
    before = stream_threads()
    with Seen(tmp_path).stream(watch=len) as file:
        file.read(3 * CHUNK)
        assert {t.name.split("_")[0] for t in stream_threads() - before} == {
            "wdsprep-ahead",
            "watch",
        }
    assert not stream_threads() - before
