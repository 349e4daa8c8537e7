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
"""An item that says: nothing more to do for now, give out what is ahead."""


def ahead(
    look: Callable[[Item], Found], items: Iterable[Item], threads: int, *, most: int = 0
) -> Generator[Found, None, None]:
    """Yield what `look` returns for each item, in order, looking ahead in threads.

    At most `most` results wait to be asked for: two a thread, unless it is said. An item that is
    `IDLE` comes out as it is, after all that is ahead. Who leaves before the end waits only for
    those that are being looked at.
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
    heard: Callable[[int], None] = lambda _count: None,
) -> list[Found]:
    """Return what `look` returns for each item, in order. `heard` gets the number of items done."""
    found: list[Found] = []
    for one in ahead(look, items, threads):
        found.append(one)
        heard(len(found))
    return found
