"""Who is asked next: bounds on requests in all and for each host, and on the bytes that come.

A host with a million URLs and one with a single URL get the same share while both wait, and a slow
one holds no more than its own few requests. A host that asks for a pause gets it, and nobody holds
a place meanwhile.

A host that failed many times in a row is asked for one thing at a time, and all that wait for it
share the fate of that one. Else ten thousand URLs of a dead host, each with its own attempts and
time limits, would keep a run waiting for hours; and if they failed at once without being asked
for, a minute without network would cost all of them.

`BodyLimit` says how many bodies may come at a time, so that memory holds whatever they turn out to
be.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.fetch.answer_rules import LONGEST_WAIT_S, LaterError

DEAD = frozenset({Code.DNS, Code.REFUSED, Code.UNREACHABLE, Code.TIMEOUT})
FAILURES_IN_A_ROW = 24


@dataclass(slots=True)
class _HostState:
    """The state of a host, kept while any URL of it is waiting or under way."""

    busy: int = 0
    failures: int = 0
    not_before: float = 0.0
    queued: bool = False
    waiting: "deque[asyncio.Future[None]]" = field(default_factory=deque)


class HostLimits:
    """Limits on the requests of one event loop, in all and to each host."""

    def __init__(
        self, *, in_flight: int, per_host: int, may_start: Callable[[], bool] = lambda: True
    ) -> None:
        """Set the limits on requests.

        `may_start` is asked before each turn. If it says no, it is asked again when a
        request ends, so it must say yes when no request is under way.
        """
        self._free, self._per_host, self._may_start = in_flight, per_host, may_start
        self._hosts: dict[str, _HostState] = {}
        self._ready: deque[str] = deque()

    async def take(self, host: str) -> None:
        """Wait for a turn to ask this host. `give_back` ends the turn.

        Raise RejectedError if `give_back` meanwhile gets a failure of this host that counts for
        all requests that wait.
        """
        waiter = asyncio.get_running_loop().create_future()
        self._hosts.setdefault(host, _HostState()).waiting.append(waiter)
        self._go_on(host)
        try:
            await waiter
        except asyncio.CancelledError:
            came = waiter.done() and not waiter.cancelled() and waiter.exception() is None
            if came:  # in the moment of the cancellation
                self._leave(host)
            raise

    def give_back(self, host: str, failure: RejectedError | None) -> None:
        """End a turn with a host, and let the next request begin.

        If the failure is a LaterError, the host gets no request for as long as it asks for, or for
        LONGEST_WAIT_S if that is less. After FAILURES_IN_A_ROW failures with codes of DEAD, or if a
        host asks for a longer pause, the failure is raised in all requests that wait for this host.
        The host then gets one request at a time, until one ends without such a failure.
        """
        turns = self._hosts[host]
        failed = failure is not None and failure.code in DEAD
        turns.failures = turns.failures + 1 if failed else 0
        if isinstance(failure, LaterError):
            if failure.after_s > LONGEST_WAIT_S:
                turns.failures = FAILURES_IN_A_ROW
            loop = asyncio.get_running_loop()
            not_before = loop.time() + min(failure.after_s, LONGEST_WAIT_S)
            turns.not_before = max(turns.not_before, not_before)
            loop.call_at(turns.not_before, self._go_on, host)
        if failure is not None and turns.failures >= FAILURES_IN_A_ROW:
            shared = (failure.code, f"{failure.detail}, as others there", *failure.args[2:])
            for waiter in turns.waiting:
                if not waiter.done():
                    waiter.set_exception(type(failure)(*shared))
            turns.waiting.clear()
        self._leave(host)

    def _leave(self, host: str) -> None:
        self._hosts[host].busy -= 1
        self._free += 1
        self._go_on(host)

    def _go_on(self, host: str) -> None:
        """Queue a host if one of its requests may begin, or forget it if it has none.

        Then begin the requests of queued hosts while there is room.
        """
        self._line_up(host)
        while self._free and self._ready and self._may_start():
            ready = self._ready.popleft()
            turns = self._hosts[ready]
            turns.queued = False
            while turns.waiting:
                waiter = turns.waiting.popleft()
                if not waiter.done():
                    waiter.set_result(None)
                    turns.busy += 1
                    self._free -= 1
                    break
            self._line_up(ready)

    def _line_up(self, host: str) -> None:
        if host not in self._hosts:  # forgotten before its pause ended
            return
        turns = self._hosts[host]
        is_paused = turns.not_before > 0 and turns.not_before > asyncio.get_running_loop().time()
        if turns.queued or is_paused:
            return
        room = 1 if turns.failures >= FAILURES_IN_A_ROW else self._per_host
        if turns.waiting and turns.busy < room:
            turns.queued = True
            self._ready.append(host)
        elif not (turns.waiting or turns.busy):
            del self._hosts[host]


ROOM_NBYTES = 128 << 20
USUAL_NBYTES = 100_000  # of a body, until some have come


class CrowdedError(Exception):
    """The error for a response body given up to save memory, and to be fetched again later."""


@dataclass(slots=True)
class BodyLimit:
    """A limit of the bytes of response bodies that are being received.

    No body is begun while those under way fill half of the limit, or will by the mean size of
    those before. If bodies turn out larger, one after another is given up until the rest
    fits. `max_nbytes` is at least twice the largest body, so some always end.
    """

    max_nbytes: int
    nbytes: int = 0
    """The bytes that have come."""
    bodies: int = 0
    usual_nbytes: float = USUAL_NBYTES
    share: float = 0.25
    """The share of the bodies under way that is usually there: most requests wait for their first
    byte. Where memory was ever crowded, all of it is counted."""

    @property
    def takes_one_more(self) -> bool:
        expected = max(self.nbytes, self.bodies * self.usual_nbytes * self.share)
        return not self.bodies or expected < self.max_nbytes / 2

    def is_crowded(self) -> bool:
        """Return whether more bytes have come than the limit allows.

        If so, all bodies under way are counted in full from then on.
        """
        if self.nbytes <= self.max_nbytes:
            return False
        self.share = 1.0
        return True

    def learn(self, nbytes: int) -> None:
        """Take the size of a finished body into the mean."""
        self.usual_nbytes += (nbytes - self.usual_nbytes) / 16


def body_limit_for(max_nbytes: int) -> BodyLimit:
    """Return a limit that fits bodies of up to `max_nbytes`."""
    return BodyLimit(max(ROOM_NBYTES, 2 * max_nbytes))
