"""What every store promises, held on both kinds."""

import concurrent.futures
import contextlib
import pickle
import random
import time
from pathlib import Path

import pytest

from tests.kit.stores import break_off, names, one_line
from wdsprep.errors import ExistsError, NotFoundError, UsageError
from wdsprep.store import open_store, split_url
from wdsprep.store.base import Store, stream, write_bytes

NAMES = [
    "a",
    "a b/c+d&e=%41",
    "a-b",
    "a.b",
    "a/b",
    "a/b.c/d",
    "a0",
    "b/é",
    "b/\U0001f600",
    "b/\uff5e",
]


def test_what_was_written_is_read(store: Store) -> None:
    with store.write("a/b") as sink:
        sink.write(b"01234")
        sink.write(b"")
        sink.writelines([b"5", memoryview(b"67"), b"89"])
    assert store.read("a/b") == b"0123456789"


@pytest.mark.parametrize(
    ("start", "nbytes", "expected"),
    [
        (0, None, b"0123456789"),
        (0, 0, b""),
        (4, 0, b""),
        (2, 3, b"234"),
        (8, 2, b"89"),
        (8, 3, b"89"),
        (9, None, b"9"),
        (10, None, b""),
        (10, 5, b""),
        (11, 5, b""),
        (1000, None, b""),
        (1000, 0, b""),
    ],
)
def test_ranged_read_ends_where_the_file_ends(
    store: Store, start: int, nbytes: int | None, expected: bytes
) -> None:
    write_bytes(store, "f", b"0123456789")
    assert store.read("f", start=start, nbytes=nbytes) == expected


def test_empty_file_is_a_file(store: Store) -> None:
    write_bytes(store, "empty", b"")
    assert [(e.name, e.nbytes) for e in store.list()] == [("empty", 0)]
    assert store.read("empty") == store.read("empty", start=0, nbytes=9) == b""
    assert stream(store, "empty").read() == b""


def test_same_tree_gives_the_same_list(store: Store) -> None:
    tree = [name for name in NAMES if name != "a"]  # a folder and a file cannot share a name
    for name in random.Random(1).sample(tree, len(tree)):
        write_bytes(store, name, name.encode())
    assert names(store) == sorted(tree, key=str.encode)
    assert [e.nbytes for e in store.list()] == [len(n.encode()) for n in names(store)]
    for prefix in (
        "a",
        "a/",
        "a/b",
        "a/b.",
        "a/b/",
        "b/",
        "b/é",
        "c",
        "a-",
        "none/such/",
        "a b/c+",
    ):
        expected = [name for name in sorted(tree, key=str.encode) if name.startswith(prefix)]
        assert names(store, prefix) == expected, prefix
    assert all(store.read(name) == name.encode() for name in tree)


def test_list_of_a_place_nobody_wrote_to_is_empty(store: Store) -> None:
    assert names(store) == []
    assert store.sweep().removed == 0


def test_stamp_changes_with_the_file(store: Store) -> None:
    write_bytes(store, "f", b"old")
    [before] = store.list()
    time.sleep(0.02)
    write_bytes(store, "f", b"new")
    [after] = store.list()
    assert before.stamp != after.stamp


def test_delete_twice_is_fine(store: Store) -> None:
    write_bytes(store, "a/f", b"x")
    store.delete("a/f")
    store.delete("a/f")
    store.delete("no/such")
    assert names(store) == []


def test_missing_file_is_not_found(store: Store) -> None:
    write_bytes(store, "a", b"x")
    for name in ("none", "no/such", "a/b"):
        for nbytes in (None, 0, 5):
            with pytest.raises(NotFoundError) as caught:
                store.read(name, nbytes=nbytes)
            assert one_line(caught.value, f"{store.url}/{name}")


def test_exclusive_write_of_a_taken_name_leaves_the_old_bytes(store: Store) -> None:
    write_bytes(store, "f", b"old", exclusive=True)
    with pytest.raises(ExistsError) as caught:
        write_bytes(store, "f", b"new", exclusive=True)
    assert one_line(caught.value, f"{store.url}/f")
    assert store.read("f") == b"old"
    with pytest.raises(ExistsError):
        write_bytes(store, "f", b"old", exclusive=True)  # the same bytes are no excuse


def test_exclusive_race_has_one_winner(store: Store) -> None:
    def attempt(number: int) -> bytes | None:
        data = b"%d" % number * 1000
        try:
            write_bytes(store, "f", data, exclusive=True)
        except ExistsError:
            return None
        return data

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        won = [data for data in pool.map(attempt, range(24)) if data is not None]
    assert [store.read("f")] == won


def test_exclusive_race_with_the_same_bytes_has_one_winner(store: Store) -> None:
    def attempt(_: int) -> bool:
        with contextlib.suppress(ExistsError):
            write_bytes(store, "f", b"same", exclusive=True)
            return True
        return False

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(24))) == 1


@pytest.mark.parametrize("exclusive", [False, True])
def test_exception_in_the_block_leaves_nothing(store: Store, exclusive: bool) -> None:
    with pytest.raises(ZeroDivisionError):
        break_off(store, ZeroDivisionError(), exclusive=exclusive)
    assert names(store) == []


def test_os_error_of_the_block_stays_itself(store: Store) -> None:
    """It is about something else than this file, and must not be blamed on it."""
    with pytest.raises(FileNotFoundError), store.write("f"):
        Path("/no/such/file").read_bytes()
    assert names(store) == []


def test_exception_in_the_block_keeps_the_old_file(store: Store) -> None:
    write_bytes(store, "f", b"old")
    with pytest.raises(KeyboardInterrupt):
        break_off(store, KeyboardInterrupt())
    assert store.read("f") == b"old"


def test_overwrite_replaces_whole(store: Store) -> None:
    write_bytes(store, "f", b"long" * 1000)
    write_bytes(store, "f", b"short")
    assert store.read("f") == b"short"
    assert names(store) == ["f"]


def test_file_shows_only_when_complete(store: Store) -> None:
    write_bytes(store, "f", b"old")
    with store.write("f") as sink, store.write("g") as other:
        sink.write(b"new")
        other.write(b"new")
        assert names(store) == ["f"]
        assert store.read("f") == b"old"
    assert (store.read("f"), store.read("g")) == (b"new", b"new")


@pytest.mark.parametrize("name", ["", "/", "/etc/x", "..", "../x", "a/../x", "a//b", "./a", "a/"])
def test_name_that_leaves_the_store_is_refused(store: Store, name: str) -> None:
    for act in (store.read, store.delete, lambda n: write_bytes(store, n, b"x")):
        with pytest.raises(UsageError):
            act(name)


@pytest.mark.parametrize("prefix", ["/", "/etc/", "../", "a/../../", "./", "a//"])
def test_prefix_that_leaves_the_store_is_refused(store: Store, prefix: str) -> None:
    with pytest.raises(UsageError):
        names(store, prefix)


@pytest.mark.parametrize("nbytes", [99, 100, 101, 200, 1050])
def test_stream_reads_more_than_its_chunk(store: Store, nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    write_bytes(store, "f", data)
    with stream(store, "f", chunk_nbytes=100) as file:
        assert file.read(150) + file.read() + file.read() == data


def test_store_survives_pickling(store: Store) -> None:
    write_bytes(store, "f", b"x")
    other: Store = pickle.loads(pickle.dumps(store))
    try:
        assert other.url == store.url
        assert other.read("f") == b"x"
    finally:
        getattr(other, "close", lambda: None)()


def test_url_opens_the_same_store(store: Store) -> None:
    write_bytes(store, "a/f", b"x")
    for other, name in ((open_store(store.url), "a/f"), split_url(f"{store.url}/a/f")):
        try:
            assert other.read(name) == b"x"
        finally:
            getattr(other, "close", lambda: None)()
