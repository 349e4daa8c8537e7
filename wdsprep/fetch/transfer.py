"""One GET with libcurl, held to bounds that the server cannot stretch.

libcurl, because it takes the least processor time. 1,000 JPEGs of 100 KB from a loopback server on
the same two cores, 64 at a time: images a second and milliseconds of processor time an image of the
client alone, in the median of two rounds on a machine with other work
(`tools/bench fetch --only clients` repeats it, but for the last line):

                                    HTTP             HTTPS
    libcurl, bare                   4,670   0.15     2,060   0.29
    libcurl as it is used here      3,070   0.27     1,310   0.55
    aiohttp, bare                   2,820   0.32     1,120   0.59
    aiohttp in its place here       1,440   0.67       820   0.94

The last one has the same checks, attempts and turns, and its sockets are checked as they are
opened. TLS has one store of certificates for all handles, and sessions are resumed.

Redirects are not followed here, so that each hop is checked like the first. Every address is
checked where the socket to it is opened: after names are resolved, whatever resolved them. Proxies
that the environment names are not used, as a proxy would connect to any address for us. There are
no cookies, no netrc, and no HTTP/2: eight images over one connection end together when it breaks.

Certificates are believed by `SSL_CERT_FILE`, as curl and Python's own programs do, else by the
machine's own certificates, else by Mozilla's as the certifi package has them.

`CurlLoop` runs libcurl's transfers on an event loop: a coroutine for each, one thread for all.
libcurl's sockets are kept in a selector of their own, and the loop watches that one. A transfer
that begins and ends then costs the loop nothing, which is a tenth of the fetcher's processor time.
"""

import asyncio
import math
import selectors
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pycurl

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.errors import UsageError, WorkError
from wdsprep.fetch.answer_rules import Head, rejection_for_curl, too_many_bytes
from wdsprep.fetch.limits import BodyLimit, CrowdedError, body_limit_for
from wdsprep.fetch.options import FetchRules, check_contact
from wdsprep.fetch.robots import TOKEN
from wdsprep.fetch.urls import is_public
from wdsprep.version import __version__

MAX_HEAD_NBYTES = 1 << 16
DRAIN_NBYTES = 1 << 14  # a body that nobody wants is read to the end to keep the connection
READ_NBYTES = 1 << 17
SWITCHING = 101


Answer = tuple[Head, bytes]
"""The head and the body of an answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerRule:
    """A rule for how an answer is taken.

    `judge` sees the head before the body is read. It returns whether the body is wanted, or raises
    RejectedError.
    """

    judge: Callable[[Head], bool]
    max_nbytes: int
    cut: bool = False
    """Take the first `max_nbytes` of a longer body, instead of refusing it."""


class CurlLoop:
    """A loop that runs many libcurl transfers on one event loop.

    libcurl tells which sockets and which time it waits for; the loop tells libcurl when they come.
    Handles are kept, as many as were ever busy at a time.
    """

    def __init__(self, rules: FetchRules) -> None:
        self._rules, self.room = rules, body_limit_for(rules.max_nbytes)
        self._free = [Handle(rules, self.room)]  # so that wrong settings are told at once
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
        self._multi.setopt(pycurl.M_MAXCONNECTS, rules.requests)

    async def get(self, url: str, want: AnswerRule, *, timeout_s: float) -> tuple[Answer, float]:
        """Get a URL. Return the answer and the seconds it took.

        Raise CrowdedError if memory is short, and RejectedError if the transfer fails or `want`
        rejects the answer.
        """
        handle = self._free.pop() if self._free else Handle(self._rules, self.room)
        try:
            return await handle.get(self, url, want, timeout_s=timeout_s)
        finally:
            self._free.append(handle)

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
        """Close the handles, the sockets and the timer. No transfer may be running."""
        for handle in self._free:
            handle.close()
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
            for handle, error, message in [*((handle, 0, "") for handle in done), *failed]:
                future = self._waiting[handle]
                if not future.done():
                    future.set_result((error, message))


class Handle:
    """A libcurl handle, used for one GET after another, and what the current one has brought."""

    def __init__(self, rules: FetchRules, room: BodyLimit) -> None:
        self._allow_private, self._room = rules.allow_private_hosts, room
        agent, contact = f"{TOKEN}/{__version__}", check_contact(rules.contact)
        options = {
            pycurl.PROTOCOLS: pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS,
            pycurl.FOLLOWLOCATION: 0,
            pycurl.NOSIGNAL: 1,
            pycurl.PROXY: "",
            pycurl.NOPROXY: "*",
            pycurl.HTTP_VERSION: pycurl.CURL_HTTP_VERSION_1_1,
            pycurl.CAINFO: certificates_path(),
            pycurl.USERAGENT: f"{agent} (+{contact})" if contact else agent,
            pycurl.HTTPHEADER: ["Accept: image/*,*/*;q=0.8"],
            pycurl.ACCEPT_ENCODING: "identity",  # and undo what comes all the same, bounded
            pycurl.BUFFERSIZE: READ_NBYTES,
        }
        self._handle = pycurl.Curl()
        for option, value in options.items():
            self._handle.setopt(option, value)
        self._call_back(pycurl.HEADERFUNCTION, self._on_header, 0)
        self._call_back(pycurl.WRITEFUNCTION, self._on_body, 0)
        self._call_back(pycurl.OPENSOCKETFUNCTION, self._on_connect, pycurl.SOCKET_BAD)
        self._sockets: list[socket.socket] = []
        self._has_address = False

    async def get(
        self, multi: CurlLoop, url: str, want: AnswerRule, *, timeout_s: float
    ) -> tuple[Answer, float]:
        """Get a URL. Return the answer and the seconds it took."""
        self._want = want
        self._head: Head | None = None
        self._lines: list[bytes] = []
        self._chunks: list[bytes] = []
        self._head_nbytes = self._nbytes = 0
        self._wanted = False
        self._failure: Exception | None = None
        self._barred: Exception | None = None
        self._has_address = False
        self._handle.setopt(pycurl.URL, url)
        self._handle.setopt(pycurl.TIMEOUT_MS, max(1, round(timeout_s * 1000)))
        self._room.bodies += 1
        try:
            error, message = await multi.perform(self._handle)
        finally:
            self._room.bodies -= 1
            for opened in self._sockets:  # libcurl has a duplicate
                opened.close()
            self._sockets.clear()
            chunks, self._chunks = self._chunks, []
            self._room.nbytes -= sum(map(len, chunks))
        answer = self._answer(error, message, chunks)
        return answer, float(self._handle.getinfo(pycurl.TOTAL_TIME))

    def close(self) -> None:
        self._handle.close()

    def _call_back(self, option: int, act: Callable[..., Any], end: int) -> None:
        """Set a callback of libcurl.

        libcurl would swallow an exception of `act`. So the callback returns `end` instead, which
        tells libcurl to stop, and `_answer` raises the exception afterwards.
        """

        def call(*arguments: Any) -> Any:
            try:
                return act(*arguments)
            except Exception as error:  # noqa: BLE001 (raised by _answer)
                self._failure = error
                return end

        self._handle.setopt(option, call)

    def _answer(self, error: int, message: str, chunks: list[bytes]) -> Answer:
        if self._failure is not None:
            raise self._failure
        if self._head is None and self._barred is not None:
            raise self._barred
        is_full = self._want.cut and self._nbytes >= self._want.max_nbytes
        if self._head is None or (error and self._wanted and not is_full):
            system = self._handle.getinfo(pycurl.OS_ERRNO)
            resolved = self._has_address or bool(self._handle.getinfo(pycurl.PRIMARY_IP))
            raise rejection_for_curl(error, message, system=system, resolved=resolved)
        if self._wanted and not self._want.cut:
            self._room.learn(self._nbytes)
        return self._head, b"".join(chunks)[: self._want.max_nbytes]

    def _on_connect(self, _purpose: int, address: Any) -> Any:
        self._has_address = True
        host = address.addr[0]
        if not self._allow_private and not is_public(host):
            self._barred = RejectedError(Code.PRIVATE_ADDRESS, host)
            return pycurl.SOCKET_BAD
        try:
            opened = socket.socket(address.family, address.socktype, address.protocol)
        except OSError as error:
            self._barred = WorkError(f"cannot open a socket: {error}: lower the requests in flight")
            return pycurl.SOCKET_BAD
        self._barred = None  # of another address of the same name
        self._sockets.append(opened)
        return opened

    def _on_header(self, line: bytes) -> int | None:
        self._head_nbytes += len(line)
        if self._head_nbytes > MAX_HEAD_NBYTES:
            too_many = f"headers of more than {MAX_HEAD_NBYTES} bytes"
            raise RejectedError(Code.BROKEN_OFF, too_many)
        if self._head is not None:  # trailers
            return None
        if line not in (b"\r\n", b"\n"):
            self._lines.append(line)
            return None
        headers: dict[str, list[str]] = {}
        status = int(self._lines[0].split(None, 2)[1])
        for named in self._lines[1:]:
            name, _, value = named.decode("utf-8", "replace").partition(":")
            headers.setdefault(name.strip().lower(), []).append(value.strip())
        self._lines = []
        if status < 200 and status != SWITCHING:  # libcurl ends there
            return None
        self._head = head = Head(status=status, headers=headers)
        try:
            self._wanted = self._want.judge(head)
        except RejectedError as error:
            self._failure = error
            if error.code is Code.DISALLOWED:
                return 0
        return None if self._wanted or 0 <= head.nbytes <= DRAIN_NBYTES else 0

    def _on_body(self, chunk: bytes) -> int | None:
        self._nbytes += len(chunk)
        if not self._wanted:
            return None if self._nbytes <= DRAIN_NBYTES else 0
        self._chunks.append(chunk)
        self._room.nbytes += len(chunk)
        if self._room.is_crowded():
            raise CrowdedError
        if self._nbytes <= self._want.max_nbytes:
            return None
        if self._want.cut:
            return 0
        raise too_many_bytes(self._want.max_nbytes)


def certificates_path() -> str:
    paths = ssl.get_default_verify_paths()
    if paths.cafile:
        return paths.cafile
    import os

    if named := os.environ.get(paths.openssl_cafile_env):
        raise UsageError(f"{paths.openssl_cafile_env}={named}: no such file of certificates")
    import certifi

    return certifi.where()
