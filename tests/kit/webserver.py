"""Real web servers on loopback that answer as told, well or badly, with and without TLS.

    with WebServer({"/cat.jpg": ok(data), "/stall": stall}) as server:
        fetcher.submit(f"{server.url}/cat.jpg")

A behaviour takes the connection and the request, sends what it likes, and tells by its result
whether another request may come. Every connection has a thread; all are closed and joined at the
end, so a behaviour that waits must wait in `Connection.rest` or on its socket.
"""

import contextlib
import http.client
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from email.message import Message
from pathlib import Path

MAX_LINE_NBYTES = 1 << 16
TLS_HELLO = b"\x16\x03"


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    headers: Message
    method: str = "GET"
    body: bytes = b""

    @property
    def is_chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()


class Connection:
    """What a behaviour has in its hands."""

    def __init__(self, raw: socket.socket, closing: threading.Event) -> None:
        self.socket, self._closing, self.file = raw, closing, raw.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def rest(self, seconds: float) -> bool:
        """Wait; false when the server is being closed."""
        return not self._closing.wait(seconds)

    def reset(self) -> None:
        """End with RST instead of FIN."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def wait_for_the_end(self) -> None:
        """Until the client hangs up."""
        while self.socket.recv(1 << 16):
            pass

    def request(self) -> Request | None:
        """The next one; None when the client has hung up."""
        if self.file.peek(2).startswith(TLS_HELLO):
            self.send(response(400))
            return None
        first = self.file.readline(MAX_LINE_NBYTES)
        if not first.endswith(b"\r\n"):
            return None
        headers = http.client.parse_headers(self.file)
        method, path, *_ = first.decode("latin-1").split(" ")
        if headers.get("expect", "").lower() == "100-continue":
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        request = Request(path, headers, method)
        if not request.is_chunked:
            return replace(request, body=self._read(int(headers.get("content-length", 0))))
        chunks = []
        while size := int(self._line().split(b";")[0], 16):
            chunks.append(self._read(size))
            self._line()
        while self._line() != b"\r\n":
            pass  # trailers of the transfer encoding; S3's own are inside the body
        return replace(request, body=b"".join(chunks))

    def _read(self, nbytes: int) -> bytes:
        """So many bytes of a body."""
        data = self.file.read(nbytes)
        if len(data) < nbytes:
            raise ConnectionAbortedError("the client closed within its request's body")
        return data

    def _line(self) -> bytes:
        if not (line := self.file.readline()):
            raise ConnectionAbortedError("the client closed within its request's body")
        return line


Behaviour = Callable[[Connection, Request], bool]


def raw(data: bytes, *, keep: bool = False) -> Behaviour:
    """Send these very bytes."""

    def behave(connection: Connection, _: Request) -> bool:
        connection.send(data)
        return keep

    return behave


def response(status: int | str, body: bytes = b"", /, **headers: object) -> bytes:
    """A whole answer. Header names are given with `_` for `-`."""
    lines = {name.replace("_", "-"): value for name, value in headers.items()}
    lines.setdefault("Content-Length", len(body))
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
    return f"HTTP/1.1 {status} So\r\n{text}\r\n".encode() + body


def ok(body: bytes, /, **headers: object) -> Behaviour:
    return raw(response(200, body, **{"Content_Type": "image/jpeg", **headers}), keep=True)


def range_of(data: bytes, wanted: str, /, **headers: object) -> bytes:
    """A part of a file, as a server should give it; where none is asked for, all of it."""
    if not wanted:
        return response(200, data, **headers)
    start, _, last = wanted.removeprefix("bytes=").partition("-")
    end = min(int(last) + 1 if last else len(data), len(data))
    if int(start) >= len(data):
        return response(416, Content_Range=f"bytes */{len(data)}")
    span = f"bytes {start}-{end - 1}/{len(data)}"
    return response(206, data[int(start) : end], Content_Range=span, **headers)


def ranges_of(data: bytes, etag: str = '"1"') -> Behaviour:
    """A file in ranges."""

    def behave(connection: Connection, request: Request) -> bool:
        connection.send(range_of(data, request.headers["range"], ETag=etag))
        return True

    return behave


def status(code: int, body: bytes = b"", /, **headers: object) -> Behaviour:
    return raw(response(code, body, **headers), keep=True)


def redirect(to: str, code: int = 302) -> Behaviour:
    return status(code, Location=to)


def stall(connection: Connection, _: Request) -> bool:
    """Never answer."""
    connection.wait_for_the_end()
    return False


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """One after another, the last one for good."""
    left, lock = list(behaviours), threading.Lock()

    def behave(connection: Connection, request: Request) -> bool:
        with lock:
            now = left.pop(0) if len(left) > 1 else left[0]
        return now(connection, request)

    return behave


class WebServer:
    """A server as a context manager. A path that no route names gets a 404."""

    def __init__(
        self,
        routes: Mapping[str, Behaviour] | Behaviour,
        *,
        tls: ssl.SSLContext | None = None,
        address: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._routes, self._tls = routes, tls
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family, backlog=512)
        self.port = self._listener.getsockname()[1]
        host = f"[{address}]" if ":" in address else address
        self.url = f"http{'s' if tls else ''}://{host}:{self.port}"
        self._closing, self._lock = threading.Event(), threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._requests: list[Request] = []
        self.connections = 0

    @property
    def requests(self) -> list[Request]:
        """Those that came so far."""
        with self._lock:
            return list(self._requests)

    def paths(self, *, robots: bool = False) -> list[str]:
        """What was asked for so far, robots.txt left out unless asked for."""
        seen = [request.path for request in self.requests]
        return [path for path in seen if robots or path != "/robots.txt"]

    def __enter__(self) -> "WebServer":
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, act: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=act, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                taken, _ = self._listener.accept()
            except OSError:
                return
            taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open.add(taken)
                self.connections += 1
            self._start(self._serve, taken)

    def _serve(self, taken: socket.socket) -> None:
        used = taken
        with contextlib.suppress(OSError):
            if self._tls is not None:
                used = self._tls.wrap_socket(taken, server_side=True)
                with self._lock:
                    self._open.discard(taken)
                    self._open.add(used)
            connection = Connection(used, self._closing)
            with connection.file:
                self._converse(connection)
        with self._lock:
            self._open.discard(used)
            self._open.discard(taken)
        used.close()
        taken.close()

    def _converse(self, connection: Connection) -> None:
        while not self._closing.is_set():
            request = connection.request()
            if request is None:
                return
            with self._lock:
                self._requests.append(request)
            if not self._behaviour(request)(connection, request):
                return

    def _behaviour(self, request: Request) -> Behaviour:
        if callable(self._routes):
            return self._routes
        return self._routes.get(request.path, status(404))


@contextlib.contextmanager
def black_hole(address: str = "127.0.0.1") -> Iterator[str]:
    """The URL of a port that neither accepts nor refuses: its backlog is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((address, 0), backlog=0))
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(listener.getsockname())
        yield f"http://{address}:{listener.getsockname()[1]}"


def refused_port() -> int:
    """A port of loopback at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority of the tests, and what it signs. Needs the openssl command."""

    home: Path
    made: dict[str, ssl.SSLContext] = field(default_factory=dict)

    @property
    def bundle(self) -> Path:
        return self.home / "ca.pem"

    @classmethod
    def create(cls, home: Path) -> "Authority":
        _openssl(home, "req", "-x509", *_NEW_KEY, "ca.key", "-out", "ca.pem", "-subj", "/CN=Tests")
        return cls(home)

    def context(
        self, name: str = "localhost", *, address: str = "127.0.0.1", expired: bool = False
    ) -> ssl.SSLContext:
        """What a server needs to be `name` and `address`."""
        stem = f"{name}-{'old' if expired else 'new'}"
        extra = self.home / f"{stem}.ext"
        extra.write_text(f"subjectAltName=DNS:{name},IP:{address}\n")
        request = "-new", *_NEW_KEY, f"{stem}.key", "-out", f"{stem}.csr", "-subj", "/CN=x"
        _openssl(self.home, "req", *request)
        _openssl(
            *(self.home, "x509", "-req", "-in", f"{stem}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-extfile", extra.name, "-out", f"{stem}.pem"),
            *("-days", "-1" if expired else "30"),
        )
        return self._load(stem)

    def self_signed(self) -> ssl.SSLContext:
        """A certificate that nobody vouches for."""
        _openssl(
            *(self.home, "req", "-x509", *_NEW_KEY, "self.key", "-out", "self.pem"),
            *("-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1"),
        )
        return self._load("self")

    def _load(self, stem: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.home / f"{stem}.pem", self.home / f"{stem}.key")
        return context


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout")


def _openssl(home: Path, *args: str) -> None:
    subprocess.run(["openssl", *args], cwd=home, check=True, capture_output=True, timeout=60)
