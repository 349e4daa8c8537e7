"""GETs over open connections: few connections, and whatever is odd goes through the session."""

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError, ReadTimeoutError
from botocore.httpsession import URLLib3Session

from tests.kit.serving import serving
from wdsprep.store.s3.reads import Wire

BODY = bytes(range(256)) * 400
Say = Callable[["Handler"], None]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    server: "Server"

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def do_GET(self) -> None:
        self.server.requests.append(dict(self.headers))
        self.server.say(self)

    def log_message(self, *_: Any) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.connections, self.requests, self.say = 0, list[dict[str, str]](), plainly
        self.url = f"http://127.0.0.1:{self.server_address[1]}/bucket/key?signed=%20yes"
        self.silent = threading.Event()


def plainly(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("content-length", str(len(BODY)))
    handler.end_headers()
    handler.wfile.write(BODY)


def then_closes_unsaid(handler: Handler) -> None:
    plainly(handler)
    handler.close_connection = True


def closes_as_said(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(BODY)))
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.wfile.write(BODY)


def says_nothing_the_second_time(handler: Handler) -> None:
    if len(handler.server.requests) == 2:
        handler.server.silent.wait()
        handler.close_connection = True
    else:
        plainly(handler)


def breaks_off_the_second_time(handler: Handler) -> None:
    if len(handler.server.requests) == 2:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-")
        handler.close_connection = True
    else:
        plainly(handler)


def refuses_in_chunks_from_the_second_time_on(handler: Handler) -> None:
    if len(handler.server.requests) == 1:
        return plainly(handler)
    handler.send_response(403)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"8\r\n<Error/>\r\n0\r\n\r\n")
    return None


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as server:
        try:
            yield server
        finally:
            server.silent.set()


def get(wire: Wire, url: str) -> bytes:
    with closing(wire.get(url, {"Range": "bytes=0-9"})) as answer:
        assert answer.status == 200
        data: bytes = answer.body.read(answer.nbytes)
        answer.keep()
    return data


def test_one_connection_serves_all_with_the_same_headers_that_matter(server: Server) -> None:
    with closing(URLLib3Session()) as session:
        wire = Wire(session)
        assert [get(wire, server.url) for _ in range(20)] == [BODY] * 20
    assert server.connections == 1
    for name in ("Host", "Range", "Accept-Encoding"):
        assert len({request[name] for request in server.requests}) == 1


@pytest.mark.parametrize(
    "say",
    [then_closes_unsaid, closes_as_said, breaks_off_the_second_time],
    ids=lambda f: f.__name__,
)
def test_a_connection_that_ends_is_replaced(server: Server, say: Say) -> None:
    server.say = say
    with closing(URLLib3Session()) as session:
        wire = Wire(session)
        assert [get(wire, server.url) for _ in range(5)] == [BODY] * 5
    assert server.connections > 1


def test_a_body_that_was_left_ends_its_connection(server: Server) -> None:
    with closing(URLLib3Session()) as session:
        wire = Wire(session)
        get(wire, server.url)
        wire.get(server.url, {}).close()
        assert get(wire, server.url) == BODY
    assert server.connections == 2


def test_silence_is_a_timeout_as_boto3_has_it(server: Server) -> None:
    server.say = says_nothing_the_second_time
    with closing(URLLib3Session(timeout=(5, 0.2))) as session:
        wire = Wire(session)
        get(wire, server.url)
        with pytest.raises(ReadTimeoutError):
            get(wire, server.url)
        assert get(wire, server.url) == BODY


def test_an_answer_in_chunks_is_read_to_its_end(server: Server) -> None:
    server.say = refuses_in_chunks_from_the_second_time_on
    with closing(URLLib3Session(timeout=(5, 20))) as session:
        wire = Wire(session)
        get(wire, server.url)
        with closing(wire.get(server.url, {})) as answer:
            assert (answer.status, answer.nbytes) == (403, -1)
            assert answer.body.read(8192) == b"<Error/>"


def test_nobody_there_is_said_as_boto3_says_it(server: Server) -> None:
    with closing(URLLib3Session()) as session:
        wire = Wire(session)
        with pytest.raises(EndpointConnectionError):
            get(wire, "http://127.0.0.1:1/bucket/key")
        assert get(wire, server.url) == BODY
