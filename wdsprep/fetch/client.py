"""From a URL to an image's bytes: robots.txt, opt-outs, attempts, redirects.

A redirect is a request like the first: its target is parsed, its host's robots.txt asked, its turn
waited for, its address checked. The time limit of an attempt is shared by its hops; waiting for a
turn does not count, and neither does the robots.txt, which has a limit of its own.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError, as_rejected
from wdsprep.fetch import backoff
from wdsprep.fetch.answer_rules import (
    LaterError,
    asks_too_long_pause,
    is_redirect,
    judge_image,
    judge_robots,
)
from wdsprep.fetch.host_limits import HostLimits
from wdsprep.fetch.memory_limit import CrowdedError
from wdsprep.fetch.object_urls import ObjectReader
from wdsprep.fetch.options import TRANSIENT, Fetched, FetchRules
from wdsprep.fetch.robots import ALL_ALLOWED, MAX_NBYTES, Robots, RobotsCache, read_robots
from wdsprep.fetch.transfer import Answer, AnswerRule, Handles
from wdsprep.fetch.urls import Target, follow, parse
from wdsprep.store.schemes import is_keyed, root_and_name

SHORT_ROBOTS = 1 << 14  # bytes; a longer one takes its time, and is read in a thread
ROBOTS_REDIRECTS = 5  # of which the RFC wants five to be followed
NO_SERVER = {Code.PRIVATE_ADDRESS, Code.DNS, Code.REFUSED, Code.UNREACHABLE, Code.TLS}
CREDENTIALS = "it would be read with your credentials: --allow-s3 does that"


class Client:
    """A client that fetches images by their URLs, on one event loop."""

    def __init__(self, rules: FetchRules) -> None:
        self._rules = rules
        self._lines = Handles(rules)
        self._turns = HostLimits(
            in_flight=rules.in_flight,
            per_host=rules.per_host,
            may_start=lambda: self._lines.room.takes_one_more,
        )
        self._robots = RobotsCache(self._ask_robots)
        self._check = self._robots.check if rules.robots else None
        self._image = AnswerRule(judge=partial(judge_image, rules), max_nbytes=rules.max_nbytes)
        self._reader = ThreadPoolExecutor(1, "wdsprep-fetch-robots")
        self._objects = ObjectReader(max_nbytes=rules.max_nbytes)

    async def fetch(self, url: str) -> Fetched:
        """Fetch the image of a URL.

        No exception leaves this method: each becomes the reject of its own URL.
        """
        host = ""
        try:
            if is_keyed(url):
                host = root_and_name(url)[0].partition("://")[2]
                if not self._rules.allow_s3:
                    raise RejectedError(Code.PRIVATE_ADDRESS, CREDENTIALS)
                return await self._objects.fetch(url)
            target = parse(url)
            host = target.host
            return Fetched(data=await self._fetch_with_retries(target), host=host)
        except Exception as error:  # noqa: BLE001 (no server's answer may cost the other URLs)
            rejected = as_rejected(error, Code.FAULT)
            return Fetched(code=rejected.code, detail=rejected.detail, host=host)

    def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._objects.close()
        self._lines.close()

    async def _fetch_with_retries(self, target: Target) -> bytes:
        for attempt in range(self._rules.retries):
            try:
                return await self._get_image(target)
            except RejectedError as error:
                if error.code not in TRANSIENT or asks_too_long_pause(error):
                    raise
            await asyncio.sleep(backoff.pause_s(attempt))
        return await self._get_image(target)

    async def _get_image(self, target: Target) -> bytes:
        answer = await self._get(
            target, self._image, redirects=self._rules.redirects, check=self._check
        )
        if not answer.body:
            raise RejectedError(Code.EMPTY, f"HTTP {answer.head.status} without a body")
        return answer.body

    async def _ask_robots(self, target: Target) -> Robots:
        """Read the robots.txt of the origin of `target`.

        Raise RejectedError if it cannot be had now. A robots.txt with too many redirects, or with
        one that leads to no valid URL, counts as missing and allows everything.
        """
        want = AnswerRule(judge=judge_robots, max_nbytes=MAX_NBYTES, cut=True)
        try:
            answer = await self._get(
                parse(f"{target.origin}/robots.txt"), want, redirects=ROBOTS_REDIRECTS
            )
        except RejectedError as error:
            if error.code in (Code.REDIRECTS, Code.BAD_URL):  # as good as none
                return ALL_ALLOWED
            if error.code not in NO_SERVER:
                error.args = (error.code, f"robots.txt: {error.detail}", *error.args[2:])
                error.detail = error.args[1]
            raise
        if len(answer.body) <= SHORT_ROBOTS:
            return read_robots(answer.body)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reader, read_robots, answer.body)

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
        left_s, seen = self._rules.timeout_s, {target.url}
        while True:
            if check is not None:
                await check(target)
            answer, took_s = await self._ask(target, want, left_s)
            if not is_redirect(answer.head):
                return answer
            left_s -= took_s
            target = follow(target, answer.head.first("location"))
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
                return await self._lines.get(target.url, want, timeout_s=left_s)
            except CrowdedError:
                continue
            except RejectedError as error:
                failure = error
                raise
            finally:
                self._give_back(target.host, failure)

    def _give_back(self, host: str, failure: RejectedError | None) -> None:
        after_s = failure.after_s if isinstance(failure, LaterError) else 0.0
        self._turns.give_back(
            host,
            failure,
            pause_s=min(after_s, backoff.LONGEST_WAIT_S),
            for_all=after_s > backoff.LONGEST_WAIT_S,
        )
