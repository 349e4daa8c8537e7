"""libcurl's transfers on an event loop: a coroutine for each, one thread for all.

libcurl's sockets are kept in a selector of their own, and the loop watches that one. A transfer
that begins and ends then costs the loop nothing, which is a tenth of the fetcher's processor time.
"""

import asyncio
import math
import selectors
from typing import Any

import pycurl

_DONE = (0, "")


class CurlLoop:
    """A loop that runs many libcurl transfers on one event loop.

    libcurl tells which sockets and which time it waits for; the loop tells libcurl when they come.
    """

    def __init__(self, *, connections: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._timer_ends = self._due = math.inf
        self._watched: set[int] = set()
        self._sockets = selectors.DefaultSelector()
        self._loop.add_reader(self._sockets.fileno(), self._go_on)
        self._waiting: dict[Any, asyncio.Future[tuple[int, str]]] = {}
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._watch)
        self._multi.setopt(pycurl.M_TIMERFUNCTION, self._set_timer)
        self._multi.setopt(pycurl.M_MAXCONNECTS, connections)

    async def perform(self, handle: Any) -> tuple[int, str]:
        """Run a transfer. Return libcurl's error and its message; an error of 0 is success."""
        future: asyncio.Future[tuple[int, str]] = self._loop.create_future()
        self._multi.add_handle(handle)
        self._waiting[handle] = future
        try:
            return await future
        finally:
            del self._waiting[handle]
            self._multi.remove_handle(handle)

    def close(self) -> None:
        """Close the sockets and the timer. No transfer may be running."""
        self._loop.remove_reader(self._sockets.fileno())
        self._multi.close()
        self._sockets.close()
        if self._timer is not None:
            self._timer.cancel()

    def _watch(self, what: int, socket: int, _multi: object, _data: object) -> None:
        """Watch a socket, or stop watching it. libcurl numbers its events as `selectors` does."""
        if what in (pycurl.POLL_REMOVE, pycurl.POLL_NONE):
            if socket in self._watched:
                self._watched.remove(socket)
                self._sockets.unregister(socket)
        elif socket in self._watched:
            self._sockets.modify(socket, what)
        else:
            self._watched.add(socket)
            self._sockets.register(socket, what)

    def _go_on(self) -> None:
        for key, events in self._sockets.select(0):
            self._multi.socket_action(key.fd, events)
        self._finish_ended()

    def _set_timer(self, ms: int) -> None:
        """Note when libcurl wants to be called.

        libcurl moves this time with each request. A later time costs nothing: the running
        timer finds out when it ends.
        """
        self._due = math.inf if ms < 0 else self._loop.time() + ms / 1000
        if self._due < self._timer_ends:
            self._start_timer()

    def _start_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._due, self._end_timer)
        self._timer_ends = self._due

    def _end_timer(self) -> None:
        self._timer, self._timer_ends = None, math.inf
        if self._due <= self._loop.time():
            self._due = math.inf
            self._multi.socket_action(pycurl.SOCKET_TIMEOUT, 0)
            self._finish_ended()
        elif self._due < math.inf:
            self._start_timer()

    def _finish_ended(self) -> None:
        """Give the results of the transfers that have ended to the callers of `perform`."""
        left = 1
        while left:
            left, done, failed = self._multi.info_read()
            for handle in done:
                self._end(handle, _DONE)
            for handle, error, message in failed:
                self._end(handle, (error, message))

    def _end(self, handle: Any, how: tuple[int, str]) -> None:
        future = self._waiting[handle]
        if not future.done():
            future.set_result(how)
