"""The robots.txt of each origin, asked for once and kept while there is room."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from wdsprep.fetch.robots import Robots
from wdsprep.fetch.urls import Target
from wdsprep.samples import Code, RejectedError

MAX_NBYTES = 32 << 20
_ENTRY_NBYTES = 1_000  # what an origin takes beside its rules


class RobotsCache:
    """Belongs to one event loop. A file that could not be had, for the network's sake or the
    server's, counts as one that forbids all (RFC 9309): what wants an image of that origin fails
    with the same code, and whoever comes later tries again."""

    def __init__(self, ask: Callable[[Target], Awaitable[Robots]]) -> None:
        self._ask = ask
        self._known: OrderedDict[str, Robots] = OrderedDict()
        self._coming: dict[str, asyncio.Task[Robots | RejectedError]] = {}
        self._nbytes = 0

    async def check(self, target: Target) -> None:
        """RejectedError if we may not, or cannot know whether we may, ask for this target."""
        robots = self._known.get(target.origin) or await self._wait_for(target)
        if target.origin in self._known:  # others may have taken its place already
            self._known.move_to_end(target.origin)
        if robots.is_too_much_for(target.path):
            raise RejectedError(Code.DISALLOWED, "robots.txt has too many rules to tell")
        if not robots.allows(target.path):
            raise RejectedError(Code.DISALLOWED, "robots.txt")

    async def _wait_for(self, target: Target) -> Robots:
        task = self._coming.get(target.origin)
        if task is None:
            task = asyncio.create_task(self._learn(target))
            self._coming[target.origin] = task
        learned = await asyncio.shield(task)
        if isinstance(learned, RejectedError):
            raise learned.with_traceback(None)
        return learned

    async def _learn(self, target: Target) -> Robots | RejectedError:
        try:
            robots = await self._ask(target)
        except RejectedError as error:
            return error
        finally:
            del self._coming[target.origin]
        self._keep(target.origin, robots)
        return robots

    def _keep(self, origin: str, robots: Robots) -> None:
        self._known[origin] = robots
        self._nbytes += robots.nbytes + _ENTRY_NBYTES
        while self._nbytes > MAX_NBYTES and len(self._known) > 1:
            _, dropped = self._known.popitem(last=False)
            self._nbytes -= dropped.nbytes + _ENTRY_NBYTES
