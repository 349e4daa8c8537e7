"""Only one holds a name at a time, whoever dies, stops or takes long; on a disk and on real S3."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.kit.stores import names
from wdsprep.errors import BusyError
from wdsprep.store.base import Store, write_bytes
from wdsprep.store.object_locks import FRESH_S, is_known_dead, this_process
from wdsprep.store.s3.s3_store import S3Store

NAME = "receipts/000001.hold"
CHILD = """
import sys, time
from wdsprep.store import open_store
from wdsprep.store import object_locks
url, fresh_s = sys.argv[1], float(sys.argv[2])
object_locks.FRESH_S = fresh_s
store = open_store(url)
with store.hold("receipts/000001.hold"):
    print("held", flush=True)
    sys.stdin.readline()
    store.delete("precious")
"""


@contextmanager
def holder(store: Store, fresh_s: float = 60) -> Iterator["subprocess.Popen[str]"]:
    """Another process that holds the name, and deletes a file in that hold once it is told to."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, store.url, str(fresh_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdin
    assert child.stdout
    assert child.stderr
    try:
        assert child.stdout.readline() == "held\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def test_of_many_threads_one_is_in_the_block_at_a_time(store: Store) -> None:
    inside, most = 0, 0

    def visit() -> None:
        nonlocal inside, most
        for _ in range(3):
            with store.hold(NAME):
                inside += 1
                most = max(most, inside)
                time.sleep(0.005)
                inside -= 1

    with ThreadPoolExecutor(5) as pool:
        for visiting in [pool.submit(visit) for _ in range(5)]:
            visiting.result(60)
    assert most == 1
    assert names(store) == []


def test_names_are_held_each_by_itself(store: Store) -> None:
    with store.hold(NAME), store.hold("receipts/000002.hold"):
        assert names(store) == [NAME, "receipts/000002.hold"]
    assert names(store) == []


def test_who_dies_lets_go(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wdsprep.store.object_locks.IN_FLIGHT_S", 0.1)
    with holder(store) as child:
        store.let_go(NAME)
        assert names(store) == [NAME]  # it lives
        child.kill()
        child.wait()
    with store.hold(NAME):
        pass
    assert names(store) == []
    with holder(store) as child:
        child.kill()
        child.wait()
    store.let_go(NAME)
    assert names(store) == []


def test_who_is_stopped_is_waited_for_and_then_named(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wdsprep.store.local.HOLD_WAIT_S", 0.3)
    monkeypatch.setattr("wdsprep.store.object_locks.LONGEST_WAIT_S", 0.3)
    with holder(store) as child:
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(BusyError, match="wait for that run or end it"), store.hold(NAME):
            pass
        child.send_signal(signal.SIGCONT)
        child.communicate("\n")
    assert names(store) == []


def test_on_s3_who_slept_too_long_has_lost_its_hold_and_changes_nothing(
    s3_store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wdsprep.store.object_locks.DEAD_S", 2.0)
    write_bytes(s3_store, "precious", b"of another run")
    with holder(s3_store, fresh_s=1) as child:
        child.send_signal(signal.SIGSTOP)
        with s3_store.hold(NAME):
            assert len(names(s3_store)) == 3  # the mark of who sleeps, one behind it, the file
            child.send_signal(signal.SIGCONT)
            _, said = child.communicate("\n")
            assert "slept and may have lost its lock" in said
            assert s3_store.read("precious") == b"of another run"
    assert names(s3_store) == ["precious"]


def test_on_s3_who_takes_long_makes_further_marks(
    s3_store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("wdsprep.store.object_locks.read_clocks", lambda: (clock[0], clock[0]))
    seen = set()
    with s3_store.hold(NAME):
        for number in range(6):
            write_bytes(s3_store, "f", str(number).encode())
            seen |= set(names(s3_store))
            clock[0] += FRESH_S / 3
    assert seen == {"f", NAME, f"{NAME}.1", f"{NAME}.2"}
    assert names(s3_store) == ["f"]


def test_a_process_is_known_by_its_start_and_not_by_its_number_alone() -> None:
    me = this_process()
    assert not is_known_dead(me)
    assert is_known_dead({**me, "started": "1"})
    assert is_known_dead({**me, "pid": os.getpid() + 2**22})
    assert not is_known_dead({**me, "machine": "another", "started": "1"})
