"""Images behind s3://, gs://, az:// and hf:// URLs, read through the project's own store.

The store has its own time limits and attempts. Its calls block, so a few threads wait for them;
they are daemons, as nothing can be done about a call that hangs when all else has ended.
"""

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from wdsprep.dataset.reject_codes import Code
from wdsprep.errors import AccessError, NotFoundError, ShortReadError, StoreError, UsageError
from wdsprep.fetch.options import Fetched
from wdsprep.store import open_store
from wdsprep.store.base import Store
from wdsprep.store.schemes import root_and_name

THREADS = 16
BUCKETS = 16  # whose clients are kept
_Job = tuple[str, "asyncio.Future[Fetched]"]


class ObjectReader:
    """A reader of images in buckets and on the hub, for one event loop."""

    def __init__(self, *, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._stores: OrderedDict[str, Store] = OrderedDict()
        self._lock = threading.Lock()

    async def fetch(self, url: str) -> Fetched:
        if len(self._threads) < THREADS:
            thread = threading.Thread(target=self._work, name="wdsprep-fetch-s3", daemon=True)
            self._threads.append(thread)
            thread.start()
        future: asyncio.Future[Fetched] = self._loop.create_future()
        self._jobs.put((url, future))
        return await future

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while job := self._jobs.get():
            url, future = job
            if future.cancelled():
                continue
            act: Callable[[Any], None] = future.set_result
            try:
                value: object = self._read(url)
            except Exception as error:  # noqa: BLE001 (a bug, told where the future is waited for)
                act, value = future.set_exception, error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(_unless_done, future, act, value)

    def _read(self, url: str) -> Fetched:
        root, name = root_and_name(url)
        bucket = root.partition("://")[2]
        try:
            data = self._store(root).read(name, nbytes=self._max_nbytes + 1)
        except (StoreError, UsageError) as error:
            return Fetched(code=_code_of(error), detail=str(error), host=bucket)
        if len(data) > self._max_nbytes:
            too_many = f"more than {self._max_nbytes:,}"
            return Fetched(code=Code.TOO_MANY_BYTES, detail=too_many, host=bucket)
        return Fetched(data=data, code=None if data else Code.EMPTY, host=bucket)

    def _store(self, root: str) -> Store:
        with self._lock:
            store = self._stores.get(root) or open_store(root)
            self._stores[root] = store
            self._stores.move_to_end(root)
            if len(self._stores) > BUCKETS:
                self._stores.popitem(last=False)
            return store


def _code_of(error: Exception) -> Code:
    """Return the reject code for an error of the store.

    The store has made its attempts already. The error that it met last tells whether another
    day may help.
    """
    if isinstance(error, UsageError):
        return Code.BAD_URL
    if isinstance(error, (NotFoundError, AccessError)):
        return Code.HTTP_4XX
    if isinstance(error, ShortReadError):
        return Code.BROKEN_OFF
    status = error.status if isinstance(error, StoreError) else 0
    if not status:
        return Code.UNREACHABLE
    return Code.HTTP_429 if status == 429 else Code.HTTP_5XX


def _unless_done(
    future: "asyncio.Future[Fetched]", act: Callable[[Any], None], value: object
) -> None:
    if not future.done():
        act(value)
