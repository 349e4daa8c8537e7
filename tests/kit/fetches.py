"""Fetchers for tests, and servers that answer in every way, most of them badly."""

import gzip
from concurrent.futures import Future
from contextlib import closing
from typing import Any

from tests.kit.webserver import Behaviour, Connection, Request, ok, raw, redirect, response, status
from wdsprep.dataset.reject_codes import Code
from wdsprep.fetch.client import Fetcher
from wdsprep.fetch.options import Fetched, FetchRules

IMAGE = bytes(range(256)) * 40
LONG_S = 60.0  # for what must succeed, however loaded the machine is
SHORT_S = 0.3  # for what must fail


def fetcher(**rules: Any) -> "closing[Fetcher]":
    defaults = {"timeout": LONG_S, "retries": 0, "allow_private_hosts": True, "allow_s3": True}
    defaults["ignore_robots"] = True
    return closing(Fetcher(FetchRules(**{**defaults, **rules})))


def fetch(url: str, **rules: Any) -> Fetched:
    with fetcher(**rules) as one:
        return one.submit(url).result(timeout=LONG_S)


# ------------------------------------------------------------------------------ what a server sends

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: image/jpeg\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def reset_in_the_body(connection: Connection, _: Request) -> bool:
    connection.send(response(200, IMAGE)[:2_000])
    connection.reset()
    return False


def endless(connection: Connection, _: Request) -> bool:
    connection.send(CHUNKED)
    while connection.rest(0):
        connection.send(b"1000\r\n" + b"x" * 0x1000 + b"\r\n")
    return False


def endless_header(connection: Connection, _: Request) -> bool:
    connection.send(HEAD)
    while connection.rest(0):
        connection.send(b"X-More: " + b"x" * 1_000 + b"\r\n")
    return False


def endless_interim(connection: Connection, _: Request) -> bool:
    while connection.rest(0):
        connection.send(b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n")
    return False


def slow_header(connection: Connection, _: Request) -> bool:
    for byte in HEAD * 1_000:
        connection.send(bytes([byte]))
        if not connection.rest(0.02):
            break
    return False


def drip(connection: Connection, _: Request) -> bool:
    connection.send(HEAD + b"Content-Length: 100000\r\n\r\n")
    while connection.rest(0.02):
        connection.send(b"x")
    return False


ANSWERS: dict[str, tuple[Behaviour, Code | None, str]] = {
    "good": (ok(IMAGE), None, ""),
    "chunked": (raw(CHUNKED + b"2800\r\n" + IMAGE + b"\r\n0\r\nX-T: 1\r\n\r\n"), None, ""),
    "http-1.0": (raw(HEAD.replace(b"1.1", b"1.0") + b"\r\n" + IMAGE), None, ""),
    "no-type": (raw(response(200, IMAGE)), None, ""),
    "interim": (raw(b"HTTP/1.1 103 Early\r\nA: b\r\n\r\n" + response(200, IMAGE)), None, ""),
    "length-too-small": (raw(response(200, IMAGE + IMAGE, Content_Length=len(IMAGE))), None, ""),
    "gzip": (ok(gzip.compress(IMAGE), Content_Encoding="gzip"), None, ""),
    "length-too-large": (
        raw(response(200, IMAGE, Content_Length=len(IMAGE) + 1)),
        *(Code.BROKEN_OFF, "end of response with 1 bytes missing"),
    ),
    "reset": (reset_in_the_body, Code.BROKEN_OFF, "Recv failure: Connection reset by peer"),
    "nothing": (raw(b""), Code.BROKEN_OFF, "no answer before the end"),
    "not-http": (raw(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), Code.BROKEN_OFF, "not HTTP"),
    "http-0.9": (raw(b"<html>"), Code.BROKEN_OFF, "not HTTP"),
    "two-lengths": (
        raw(HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx"),
        *(Code.BROKEN_OFF, "not HTTP"),
    ),
    "chunked-garbage": (raw(CHUNKED + b"zz\r\nabc"), Code.BROKEN_OFF, "hex"),
    "chunked-cut": (raw(CHUNKED + b"2800\r\n" + IMAGE + b"\r\n"), Code.BROKEN_OFF, "closed"),
    "gzip-garbage": (
        ok(IMAGE, Content_Encoding="gzip"),
        *(Code.BROKEN_OFF, "a content encoding that cannot be undone"),
    ),
    "unknown-encoding": (
        ok(IMAGE, Content_Encoding="zork"),
        *(Code.BROKEN_OFF, "a content encoding that cannot be undone"),
    ),
    "huge-header": (
        raw(HEAD + b"X: " + b"x" * 90_000 + b"\r\n\r\n"),
        *(Code.BROKEN_OFF, "headers of more than 65536 bytes"),
    ),
    "endless-header": (endless_header, Code.BROKEN_OFF, "headers of more than 65536 bytes"),
    "endless-interim": (endless_interim, Code.BROKEN_OFF, "header"),
    "endless-body": (endless, Code.TOO_MANY_BYTES, "more than 100,000"),
    "gzip-bomb": (
        ok(gzip.compress(bytes(20_000_000)), Content_Encoding="gzip"),
        *(Code.TOO_MANY_BYTES, "more than 100,000"),
    ),
    "too-long": (raw(response(200, bytes(100_001))), Code.TOO_MANY_BYTES, "more than 100,000"),
    "http-in-a-header": (ok(IMAGE, **{"HTTP/x": "y"}), None, ""),
    "length-of-5000-digits": (
        raw(response(200, IMAGE, Content_Length="9" * 5_000)),
        *(Code.TOO_MANY_BYTES, "more than 100,000"),
    ),
    "length-with-zeros": (raw(response(200, IMAGE, Content_Length=f"{len(IMAGE):050}")), None, ""),
    "zone-of-20-digits": (
        status(503, Retry_After=f"Sat, 21 Nov 2026 08:00:30 +{'9' * 20}"),
        *(Code.HTTP_5XX, "HTTP 503"),
    ),
    "101-with-a-body": (
        raw(response(101, IMAGE, Upgrade="x", Connection="Upgrade")),
        *(Code.BROKEN_OFF, "HTTP 101"),
    ),
    "101-with-a-long-body": (raw(response(101, bytes(99_000))), Code.BROKEN_OFF, "HTTP 101"),
    "page": (ok(b"<html>", Content_Type="text/html; charset=x"), Code.NOT_AN_IMAGE, "text/html"),
    "empty": (ok(b""), Code.EMPTY, "HTTP 200 without a body"),
    "204": (status(204, Content_Length=None), Code.EMPTY, "HTTP 204"),
    "206": (status(206, IMAGE), Code.BROKEN_OFF, "HTTP 206"),
    "304": (status(304, Content_Length=None), Code.EMPTY, "HTTP 304"),
    "300": (status(300, b"choose"), Code.REDIRECTS, "HTTP 300"),
    "302-to-nowhere": (status(302, b""), Code.REDIRECTS, "HTTP 302"),
    "403": (status(403, b"<html>"), Code.HTTP_4XX, "HTTP 403"),
    "404": (status(404, bytes(1_000_000)), Code.HTTP_4XX, "HTTP 404"),
    "408": (status(408), Code.TIMEOUT, "HTTP 408"),
    "429": (status(429), Code.HTTP_429, "HTTP 429"),
    "500": (status(500), Code.HTTP_5XX, "HTTP 500"),
    "999": (status(999), Code.HTTP_4XX, "HTTP 999"),
    "noai": (ok(IMAGE, X_Robots_Tag="noai"), Code.DISALLOWED, "X-Robots-Tag: noai"),
    "tdm": (ok(IMAGE, TDM_Reservation="1"), Code.DISALLOWED, "TDM-Reservation: 1"),
    "circle": (redirect("/circle"), Code.REDIRECTS, "in a circle"),
    "to-a-file": (redirect("file:///etc/hostname"), Code.BAD_URL, "redirect: file: is not"),
    "to-good": (redirect("good", 308), None, ""),
}


def robots(text: str) -> Behaviour:
    return ok(text.encode(), Content_Type="text/plain")


class Answers:
    """A client whose answers come when the test says so."""

    def __init__(self) -> None:
        self.asked: dict[str, list[Future[Fetched]]] = {}

    def submit(self, url: str, /) -> "Future[Fetched]":
        future: Future[Fetched] = Future()
        self.asked.setdefault(url, []).append(future)
        return future

    def answer(self, url: str, data: bytes = b"x") -> None:
        self.asked[url][0].set_result(Fetched(data=data, host="h"))
