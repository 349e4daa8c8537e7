"""Many reads in one call, spans of bytes, and work shared out to threads."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wdsprep.changes.copy_samples import find_neighbours
from wdsprep.dataset import aio
from wdsprep.dataset.aio import READS_AT_ONCE, address_of, read_all
from wdsprep.dataset.thread_map import IDLE, map_ahead

NBYTES = 1 << 20
UNKNOWN = {
    "at once": (),
    "one by one": ("io_setup", "io_getevents", "io_submit"),
    "not its events": ("io_getevents",),
}


@pytest.fixture(params=UNKNOWN)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The second with a kernel that knows none of the calls, the third as in a sandbox."""
    monkeypatch.setattr(aio, "spare_queues", [])
    for own in aio.SYSCALLS.values():
        for name in UNKNOWN[request.param]:
            monkeypatch.setitem(own, name, 9999)
    return str(request.param)


@pytest.fixture
def data() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, NBYTES, np.uint8)


@pytest.fixture
def fd(tmp_path: Path, data: np.ndarray) -> Iterator[int]:
    data.tofile(tmp_path / "data")
    fd = os.open(tmp_path / "data", os.O_RDONLY | os.O_CLOEXEC)
    yield fd
    os.close(fd)


def kernel_queues() -> int:
    """Count the queues that the kernel keeps for this process."""
    return Path("/proc/self/maps").read_text().count("[aio]")


def vectors_of(rows: list[list[np.ndarray]]) -> np.ndarray:
    return np.array([[(address_of(part), len(part)) for part in row] for row in rows], np.uint64)


def read_some(fd: int, data: np.ndarray, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, NBYTES - 3000, count).tolist()
    rows = [[np.zeros(size, np.uint8) for size in rng.integers(0, 999, 3)] for _ in starts]
    came = read_all([fd] * count, starts, vectors_of(rows))
    for start, row, size in zip(starts, rows, came, strict=True):
        assert size == sum(map(len, row))
        assert np.array_equal(np.concatenate(row), data[start : start + size])


@pytest.mark.parametrize(
    "count", [1, READS_AT_ONCE - 1, READS_AT_ONCE, READS_AT_ONCE + 1, 3 * READS_AT_ONCE + 5]
)
@pytest.mark.usefixtures("kind")
def test_every_read_brings_its_bytes_to_its_places(fd: int, data: np.ndarray, count: int) -> None:
    read_some(fd, data, count, seed=count)


def test_the_kind_is_what_it_is_said_to_be(kind: str, fd: int, data: np.ndarray) -> None:
    """Or the other tests would show the same thing twice."""
    before = kernel_queues()
    read_some(fd, data, 1, seed=0)
    assert kernel_queues() - before == (kind == "at once")


@pytest.mark.usefixtures("kind")
def test_reads_that_cannot_be_are_told_from_those_beside_them(
    fd: int, data: np.ndarray, tmp_path: Path
) -> None:
    only_to_write = os.open(tmp_path / "data", os.O_WRONLY)
    closed = os.open(tmp_path / "data", os.O_RDONLY)
    os.close(closed)
    fds = [closed, fd, only_to_write, fd, closed, fd, fd]
    starts = [0, 10, 0, NBYTES - 30, 0, NBYTES + 5, 20]
    rows = [[np.zeros(100, np.uint8)] for _ in fds]
    came = read_all(fds, starts, vectors_of(rows)).tolist()
    assert [max(0, size) for size in came] == [0, 100, 0, 30, 0, 0, 100]
    assert np.array_equal(rows[1][0], data[10:110])
    assert np.array_equal(rows[3][0][:30], data[-30:])
    assert np.array_equal(rows[6][0], data[20:120])
    os.close(only_to_write)
    read_some(fd, data, READS_AT_ONCE, seed=1)  # and nothing is left of them


@pytest.mark.usefixtures("kind")
def test_threads_do_not_meet(fd: int, data: np.ndarray) -> None:
    def work(seed: int) -> None:
        for number in range(10):
            read_some(fd, data, 50, seed=1000 * seed + number)

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(work, range(8))] == [None] * 8


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.usefixtures("kind")
def test_a_fork_reads_with_what_is_its_own(fd: int, data: np.ndarray) -> None:
    read_some(fd, data, 3, seed=0)
    child = os.fork()
    if not child:
        code = 1
        try:
            read_some(fd, data, 100, seed=1)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    read_some(fd, data, 3, seed=2)


OFFSETS = [0, 10, 30, 60, 100, 150]


@pytest.mark.parametrize(
    ("wanted", "gap_nbytes", "most_nbytes", "runs"),
    [
        ((0, 1, 3), 0, 1000, [(0, 2), (2, 3)]),
        ((0, 1, 3), 30, 1000, [(0, 3)]),
        ((0, 1, 3), 29, 1000, [(0, 2), (2, 3)]),
        ((), 0, 1000, []),
        (range(5), 0, 45, [(0, 2), (2, 3), (3, 4), (4, 5)]),
    ],
)
def test_neighbours_are_read_at_once_and_others_where_the_gap_is_small_enough(
    wanted: Sequence[int],
    gap_nbytes: int,
    most_nbytes: int,
    runs: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("wdsprep.changes.copy_samples.READ_NBYTES", most_nbytes)
    starts, ends = ([OFFSETS[n + more] for n in wanted] for more in (0, 1))
    assert [*find_neighbours(starts, ends, gap_nbytes)] == runs


def slow_first(number: Any) -> Any:
    time.sleep(0.02 if number == 0 else 0)
    return number


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("items", [[*range(20)], [0, 1, IDLE, 2], [None, 1, None]])
def test_results_come_in_the_order_of_their_inputs(items: list[Any], threads: int) -> None:
    assert list(map_ahead(slow_first, items, threads)) == items


def test_no_more_is_taken_than_may_wait() -> None:
    taken = []
    given = map_ahead(slow_first, (taken.append(n) or n for n in range(100)), 2, most=5)
    assert next(given) == 0
    assert len(taken) == 6
    given.close()


def test_one_thread_is_that_of_the_caller() -> None:
    (name,) = map_ahead(lambda _: threading.current_thread().name, [0], 1)
    assert name == threading.current_thread().name
