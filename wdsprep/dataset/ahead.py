"""Reading ahead: what is found in each of many things, in their order, while others are looked at.

As many threads as there are wait for a disk or for S3, and memory is bounded by what is found
before it is asked for.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")


def ahead(
    look: Callable[[Item], Found], items: Iterable[Item], threads: int, *, most: int = 0
) -> Iterator[Found]:
    """At `most` so many wait to be asked for: two a thread, unless it is said. Who leaves before
    the end waits only for those that are being looked at."""
    waiting: deque[Future[Found]] = deque()
    pool = ThreadPoolExecutor(threads, "wdsprep-ahead")
    try:
        for item in items:
            waiting.append(pool.submit(look, item))
            if len(waiting) > (most or 2 * threads):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
