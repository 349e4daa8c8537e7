"""Reading ahead: results come in the order of their inputs, while threads work on the next ones.

Threads wait for a disk or a network side by side, and memory is bounded by what is made before it
is asked for. `Store.readers` says how many threads are worth their cost; one means none at all: the
caller's own does the work when it asks.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")
IDLE: Any = object()
"""An item that stands for a pause of the source: the results before it are yielded first."""


def map_ahead(
    look: Callable[[Item], Found], items: Iterable[Item], threads: int, *, most: int = 0
) -> Generator[Found, None, None]:
    """Call `look` on each item, ahead of the caller in threads, and yield the results in order.

    At most `most` results wait for the caller, by default two for each thread. An item that is
    `IDLE` is yielded as it is, after the results before it. A caller that stops early waits only
    for the calls under way.
    """
    idle: Found = IDLE
    if threads <= 1:
        yield from (idle if item is IDLE else look(item) for item in items)
        return
    waiting: deque[Future[Found]] = deque()
    pool = ThreadPoolExecutor(threads, "wdsprep-ahead")
    try:
        for item in items:
            if item is not IDLE:
                waiting.append(pool.submit(look, item))
            while waiting and (item is IDLE or len(waiting) > (most or 2 * threads)):
                yield waiting.popleft().result()
            if item is IDLE:
                yield idle
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def read_each(
    look: Callable[[Item], Found],
    items: Iterable[Item],
    threads: int,
    on_count: Callable[[int], None] = lambda _count: None,
) -> list[Found]:
    """Call `look` on each item in threads, and return the results in order.

    `on_count` gets the number of items done.
    """
    results: list[Found] = []
    for result in map_ahead(look, items, threads):
        results.append(result)
        on_count(len(results))
    return results
