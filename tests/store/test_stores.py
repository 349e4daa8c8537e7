"""What every store promises, held on both kinds."""

import concurrent.futures
import pickle
import random
import time
from pathlib import Path

import pytest

from tests.kit.stores import break_off, names, one_line_error
from wdsprep.dataset.chunks import Chunks
from wdsprep.errors import ExistsError, NotFoundError, UsageError
from wdsprep.store import open_store, split_url
from wdsprep.store.base import Store, write_bytes

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


def test_ranged_read_ends_where_the_file_ends(store: Store) -> None:
    data = b"0123456789"
    write_bytes(store, "f", data)
    ranges = [(0, None), (0, 0), (4, 0), (2, 3), (8, 2), (8, 3), (9, None), (10, None), (10, 5)]
    for start, nbytes in (*ranges, (11, 5), (1000, None), (1000, 0)):
        stop = None if nbytes is None else start + nbytes
        assert store.read("f", start=start, nbytes=nbytes) == data[start:stop], (start, nbytes)


def test_empty_file_is_a_file(store: Store) -> None:
    write_bytes(store, "empty", b"")
    assert [(e.name, e.nbytes) for e in store.list()] == [("empty", 0)]
    assert store.read("empty") == store.read("empty", start=0, nbytes=9) == b""
    assert Chunks(store, "empty").as_stream().read() == b""


def test_same_tree_gives_the_same_list(store: Store) -> None:
    tree = [name for name in NAMES if name != "a"]  # a folder and a file cannot share a name
    for name in random.Random(1).sample(tree, len(tree)):
        write_bytes(store, name, name.encode())
    assert names(store) == sorted(tree, key=str.encode)
    assert [e.nbytes for e in store.list()] == [len(n.encode()) for n in names(store)]
    prefixes = ["a", "a/", "a/b", "a/b.", "a/b/", "b/", "b/é", "c", "a-", "none/such/", "a b/c+"]
    for prefix in prefixes:
        expected = [name for name in sorted(tree, key=str.encode) if name.startswith(prefix)]
        assert names(store, prefix) == expected, prefix
    assert all(store.read(name) == name.encode() for name in tree)


def test_list_of_a_place_nobody_wrote_to_is_empty(store: Store) -> None:
    assert names(store) == []
    assert store.sweep()[0] == 0


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
            with one_line_error(NotFoundError, f"{store.url}/{name}"):
                store.read(name, nbytes=nbytes)


def test_exclusive_write_of_a_taken_name_leaves_the_old_bytes(store: Store) -> None:
    write_bytes(store, "f", b"old", exclusive=True)
    with one_line_error(ExistsError, f"{store.url}/f"):
        write_bytes(store, "f", b"new", exclusive=True)
    assert store.read("f") == b"old"
    with pytest.raises(ExistsError):
        write_bytes(store, "f", b"old", exclusive=True)  # the same bytes are no excuse


def test_exclusive_race_has_one_winner_even_with_the_same_bytes(store: Store) -> None:
    def attempt(job: tuple[str, bytes]) -> bytes | None:
        try:
            write_bytes(store, *job, exclusive=True)
        except ExistsError:
            return None
        return job[1]

    for name, jobs in (("f", [b"%d" % n * 1000 for n in range(24)]), ("same", [b"same"] * 24)):
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            results = pool.map(attempt, [(name, data) for data in jobs])
            assert [data for data in results if data is not None] == [store.read(name)]


def test_exception_in_the_block_leaves_all_as_it_was(store: Store) -> None:
    """An error of the system that is about another file must not be blamed on this one."""
    for exclusive in (False, True):
        with pytest.raises(ZeroDivisionError):
            break_off(store, ZeroDivisionError(), exclusive=exclusive)
    with pytest.raises(FileNotFoundError), store.write("f"):
        Path("/no/such/file").read_bytes()
    assert names(store) == []
    write_bytes(store, "f", b"old" * 1000)
    with pytest.raises(KeyboardInterrupt):
        break_off(store, KeyboardInterrupt())
    assert store.read("f") == b"old" * 1000
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


def test_name_or_prefix_that_leaves_the_store_is_refused(store: Store) -> None:
    for name in ("", "/", "/etc/x", "..", "../x", "a/../x", "a//b", "./a", "a/"):
        for act in (store.read, store.delete, lambda n: write_bytes(store, n, b"x")):
            with pytest.raises(UsageError):
                act(name)
    for prefix in ("/", "/etc/", "../", "a/../../", "./", "a//"):
        with pytest.raises(UsageError):
            names(store, prefix)


def test_url_or_pickle_opens_the_same_store(store: Store) -> None:
    write_bytes(store, "a/f", b"x")
    copy: Store = pickle.loads(pickle.dumps(store))
    assert copy.url == store.url
    opened = open_store(store.url)
    for other, name in ((copy, "a/f"), (opened, "a/f"), split_url(f"{store.url}/a/f")):
        try:
            assert other.read(name) == b"x"
        finally:
            getattr(other, "close", lambda: None)()
