"""An HTTP/1.1 reverse proxy that misbehaves on request, to stand between a client and S3.

    with FaultProxy("http://127.0.0.1:9000", first(2, Status(503), "PUT")) as proxy:
        client = boto3.client("s3", endpoint_url=proxy.url)

Whole bodies are held in memory: a request is read to its end, then the rule decides, then it is
forwarded on a connection of its own. The Host header goes upstream as the client sent it, because
S3 signatures cover it. When upstream cannot be reached, the client's connection is closed.
"""

import contextlib
import http.client
import itertools
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from email.message import Message
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import urlsplit

from tests.kit.webserver import Connection, Request, WebServer

CHUNK = 64 * 1024
HOP_BY_HOP = {"connection", "keep-alive", "expect", "transfer-encoding", "te", "trailer", "upgrade"}
ERROR_CODES = {429: "TooManyRequests", 500: "InternalError", 503: "SlowDown"}


@dataclass(frozen=True, slots=True)
class Drop:
    """Close the connection; upstream never sees the request."""


@dataclass(frozen=True, slots=True)
class DropAfter:
    """Forward the request, then close the connection without giving the answer."""


class Truncate(NamedTuple):
    """Give the true headers and only the first bytes of the body, then close the connection."""

    nbytes: int


class Status(NamedTuple):
    """Answer with this status and an S3 error; upstream never sees the request."""

    status: int
    headers: Mapping[str, str] = MappingProxyType({})


class Delay(NamedTuple):
    """Wait, then pass the request on."""

    seconds: float


class DelayBody(NamedTuple):
    """Wait this long before each 64 KiB of the answer's body."""

    seconds: float


class Give(NamedTuple):
    """Answer with these bytes, as part of a file where there is a range."""

    body: bytes
    content_range: str = ""


@dataclass(frozen=True, slots=True)
class Chunked:
    """Give the answer in chunks, without its length."""


@dataclass(frozen=True, slots=True)
class Bend:
    """Pass the request on with another first byte of its body."""


Fault = Drop | DropAfter | Truncate | Status | Delay | DelayBody | Give | Chunked | Bend
Rule = Callable[[str, str, int, Message], Fault | None]


def first(count: int, fault: Fault, method: str = "", part: str = "") -> Rule:
    """A rule: this fault for the first requests of that method with that text in their path."""
    lock, left = threading.Lock(), count

    def rule(seen: str, path: str, _n: int, _headers: Message) -> Fault | None:
        nonlocal left
        if method not in ("", seen) or part not in path:
            return None
        with lock:
            left -= 1
            return fault if left >= 0 else None

    return rule


class Answer(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class FaultProxy(WebServer):
    """The proxy as a context manager. With `tls` it serves HTTPS."""

    def __init__(self, upstream_url: str, rule: Rule, *, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(self.relay, tls=tls)
        parts = urlsplit(upstream_url)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._rule, self._numbers = rule, itertools.count(1)

    @property
    def seen(self) -> list[tuple[str, str]]:
        """The (method, path with query) of the requests seen so far."""
        return [(request.method, request.path) for request in self.requests]

    def relay(self, connection: Connection, request: Request) -> bool:
        fault = self._rule(request.method, request.path, next(self._numbers), request.headers)
        if isinstance(fault, Delay):
            connection.rest(fault.seconds)
        if isinstance(fault, Bend):
            request = replace(request, body=bytes([request.body[0] ^ 1]) + request.body[1:])
        answer = None if isinstance(fault, Drop) else self._answer_of(request, fault)
        if answer is None or isinstance(fault, DropAfter):
            return False
        self._give(connection, request, self.passed(request, answer), fault)
        return not isinstance(fault, Truncate)

    def passed(self, _request: Request, answer: Answer) -> Answer:
        """Return what a client is given of an answer: proxies of a kind of their own change it."""
        return answer

    def _answer_of(self, request: Request, fault: Fault | None) -> Answer | None:
        if isinstance(fault, Status):
            phrase = http.HTTPStatus(fault.status).phrase.replace(" ", "")
            code = ERROR_CODES.get(fault.status, phrase)
            text = f"<Error><Code>{code}</Code><Message>injected</Message></Error>"
            headers = {"Content-Type": "application/xml", **fault.headers}
            return Answer(fault.status, [*headers.items()], text.encode())
        if isinstance(fault, Give):
            span = [("Content-Range", fault.content_range)] if fault.content_range else []
            return Answer(206 if span else 200, span, fault.body)
        upstream = http.client.HTTPConnection(*self._upstream, timeout=60)
        with contextlib.closing(upstream):
            try:
                response = self.ask(upstream, request)
                return Answer(response.status, response.getheaders(), response.read())
            except (ConnectionError, TimeoutError, http.client.HTTPException):
                return None

    def ask(
        self, upstream: http.client.HTTPConnection, request: Request
    ) -> http.client.HTTPResponse:
        upstream.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.items():
            if name.lower() not in HOP_BY_HOP:
                upstream.putheader(name, value)
        if request.is_chunked:
            upstream.putheader("Transfer-Encoding", "chunked")
        upstream.endheaders(request.body or None, encode_chunked=request.is_chunked)
        return upstream.getresponse()

    def _give(
        self, connection: Connection, request: Request, answer: Answer, fault: Fault | None
    ) -> None:
        status, headers, body = answer
        kept = [(n, v) for n, v in headers if n.lower() not in HOP_BY_HOP | {"content-length"}]
        length = str(len(body))
        if request.method == "HEAD":  # gives the length of a body that is not there
            length = {name.lower(): value for name, value in headers}.get("content-length", "0")
            body = b""
        elif isinstance(fault, Chunked):
            chunks = [body[at : at + CHUNK] for at in range(0, len(body), CHUNK)] + [b""]
            body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
        if isinstance(fault, Chunked) and request.method != "HEAD":
            kept.append(("Transfer-Encoding", "chunked"))
        elif status not in (204, 304):
            kept.append(("Content-Length", length))
        if isinstance(fault, Truncate):
            body = body[: fault.nbytes]
        head = "".join(f"{name}: {value}\r\n" for name, value in kept)
        connection.send(f"HTTP/1.1 {status} So\r\n{head}\r\n".encode("latin-1"))
        for at in range(0, len(body), CHUNK):
            if isinstance(fault, DelayBody):
                connection.rest(fault.seconds)
            connection.send(body[at : at + CHUNK])
