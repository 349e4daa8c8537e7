import threading
import time

import pytest

from wdsprep.dataset.thread_map import IDLE, map_ahead, read_each


def slow_first(number: int) -> int:
    time.sleep(0.02 if number == 0 else 0)
    return number


@pytest.mark.parametrize("threads", [1, 4])
def test_results_come_in_the_order_of_their_inputs(threads: int) -> None:
    assert list(map_ahead(slow_first, range(20), threads)) == list(range(20))


def test_no_more_is_taken_than_may_wait() -> None:
    taken = []
    given = map_ahead(slow_first, (taken.append(n) or n for n in range(100)), 2, most=5)
    assert next(given) == 0
    assert len(taken) == 6
    given.close()


def test_one_thread_is_that_of_the_caller() -> None:
    (name,) = map_ahead(lambda _: threading.current_thread().name, [0], 1)
    assert name == threading.current_thread().name


@pytest.mark.parametrize("threads", [1, 4])
def test_what_is_ahead_is_given_out_before_an_idle_item(threads: int) -> None:
    assert list(map_ahead(slow_first, [0, 1, IDLE, 2], threads)) == [0, 1, IDLE, 2]


def test_an_item_may_be_none() -> None:
    assert list(map_ahead(lambda item: item, [None, 1, None], 2)) == [None, 1, None]


def test_it_is_told_how_many_have_been_read() -> None:
    heard: list[int] = []
    assert read_each(slow_first, range(3), 2, heard.append) == [0, 1, 2]
    assert heard == [1, 2, 3]
