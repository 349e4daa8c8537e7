"""An HTTP/1.1 reverse proxy that misbehaves on request, to stand between a client and S3.

    with FaultProxy("http://127.0.0.1:9000", first(2, Status(503), "PUT")) as proxy:
        client = boto3.client("s3", endpoint_url=proxy.url)

Whole bodies are held in memory: a request is read to its end, then the rule decides, then it is
forwarded on a connection of its own. The Host header goes upstream as the client sent it, because
S3 signatures cover it. When upstream cannot be reached, the client's connection is closed.
"""

import base64
import contextlib
import http.client
import http.server
import socket
import ssl
import sys
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

CHUNK = 64 * 1024
CRC = "x-amz-checksum-crc32"
HOP_BY_HOP = {"connection", "keep-alive", "expect", "transfer-encoding", "te", "trailer", "upgrade"}
ERROR_CODES = {429: "TooManyRequests", 500: "InternalError", 503: "SlowDown"}


@dataclass(frozen=True, slots=True)
class Drop:
    """Close the connection; upstream never sees the request."""


@dataclass(frozen=True, slots=True)
class DropAfter:
    """Forward the request, then close the connection without giving the answer."""


@dataclass(frozen=True, slots=True)
class Truncate:
    """Give the true headers and only the first bytes of the body, then close the connection."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Status:
    """Answer with this status and an S3 error; upstream never sees the request."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    code: str = ""


@dataclass(frozen=True, slots=True)
class Delay:
    """Wait, then pass the request on."""

    seconds: float


@dataclass(frozen=True, slots=True)
class DelayBody:
    """Wait this long before each 64 KiB of the answer's body."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Give:
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


class Handler(http.server.BaseHTTPRequestHandler):
    """One client connection. The base class answers Expect: 100-continue before do_PUT runs."""

    given_back: tuple[str, ...] = ("x-amz-checksum-algorithm", CRC)
    """headers that a server gives back if it knows what they ask for"""
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: "Server"
    close_connection: bool

    def relay(self) -> None:
        body = self.read_body()
        fault = self.server.decide(self.command, self.path, self.headers)
        if isinstance(fault, Delay):
            self.server.closing.wait(fault.seconds)
        if isinstance(fault, Bend):
            body = bytes([body[0] ^ 1]) + body[1:]
        if self.server.knows_crc and self.is_another(body):
            fault = Status(400, code="BadDigest")
        if isinstance(fault, Drop):
            self.close_connection = True
        elif isinstance(fault, Status):
            self.refuse(fault)
        elif isinstance(fault, Give):
            said = [("Content-Range", fault.content_range)] if fault.content_range else []
            self.answer(206 if said else 200, said, fault.body)
        else:
            self.forward(body, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = relay  # noqa: N815

    def is_another(self, body: bytes) -> bool:
        """Whether it is not the one that the CRC-32 in the head is of."""
        said = self.headers.get(CRC)
        return said is not None and base64.b64decode(said) != zlib.crc32(body).to_bytes(4, "big")

    def is_chunked(self) -> bool:
        return "chunked" in self.headers.get("Transfer-Encoding", "").lower()

    def read_body(self) -> bytes:
        if not self.is_chunked():
            return self.read_exactly(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.read_exactly(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass  # trailers of the transfer encoding; S3's own are inside the body
        return b"".join(chunks)

    def read_exactly(self, size: int) -> bytes:
        data = self.rfile.read(size)
        if len(data) < size:
            raise ConnectionAbortedError("the client closed within its request's body")
        return data

    def refuse(self, fault: Status) -> None:
        phrase = http.HTTPStatus(fault.status).phrase.replace(" ", "")
        code = fault.code or ERROR_CODES.get(fault.status, phrase)
        text = f"<Error><Code>{code}</Code><Message>injected</Message></Error>"
        headers = {"Content-Type": "application/xml", **fault.headers}
        self.answer(fault.status, list(headers.items()), text.encode())

    def forward(self, body: bytes, fault: Fault | None) -> None:
        upstream = http.client.HTTPConnection(*self.server.upstream, timeout=60)
        try:
            response = self.ask(upstream, body)
            data = response.read()
        except (ConnectionError, TimeoutError, http.client.HTTPException):
            self.close_connection = True
            return
        finally:
            upstream.close()
        if isinstance(fault, DropAfter):
            self.close_connection = True
        else:
            given = [(name, self.headers[name]) for name in self.given_back if name in self.headers]
            told = given if self.server.knows_crc and response.status == 200 else []
            self.answer(response.status, response.getheaders() + told, data, fault)

    def ask(self, upstream: http.client.HTTPConnection, body: bytes) -> http.client.HTTPResponse:
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in HOP_BY_HOP:
                upstream.putheader(name, value)
        if self.is_chunked():
            upstream.putheader("Transfer-Encoding", "chunked")
        upstream.endheaders(body or None, encode_chunked=self.is_chunked())
        return upstream.getresponse()

    def answer(
        self, status: int, headers: list[tuple[str, str]], body: bytes, fault: Fault | None = None
    ) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in HOP_BY_HOP | {"content-length"}:
                self.send_header(name, value)
        # An answer to HEAD gives the length of a body that is not there.
        head = self.command == "HEAD"
        length = dict(headers).get("Content-Length", "0") if head else str(len(body))
        body = b"" if head else body
        chunked = isinstance(fault, Chunked) and not head
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
            ends = range(0, len(body), CHUNK)
            chunks = [body[at : at + CHUNK] for at in ends] + [b""]
            body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
        elif status not in (204, 304):
            self.send_header("Content-Length", length)
        if isinstance(fault, Truncate):
            body, self.close_connection = body[: fault.nbytes], True
        self.end_headers()
        for at in range(0, len(body), CHUNK):
            if isinstance(fault, DelayBody):
                self.server.closing.wait(fault.seconds)
            self.wfile.write(body[at : at + CHUNK])

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    """Joins its threads at the end, which is why it knows its open connections."""

    daemon_threads = False
    request_queue_size = 128

    def __init__(
        self,
        upstream: tuple[str, int],
        rule: Rule,
        tls: ssl.SSLContext | None,
        *,
        knows_crc: bool,
        handler: type[Handler],
    ) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.upstream, self.rule, self.tls, self.knows_crc = upstream, rule, tls, knows_crc
        self.lock, self.closing = threading.Lock(), threading.Event()
        self.requests: list[tuple[str, str]] = []
        self.errors: list[BaseException] = []
        self.open: set[socket.socket] = set()

    def decide(self, method: str, path: str, headers: Message) -> Fault | None:
        with self.lock:
            self.requests.append((method, path))
            n = len(self.requests)
        return self.rule(method, path, n, headers)

    def get_request(self) -> tuple[socket.socket, Any]:
        plain, address = super().get_request()
        if self.tls is None:
            return plain, address
        wrapped = self.tls.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        return wrapped, address  # the handler's thread shakes hands, when it reads

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.lock:
            self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self.lock:
            self.open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, ConnectionError):
            self.errors.append(error)

    def hang_up(self) -> None:
        with self.lock:
            for connection in self.open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class FaultProxy:
    """The proxy as a context manager; an exception in the rule comes out at its end.

    With `tls` it serves HTTPS. With `knows_crc` it is as a server that compares the CRC-32 of
    bodies, whatever the one behind it does.
    """

    def __init__(
        self,
        upstream_url: str,
        rule: Rule,
        *,
        tls: ssl.SSLContext | None = None,
        knows_crc: bool = False,
        handler: type[Handler] = Handler,
    ) -> None:
        parts = urlsplit(upstream_url)
        upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._server = Server(upstream, rule, tls, knows_crc=knows_crc, handler=handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._server.server_port}"

    @property
    def requests(self) -> list[tuple[str, str]]:
        """A copy of the (method, path with query) of the requests seen so far."""
        with self._server.lock:
            return list(self._server.requests)

    def __enter__(self) -> "FaultProxy":
        self._thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        self._server.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.hang_up()
        self._server.server_close()
        if self._server.errors and error is None:
            raise self._server.errors[0]
