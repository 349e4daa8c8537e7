"""From a URL to an image's bytes: robots.txt, opt-outs, attempts, redirects, URLs of stores.

A redirect is a request like the first: its target is parsed, its host's robots.txt asked, its turn
waited for, its address checked. The time limit of an attempt is shared by its hops; waiting for a
turn does not count, and neither does the robots.txt, which has a limit of its own.

Images behind s3://, gs://, az:// and hf:// URLs are read through the project's own store. It has
its own time limits and attempts. Its calls block, so a few threads wait for them. A worker that
ends does not wait for these.

The client works on an event loop in a thread of its own, for callers that are no coroutines.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError, as_rejected
from wdsprep.errors import AccessError, NotFoundError, ShortReadError, StoreError, UsageError
from wdsprep.fetch.answer_rules import (
    LONGEST_WAIT_S,
    LaterError,
    is_redirect,
    judge_image,
    judge_robots,
    pause_s,
)
from wdsprep.fetch.limits import CrowdedError, HostLimits
from wdsprep.fetch.options import TRANSIENT, Fetched, FetchRules
from wdsprep.fetch.robots import ALL_ALLOWED, MAX_NBYTES, Robots, RobotsCache, read_robots
from wdsprep.fetch.transfer import Answer, AnswerRule, CurlLoop
from wdsprep.fetch.urls import Target, follow, parse
from wdsprep.store import open_store
from wdsprep.store.local import allow_files
from wdsprep.store.schemes import is_keyed, root_and_name

SHORT_ROBOTS = 1 << 14  # bytes; a longer one takes its time, and is read in a thread
ROBOTS_REDIRECTS = 5  # of which the RFC wants five to be followed
THREADS, BUCKETS = 16, 16
"""The threads that wait for stores, and the buckets whose clients are kept."""
NO_SERVER = {Code.PRIVATE_ADDRESS, Code.DNS, Code.REFUSED, Code.UNREACHABLE, Code.TLS}
CREDENTIALS = "it would be read with your credentials: --allow-s3 does that"
OTHER_FILES = 256
CLOSING_S = 2.0


class Fetcher:
    """A client that fetches images by their URLs, in a thread of its own; one for each process.

    Any number of threads may submit. A forked child cannot use it, because it does not have the
    thread. The callbacks of a future run in the fetcher's thread, so they must be quick.
    """

    def __init__(self, rules: FetchRules) -> None:
        wanted = 3 * rules.requests + OTHER_FILES  # two for a request, one for what is kept
        if (allowed := allow_files(wanted)) < wanted:
            raise UsageError(
                f"so many requests in flight need {wanted} open files, and {allowed} are allowed: "
                "ask for fewer (--requests), or raise the limit (ulimit -n)"
            )
        self._rules = rules
        self._lock = threading.Lock()
        self._closed = False
        self._check = None if rules.ignore_robots else RobotsCache(self._ask_robots).check
        self._image = AnswerRule(judge=partial(judge_image, rules), max_nbytes=rules.max_nbytes)
        self._reader = ThreadPoolExecutor(1, "wdsprep-fetch-robots")
        self._object_reader = ThreadPoolExecutor(THREADS, "wdsprep-fetch-s3")
        self._store = lru_cache(BUCKETS)(open_store)
        opened: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(opened)), name="wdsprep-fetch", daemon=True
        )
        self._thread.start()
        opened.result()

    def submit(self, url: str) -> "Future[Fetched]":
        """Begin to fetch a URL. Cancelling the future gives the request up."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the fetcher is closed")
            return asyncio.run_coroutine_threadsafe(self._fetch(url), self._loop)

    def close(self) -> None:
        """Cancel the requests that are not done, and end the thread.

        To call this twice does no harm. libcurl waits for name servers that do not answer; we do
        not: the thread is a daemon.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(CLOSING_S)

    async def _serve(self, opened: "Future[None]") -> None:
        """Run libcurl's transfers until the fetcher is closed."""
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        try:
            self._transfers = transfers = CurlLoop(self._rules)
        except BaseException as error:  # noqa: BLE001 (raised where the fetcher is made)
            opened.set_exception(error)
            return
        self._turns = HostLimits(
            in_flight=self._rules.requests,
            per_host=self._rules.per_host,
            may_start=lambda: transfers.room.takes_one_more,
        )
        opened.set_result(None)
        await self._closing.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for reader in (self._reader, self._object_reader):
            reader.shutdown(wait=False, cancel_futures=True)
        transfers.close()

    async def _fetch(self, url: str) -> Fetched:
        """Fetch the image of a URL.

        No exception leaves this method: each becomes the reject of its own URL.
        """
        host = ""
        try:
            if is_keyed(url):
                host = root_and_name(url)[0].partition("://")[2]
                if not self._rules.allow_s3:
                    raise RejectedError(Code.PRIVATE_ADDRESS, CREDENTIALS)
                return await self._loop.run_in_executor(self._object_reader, self._read_object, url)
            target = parse(url)
            host = target.host
            return Fetched(data=await self._fetch_with_retries(target), host=host)
        except Exception as error:  # noqa: BLE001 (no server's answer may cost the other URLs)
            rejected = as_rejected(error, Code.FAULT)
            return Fetched(code=rejected.code, detail=rejected.detail, host=host)

    def _read_object(self, url: str) -> Fetched:
        """Read an image in a bucket or on the hub."""
        root, name = root_and_name(url)
        bucket, most = root.partition("://")[2], self._rules.max_nbytes
        try:
            data = self._store(root).read(name, nbytes=most + 1)
        except (StoreError, UsageError) as error:  # met last, after all attempts of the store
            code = Code.HTTP_5XX
            if isinstance(error, UsageError):
                code = Code.BAD_URL
            elif isinstance(error, NotFoundError | AccessError):
                code = Code.HTTP_4XX
            elif isinstance(error, ShortReadError):
                code = Code.BROKEN_OFF
            elif not error.status:
                code = Code.UNREACHABLE
            elif error.status == 429:
                code = Code.HTTP_429
            return Fetched(code=code, detail=str(error), host=bucket)
        if len(data) > most:
            return Fetched(code=Code.TOO_MANY_BYTES, detail=f"more than {most:,}", host=bucket)
        return Fetched(data=data, code=None if data else Code.EMPTY, host=bucket)

    async def _fetch_with_retries(self, target: Target) -> bytes:
        rules, attempt = self._rules, 0
        while True:
            try:
                head, body = await self._get(
                    target, self._image, redirects=rules.redirects, check=self._check
                )
                if not body:
                    raise RejectedError(Code.EMPTY, f"HTTP {head.status} without a body")
                return body
            except RejectedError as error:
                asks_long_pause = isinstance(error, LaterError) and error.after_s > LONGEST_WAIT_S
                if attempt == rules.retries or error.code not in TRANSIENT or asks_long_pause:
                    raise
            await asyncio.sleep(pause_s(attempt))
            attempt += 1

    async def _ask_robots(self, target: Target) -> Robots:
        """Read the robots.txt of the origin of `target`.

        Raise RejectedError if it cannot be had now. A robots.txt with too many redirects, or with
        one that leads to no valid URL, counts as missing and allows everything.
        """
        want = AnswerRule(judge=judge_robots, max_nbytes=MAX_NBYTES, cut=True)
        try:
            _, body = await self._get(
                parse(f"{target.origin}/robots.txt"), want, redirects=ROBOTS_REDIRECTS
            )
        except RejectedError as error:
            if error.code in (Code.REDIRECTS, Code.BAD_URL):  # as good as none
                return ALL_ALLOWED
            if error.code not in NO_SERVER:
                error.args = (error.code, f"robots.txt: {error.detail}", *error.args[2:])
                error.detail = error.args[1]
            raise
        if len(body) <= SHORT_ROBOTS:
            return read_robots(body)
        return await self._loop.run_in_executor(self._reader, read_robots, body)

    async def _get(
        self,
        target: Target,
        want: AnswerRule,
        *,
        redirects: int,
        check: Callable[[Target], Awaitable[None]] | None = None,
    ) -> Answer:
        """Get a URL, follow redirects, and return the answer at their end.

        `check` is awaited before each request, and may raise an error. Raise RejectedError if a
        request fails, or if there are more than `redirects` redirects or they go in a circle.
        """
        left_s, seen = self._rules.timeout, {target.url}
        while True:
            if check is not None:
                await check(target)
            (head, body), took_s = await self._ask(target, want, left_s)
            if not is_redirect(head):
                return head, body
            left_s -= took_s
            target = follow(target, head.first("location"))
            if target.url in seen:
                raise RejectedError(Code.REDIRECTS, "in a circle")
            if len(seen) > redirects:
                raise RejectedError(Code.REDIRECTS, f"more than {redirects}")
            seen.add(target.url)

    async def _ask(self, target: Target, want: AnswerRule, left_s: float) -> tuple[Answer, float]:
        while True:
            await self._turns.take(target.host)
            failure: RejectedError | None = None
            try:
                return await self._transfers.get(target.url, want, timeout_s=left_s)
            except CrowdedError:
                continue
            except RejectedError as error:
                failure = error
                raise
            finally:
                self._turns.give_back(target.host, failure)
