"""The client in a thread of its own, for callers that are no coroutines."""

import asyncio
import contextlib
import threading
from concurrent.futures import Future
from functools import partial

from wdsprep.errors import UsageError
from wdsprep.fetch.client import Client
from wdsprep.fetch.options import Fetched, FetchRules
from wdsprep.store.local import allow_files

OTHER_FILES = 256
CLOSING_S = 2.0


class Fetcher:
    """A client in a thread of its own; there is one for each process.

    Any number of threads may submit. A forked child cannot use it, because it does not have the
    thread. The callbacks of a future run in the fetcher's thread, so they must be quick.
    """

    def __init__(self, rules: FetchRules) -> None:
        wanted = 3 * rules.in_flight + OTHER_FILES  # two for a request, one for what is kept
        if (allowed := allow_files(wanted)) < wanted:
            raise UsageError(
                f"so many requests in flight need {wanted} open files, and {allowed} are allowed: "
                "ask for fewer (--requests), or raise the limit (ulimit -n)"
            )
        self._rules = rules
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._submitted: list[tuple[str, Future[Fetched]]] = []
        opened: Future[Client] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(opened,), name="wdsprep-fetch", daemon=True
        )
        self._thread.start()
        self._client = opened.result()

    def submit(self, url: str) -> "Future[Fetched]":
        """Begin to fetch a URL. Cancelling the future gives the request up."""
        future: Future[Fetched] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the fetcher is closed")
            self._submitted.append((url, future))
            if len(self._submitted) == 1:
                self._loop.call_soon_threadsafe(self._take_in)
        return future

    def _take_in(self) -> None:
        with self._lock:
            submitted, self._submitted = self._submitted, []
        for url, future in submitted:
            task = self._loop.create_task(self._serve(url, future))
            future.add_done_callback(partial(self._give_up_if_cancelled, task))

    async def _serve(self, url: str, future: "Future[Fetched]") -> None:
        try:
            fetched = await self._client.fetch(url)
        except asyncio.CancelledError:
            future.cancel()
        except BaseException as error:  # noqa: BLE001 (a bug, told where the future is waited for)
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if future.set_running_or_notify_cancel():
                future.set_result(fetched)

    def _give_up_if_cancelled(self, task: "asyncio.Task[None]", future: "Future[Fetched]") -> None:
        if future.cancelled():
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """Cancel the requests that are not done, and end the thread.

        To call this twice does no harm. libcurl waits for name servers that do not answer; we do
        not: the thread is a daemon.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSING_S)

    def _run(self, opened: "Future[Client]") -> None:
        asyncio.set_event_loop(self._loop)
        try:
            opened.set_result(self._loop.run_until_complete(self._open()))
        except BaseException as error:  # noqa: BLE001 (raised where the fetcher is made)
            opened.set_exception(error)
        else:
            self._loop.run_forever()
            self._loop.run_until_complete(self._give_up())
        finally:
            self._loop.close()

    async def _open(self) -> Client:
        return Client(self._rules)

    async def _give_up(self) -> None:
        self._take_in()
        await asyncio.sleep(0)  # let each begin, so that it cancels its future
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._client.close()
