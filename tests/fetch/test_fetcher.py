"""The fetcher against real servers on loopback, most of which misbehave."""

import gzip
import os
import re
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import ExitStack, closing, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.kit.webserver import (
    Authority,
    Behaviour,
    Connection,
    Request,
    WebServer,
    black_hole,
    in_turn,
    ok,
    raw,
    redirect,
    refused_port,
    response,
    stall,
    status,
)
from wdsprep.errors import UsageError, WorkError
from wdsprep.fetch import PASSING, Fetched, Fetcher, FetchRules
from wdsprep.samples import Code

IMAGE = bytes(range(256)) * 40
LONG_S = 60.0  # for what must succeed, however loaded the machine is
SHORT_S = 0.3  # for what must fail


def fetcher(**rules: Any) -> "closing[Fetcher]":
    defaults = {"timeout_s": LONG_S, "retries": 0, "allow_private": True, "allow_s3": True}
    defaults["robots"] = False
    return closing(Fetcher(FetchRules(**{**defaults, **rules})))


def fetch(url: str, **rules: Any) -> Fetched:
    with fetcher(**rules) as one:
        return one.submit(url).result(timeout=LONG_S)


@pytest.fixture(scope="module")
def patient() -> Iterator[Fetcher]:
    """One for the tests that do not care."""
    with fetcher(max_nbytes=100_000) as one:
        yield one


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("authority"))


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


@pytest.fixture(scope="module")
def answering() -> Iterator[WebServer]:
    with WebServer({f"/{name}": answer[0] for name, answer in ANSWERS.items()}) as server:
        yield server


@pytest.mark.parametrize("name", ANSWERS)
def test_each_answer_has_its_code(answering: WebServer, patient: Fetcher, name: str) -> None:
    _, code, detail = ANSWERS[name]
    fetched = patient.submit(f"{answering.url}/{name}").result(LONG_S)
    assert (fetched.code, fetched.host) == (code, "127.0.0.1")
    assert detail in fetched.detail
    assert fetched.data == (IMAGE if code is None else b"")


def kinds_of(kind: type[Exception]) -> Iterator[type[Exception]]:
    """Those that Python's own modules define, and can be made of a text."""
    for one in kind.__subclasses__():
        yield from kinds_of(one)
        if one.__module__ in ("builtins", "asyncio.exceptions", "struct", "ssl", "pycurl"):
            with suppress(TypeError):
                one("x")
                yield one


PLACES = {
    "a header": "wdsprep.fetch.transfer._read_head",
    "a body": "wdsprep.fetch.transfer.too_many_bytes",
    "a socket": "wdsprep.fetch.transfer.is_public",
    "an opt-out": "wdsprep.fetch.manners.opt_out",
    "a redirect": "wdsprep.fetch.client.follow",
    "a robots.txt": "wdsprep.fetch.client.read_robots",
    "a turn": "wdsprep.fetch.turns.Turns.take",
    "a URL": "wdsprep.fetch.client.parse",
}
THROWING = {
    "/robots.txt": ok(b"", Content_Type="text/plain"),
    "/ok": ok(IMAGE),
    "/long": raw(CHUNKED + b"9000\r\n" + bytes(0x9000)),
    "/to": redirect("/ok"),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_exception_of_any_kind_at_a_url_is_the_reject_of_that_url(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    raised: list[Exception] = []

    def throw(*_: object, **__: object) -> Any:
        raise raised[-1]

    path = {"a body": "/long", "a redirect": "/to"}.get(place, "/ok")
    kinds = [kind for kind in dict.fromkeys(kinds_of(Exception)) if kind is not MemoryError]
    assert {ValueError, OverflowError, RecursionError, OSError, KeyError} <= set(kinds)
    monkeypatch.setattr("wdsprep.fetch.transfer.is_public", lambda _: True)
    rules = {"robots": True, "max_nbytes": 20_000, "allow_private": False}
    with WebServer(THROWING) as server, fetcher(**rules) as one:
        with monkeypatch.context() as patch:
            patch.setattr(PLACES[place], throw)
            for kind in kinds:
                raised.append(kind("\x1b[31m"))
                fetched = one.submit(server.url + path).result(LONG_S)
                assert fetched.code is Code.FAULT, kind
                assert fetched.detail.startswith("a bug: "), kind
        assert one.submit(server.url + "/ok").result(LONG_S).data == IMAGE


def test_a_bug_is_told_with_its_kind_and_place_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("wdsprep.samples._told", set())
    monkeypatch.setattr("wdsprep.fetch.transfer._read_head", lambda lines: lines["x"])
    with WebServer({"/": ok(IMAGE)}) as server, fetcher() as one:
        found = [one.submit(server.url).result(LONG_S) for _ in range(3)]
    (detail,) = {fetched.detail for fetched in found}
    assert re.match(r"a bug: TypeError at wdsprep.fetch.transfer:\d+: list indices", detail)
    assert len(caplog.records) == 1
    assert "please report it" in caplog.text
    assert Code.FAULT in PASSING  # another version may fetch it


@pytest.mark.parametrize("error", [WorkError("no socket"), MemoryError()])
def test_what_is_no_urls_doing_is_raised(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def throw(_: object) -> Any:
        raise error

    monkeypatch.setattr("wdsprep.fetch.transfer._read_head", throw)
    with WebServer({"/": ok(IMAGE)}) as server, fetcher() as one, pytest.raises(type(error)):
        one.submit(server.url).result(LONG_S)


@pytest.mark.parametrize("behave", [stall, slow_header, drip], ids=lambda behave: behave.__name__)
def test_no_server_stretches_the_time_of_an_attempt(behave: Behaviour) -> None:
    with WebServer({"/": behave}) as server:
        started = time.monotonic()
        fetched = fetch(server.url, timeout_s=SHORT_S)
        assert fetched.code is Code.TIMEOUT
        assert time.monotonic() - started > SHORT_S


def test_the_hops_of_a_redirect_share_one_time_limit() -> None:
    def late(to: str) -> Behaviour:
        def behave(connection: Connection, request: Request) -> bool:
            return connection.rest(SHORT_S * 2 / 3) and redirect(to)(connection, request)

        return behave

    with WebServer({f"/{hop}": late(f"/{hop + 1}") for hop in range(5)}) as server:
        assert fetch(f"{server.url}/0", timeout_s=SHORT_S).code is Code.TIMEOUT
        assert server.paths() in (["/0", "/1"], ["/0"])


def test_a_black_hole_times_out() -> None:
    with black_hole() as url:
        assert fetch(url, timeout_s=SHORT_S).code is Code.TIMEOUT


def test_a_closed_port_refuses(patient: Fetcher) -> None:
    port = refused_port()
    fetched = patient.submit(f"http://127.0.0.1:{port}/x").result(LONG_S)
    assert (fetched.code, fetched.detail) == (
        Code.REFUSED,
        f"Failed to connect to 127.0.0.1:{port}",
    )


def test_a_name_that_nobody_has_is_a_matter_of_dns(patient: Fetcher) -> None:
    fetched = patient.submit("http://nobody.invalid/x").result(LONG_S)
    assert (fetched.code, fetched.host) == (Code.DNS, "nobody.invalid")


def test_a_name_that_does_not_resolve_in_time_is_a_matter_of_dns_too() -> None:
    """However busy the name service is; who is never connected to does not keep silent."""
    with fetcher(timeout_s=0.001) as one:
        asked = [one.submit(f"http://nobody{n}.invalid/x") for n in range(100)]
        assert {asked.result(LONG_S).code for asked in asked} == {Code.DNS}


def test_a_url_that_is_none_gets_its_code_too(patient: Fetcher) -> None:
    fetched = patient.submit("file:///etc/hostname").result(LONG_S)
    assert (fetched.code, fetched.detail) == (Code.BAD_URL, "file: is not http, https or s3")


def test_a_refused_body_is_not_read() -> None:
    """The server finds the connection closed before it has sent what was announced."""
    seen: list[str] = []

    def announce(connection: Connection, request: Request) -> bool:
        connection.send(HEAD + b"X-Robots-Tag: noai\r\nContent-Length: 50000000\r\n\r\n")
        connection.wait_for_the_end()
        seen.append(request.path)
        return False

    with WebServer({"/": announce}) as server:
        assert fetch(server.url).code is Code.DISALLOWED
    assert seen == ["/"]


def test_connections_are_kept_even_after_small_errors() -> None:
    routes = {"/404": status(404, b"x" * 1_000), "/to": redirect("/good"), "/good": ok(IMAGE)}
    with WebServer(routes) as server, fetcher(per_host=1) as one:
        paths = ["/404", "/to", "/good"] * 5
        wait([one.submit(server.url + path) for path in paths])
        assert server.connections == 1
        assert len(server.paths()) == 20


def test_what_is_asked_for_says_who_asks_and_wants_no_encoding(answering: WebServer) -> None:
    fetch(f"{answering.url}/good?who", contact="https://a.example/bot")
    asked = answering.requests[-1]
    assert asked.headers["user-agent"].startswith("wdsprep/")
    assert asked.headers["user-agent"].endswith("(+https://a.example/bot)")
    assert asked.headers["accept-encoding"] == "identity"
    assert asked.headers["accept"].startswith("image/*")
    assert not {"cookie", "authorization", "referer"} & set(asked.headers)


def test_opt_outs_bind_only_those_who_obey_them(answering: WebServer) -> None:
    assert fetch(f"{answering.url}/noai", opt_outs=False).data == IMAGE


# ---------------------------------------------------------------------------------------- redirects


def test_as_many_redirects_as_allowed_are_followed() -> None:
    routes: dict[str, Behaviour] = {f"/{hop}": redirect(f"/{hop + 1}", 301) for hop in range(3)}
    with WebServer({**routes, "/3": ok(IMAGE)}) as server:
        assert fetch(f"{server.url}/0", redirects=3).data == IMAGE
        fetched = fetch(f"{server.url}/0", redirects=2)
        assert (fetched.code, fetched.detail) == (Code.REDIRECTS, "more than 2")
        assert server.paths()[-1] == "/2"


def test_cookies_are_not_given_back() -> None:
    answers = {"/a": status(302, Location="/b", Set_Cookie="a=b; Path=/"), "/b": ok(IMAGE)}
    with WebServer(answers) as server:
        assert fetch(f"{server.url}/a").data == IMAGE
        assert all("cookie" not in request.headers for request in server.requests)


# ------------------------------------------------------------------------------- addresses, proxies


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.1", "2130706433", "0x7f.1", "0177.0.0.1", "0.0.0.0", "localhost"),
        *("[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::]"),
        *("10.0.0.3", "169.254.169.254", "192.168.0.1", "[fe80::1]", "[64:ff9b::7f00:1]"),
        "[2002:7f00:1::]",
    ],
)
def test_private_addresses_are_refused_however_they_are_written(host: str) -> None:
    with WebServer({"/": ok(IMAGE)}) as server:
        fetched = fetch(f"http://{host}:{server.port}/", allow_private=False)
        assert fetched.code is Code.PRIVATE_ADDRESS
        assert not server.requests
        assert server.connections == 0


def test_a_private_host_is_not_asked_for_its_robots_txt_either() -> None:
    with WebServer({"/": ok(IMAGE)}) as server:
        fetched = fetch(server.url, allow_private=False, robots=True)
        assert (fetched.code, fetched.detail) == (Code.PRIVATE_ADDRESS, "127.0.0.1")
        assert server.connections == 0


def test_a_redirect_to_a_private_address_is_refused_where_the_connection_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By name too, which is what rebinding comes to: what counts is the address it has then."""
    monkeypatch.setattr("wdsprep.fetch.transfer.is_public", lambda host: host == "127.0.0.2")
    with WebServer({"/": ok(IMAGE)}) as private:
        to = {"/a": redirect(private.url), "/b": redirect(f"http://localhost:{private.port}/")}
        with WebServer({**to, "/c": ok(IMAGE)}, address="127.0.0.2") as server:
            assert fetch(f"{server.url}/c", allow_private=False).data == IMAGE
            for path in to:
                fetched = fetch(server.url + path, allow_private=False)
                assert (fetched.code, fetched.host) == (Code.PRIVATE_ADDRESS, "127.0.0.2")
        assert private.connections == 0


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with WebServer(status(502)) as proxy, WebServer({"/": ok(IMAGE)}) as server:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        assert fetch(server.url).data == IMAGE
        assert fetch(server.url, allow_private=False).code is Code.PRIVATE_ADDRESS
        assert proxy.connections == 0


# ---------------------------------------------------------------------------------------------- TLS


def test_certificates_are_checked(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.bundle))
    kinds = {
        "": authority.context(),
        "certificate has expired": authority.context(expired=True),
        "self-signed certificate": authority.self_signed(),
        "no alternative certificate subject name": authority.context("other", address="127.0.0.9"),
    }
    for detail, context in kinds.items():
        with WebServer({"/": ok(IMAGE)}, tls=context) as server:
            fetched = fetch(server.url)
            assert fetched.code is (Code.TLS if detail else None)
            assert detail in fetched.detail


def test_a_new_connection_resumes_the_session_of_an_old_one(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.bundle))
    resumed: list[bool] = []

    def once(connection: Connection, request: Request) -> bool:
        assert isinstance(connection.socket, ssl.SSLSocket)
        resumed.append(bool(connection.socket.session_reused))
        return raw(response(200, IMAGE, Connection="close"))(connection, request)

    with WebServer(once, tls=authority.context()) as server, fetcher() as one:
        for _ in range(3):
            assert one.submit(server.url).result(LONG_S).data == IMAGE
    assert resumed == [False, True, True]


def test_an_authority_that_nobody_knows_is_not_believed(authority: Authority) -> None:
    with WebServer({"/": ok(IMAGE)}, tls=authority.context()) as server:
        assert fetch(server.url).code is Code.TLS


def test_https_at_a_port_that_speaks_http_is_a_matter_of_tls(answering: WebServer) -> None:
    url = answering.url.replace("http:", "https:")
    assert fetch(f"{url}/good").code in (Code.TLS, Code.BROKEN_OFF)


def test_certificates_named_by_a_wrong_path_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")
    with pytest.raises(UsageError, match="SSL_CERT_FILE=/nowhere/ca"):
        Fetcher(FetchRules())


# ----------------------------------------------------------------------------------------- attempts


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wdsprep.fetch.manners.pause_s", lambda _attempt: 0.0)


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("first", ["500", "429", "reset", "nothing", "408"])
def test_what_may_pass_is_tried_again(first: str) -> None:
    with WebServer({"/": in_turn(ANSWERS[first][0], ok(IMAGE))}) as server:
        assert fetch(server.url, retries=1).data == IMAGE
        assert server.paths() == ["/", "/"]


@pytest.mark.usefixtures("no_pauses")
def test_attempts_end() -> None:
    with WebServer({"/": status(503)}) as server:
        assert fetch(server.url, retries=2).code is Code.HTTP_5XX
        assert len(server.paths()) == 3


@pytest.mark.parametrize("name", ["404", "noai", "page", "empty", "circle", "too-long"])
def test_what_will_not_pass_is_not(answering: WebServer, name: str) -> None:
    before = len(answering.requests)
    assert fetch(f"{answering.url}/{name}", retries=5, max_nbytes=100_000).code not in PASSING
    assert len(answering.requests) == before + 1


@pytest.mark.usefixtures("no_pauses")
def test_retry_after_is_obeyed_by_all_that_want_this_host() -> None:
    asked: list[tuple[str, float]] = []

    def note(connection: Connection, request: Request) -> bool:
        asked.append((request.path, time.monotonic()))
        busy = len(asked) == 1
        answer = status(429, Retry_After="1") if busy else ok(IMAGE)
        return answer(connection, request)

    with WebServer(note) as server, fetcher(retries=1, per_host=1) as one:
        futures = [one.submit(f"{server.url}/{n}") for n in range(3)]
        assert [future.result(LONG_S).data for future in futures] == [IMAGE] * 3
    assert len(asked) == 4
    assert asked[1][1] - asked[0][1] >= 0.95


@pytest.mark.usefixtures("no_pauses")
def test_a_host_that_asks_for_too_long_a_pause_is_left_alone() -> None:
    """By what waits for it, too: it is not asked again."""
    with WebServer({"/0": status(429, Retry_After="3600")}) as server:
        with fetcher(retries=3, per_host=1) as one:
            futures = [one.submit(f"{server.url}/{n}") for n in range(5)]
            found = [future.result(LONG_S) for future in futures]
        assert {fetched.code for fetched in found} == {Code.HTTP_429}
        assert all("HTTP 429, Retry-After 3600 s" in fetched.detail for fetched in found)
        assert server.paths() == ["/0"]


# ------------------------------------------------------------------------------------------- robots


def robots(text: str) -> Behaviour:
    return ok(text.encode(), Content_Type="text/plain")


def test_robots_txt_is_asked_for_once_and_obeyed() -> None:
    rules = robots("User-agent: wdsprep\nDisallow: /no\n")
    routes = {"/robots.txt": rules, "/yes": ok(IMAGE), "/no": ok(IMAGE)}
    with WebServer(routes) as server, fetcher(robots=True) as one:
        futures = [one.submit(server.url + path) for path in ("/yes", "/no", "/x/%2e./no") * 10]
        found = [future.result(LONG_S) for future in futures]
        assert {(fetched.code, fetched.detail) for fetched in found} == {
            *((None, ""), (Code.DISALLOWED, "robots.txt"))
        }
        paths = server.paths(robots=True)
        assert paths[0] == "/robots.txt"
        assert paths.count("/robots.txt") == 1
        assert "/no" not in paths


def test_robots_txt_of_where_a_redirect_leads_is_obeyed() -> None:
    with WebServer({"/robots.txt": robots("User-agent: *\nDisallow: /")}) as closed:
        with WebServer({"/": redirect(f"{closed.url}/x")}) as server:
            assert fetch(server.url, robots=True).code is Code.DISALLOWED
        assert closed.paths(robots=True) == ["/robots.txt"]


@pytest.mark.parametrize(
    "answer",
    [
        *(status(404), status(403), ok(b"<html>", Content_Type="text/html"), ok(b"")),
        *(redirect("/robots.txt"), redirect("file:///x"), robots("junk\0" * 200_000)),
    ],
)
def test_a_robots_txt_that_is_not_there_allows_all(answer: Behaviour) -> None:
    with WebServer({"/robots.txt": answer, "/x": ok(IMAGE)}) as server:
        assert fetch(f"{server.url}/x", robots=True).data == IMAGE


def test_a_robots_txt_elsewhere_counts() -> None:
    rules = robots("User-agent: *\nDisallow: /x")
    with WebServer({"/robots.txt": redirect("/r"), "/r": rules, "/x": ok(IMAGE)}) as server:
        assert fetch(f"{server.url}/x", robots=True).code is Code.DISALLOWED


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (status(503), Code.HTTP_5XX),
        (status(429), Code.HTTP_429),
        (reset_in_the_body, Code.BROKEN_OFF),
    ],
)
def test_a_robots_txt_that_cannot_be_had_now_forbids_all_for_now(
    answer: Behaviour, code: Code
) -> None:
    with WebServer({"/robots.txt": answer, "/x": ok(IMAGE)}) as server:
        fetched = fetch(f"{server.url}/x", robots=True)
        assert fetched.code is code
        assert fetched.detail.startswith("robots.txt: ")
        assert not server.paths()


@pytest.mark.usefixtures("no_pauses")
def test_a_robots_txt_that_comes_at_the_second_attempt_is_enough() -> None:
    answers = in_turn(status(503), robots(""))
    with WebServer({"/robots.txt": answers, "/x": ok(IMAGE)}) as server:
        assert fetch(f"{server.url}/x", robots=True, retries=1).data == IMAGE


# ---------------------------------------------------------------------------- many at the same time


class Gate:
    """A behaviour that holds its requests until it is opened, and counts how many it holds."""

    def __init__(self) -> None:
        self.opened, self.held, self.most = threading.Event(), 0, 0
        self._changed = threading.Condition()

    def __call__(self, connection: Connection, request: Request) -> bool:
        with self._changed:
            self.held += 1
            self.most = max(self.most, self.held)
            self._changed.notify_all()
        self.opened.wait(LONG_S)
        with self._changed:
            self.held -= 1
        return ok(IMAGE)(connection, request)

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.held == count, LONG_S)


def test_a_slow_host_holds_its_own_requests_and_no_others() -> None:
    gate = Gate()
    with ExitStack() as stack:
        slow = stack.enter_context(WebServer(gate))
        quick = stack.enter_context(WebServer({"/": ok(IMAGE)}, address="127.0.0.2"))
        one = stack.enter_context(fetcher(in_flight=4, per_host=3))
        stack.callback(gate.opened.set)
        stuck = [one.submit(f"{slow.url}/{n}") for n in range(50)]
        gate.wait_for(3)
        others = [one.submit(quick.url) for _ in range(50)]
        assert all(future.result(LONG_S).data == IMAGE for future in others)
        assert not any(future.done() for future in stuck)
        gate.opened.set()
        assert all(future.result(LONG_S).data == IMAGE for future in stuck)
    assert gate.most == 3


def test_no_more_requests_are_in_flight_than_allowed() -> None:
    gate = Gate()
    with ExitStack() as stack:
        places = [f"127.0.0.{n}" for n in range(2, 8)]
        servers = [stack.enter_context(WebServer(gate, address=place)) for place in places]
        one = stack.enter_context(fetcher(in_flight=5, per_host=2))
        stack.callback(gate.opened.set)
        futures = [one.submit(f"{server.url}/{n}") for n in range(4) for server in servers]
        gate.wait_for(5)
        gate.opened.set()
        assert all(future.result(LONG_S).data == IMAGE for future in futures)
    assert gate.most == 5


def test_bodies_that_are_too_much_together_come_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten begin, by the usual size; their first parts alone are more than there is room for."""
    monkeypatch.setattr("wdsprep.fetch.room.ROOM_NBYTES", 2_000_000)
    body, begun, number = bytes(500_000), threading.Barrier(10), count()

    def half(connection: Connection, _: Request) -> bool:
        whole = response(200, body)
        is_early = next(number) < begun.parties
        if is_early:
            begun.wait(LONG_S)
        with suppress(OSError):  # given up
            connection.send(whole[:300_000])
        if is_early:
            begun.wait(LONG_S)
        connection.send(whole[300_000:])
        return True

    with WebServer(half) as server, fetcher(per_host=24, max_nbytes=600_000) as one:
        futures = [one.submit(f"{server.url}/{n}") for n in range(24)]
        assert all(future.result(LONG_S).data == body for future in futures)
        asked = Counter(server.paths())
    assert len(asked) == 24
    assert max(asked.values()) > 1


def test_hosts_take_turns() -> None:
    """One URL of a host that comes last does not wait for the thousand of another."""
    gate, order = Gate(), []

    def note(future: "Future[Fetched]") -> None:
        order.append(future.result().host)

    with ExitStack() as stack:
        large = stack.enter_context(WebServer(in_turn(gate, ok(IMAGE))))
        small = stack.enter_context(WebServer({"/": ok(IMAGE)}, address="127.0.0.2"))
        one = stack.enter_context(fetcher(in_flight=1))
        stack.callback(gate.opened.set)
        futures = [one.submit(f"{large.url}/{n}") for n in range(100)]
        gate.wait_for(1)
        futures.append(one.submit(small.url))
        for future in futures:
            future.add_done_callback(note)
        gate.opened.set()
        wait(futures, LONG_S)
    assert order.index("127.0.0.2") <= 2


def test_a_dead_host_is_given_up_without_an_attempt_for_each_url() -> None:
    with black_hole() as url, fetcher(timeout_s=SHORT_S, per_host=8) as one:
        futures = [one.submit(f"{url}/{n}") for n in range(500)]
        found = [future.result(LONG_S) for future in futures]
    assert {fetched.code for fetched in found} == {Code.TIMEOUT}
    assert sum("as others there" in fetched.detail for fetched in found) > 400


def test_thousands_may_wait(answering: WebServer, patient: Fetcher) -> None:
    futures = [patient.submit(f"{answering.url}/good?{n}") for n in range(2_000)]
    assert all(future.result(LONG_S).code is Code.HTTP_4XX for future in futures)


# --------------------------------------------------------------------------------------- at the end


def fetch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "wdsprep-fetch" in thread.name]


def test_closing_cancels_what_is_not_done_and_leaves_no_thread() -> None:
    before = len(fetch_threads())
    gate = Gate()
    with WebServer(gate) as server:
        one = Fetcher(FetchRules(allow_private=True, robots=False, timeout_s=LONG_S))
        futures = [one.submit(f"{server.url}/{n}") for n in range(50)]
        gate.wait_for(8)
        one.close()
        one.close()
        gate.opened.set()
        assert all(future.cancelled() for future in futures)
    assert len(fetch_threads()) == before
    with pytest.raises(RuntimeError, match="closed"):
        one.submit(server.url)


def test_a_cancelled_future_gives_its_place_to_another() -> None:
    with WebServer({"/": stall, "/x": ok(IMAGE)}) as server, fetcher(in_flight=1) as one:
        stuck, waits = one.submit(server.url), one.submit(f"{server.url}/x")
        stuck.cancel()
        assert waits.result(LONG_S).data == IMAGE
        with pytest.raises(CancelledError):
            stuck.result()


def test_any_thread_may_submit(answering: WebServer, patient: Fetcher) -> None:
    found: list[Fetched] = []

    def work() -> None:
        found.extend(patient.submit(f"{answering.url}/good").result(LONG_S) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [fetched.data for fetched in found] == [IMAGE] * 160


FORGETFUL = """
import sys
from wdsprep.fetch import Fetcher, FetchRules
fetcher = Fetcher(FetchRules(allow_private=True, robots=False))
fetcher.submit(sys.argv[1])
fetcher.submit(sys.argv[2]).result()
{ending}
"""


@pytest.mark.parametrize(
    ("ending", "status"), [("", 0), ("raise KeyboardInterrupt", -2), ("import os; os._exit(3)", 3)]
)
def test_a_program_that_forgets_to_close_ends_all_the_same(ending: str, status: int) -> None:
    with WebServer({"/": stall, "/x": ok(IMAGE)}) as server:
        command = [sys.executable, "-c", FORGETFUL.format(ending=ending)]
        command += [server.url, f"{server.url}/x"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == status, done.stderr
    assert "KeyboardInterrupt" in done.stderr if ending.startswith("raise") else not done.stderr


def test_open_files_are_few_when_it_ends() -> None:
    with WebServer({"/": ok(IMAGE)}) as server:
        with fetcher() as one:
            one.submit(server.url).result(LONG_S)
        before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
        for _ in range(5):
            with fetcher() as one:
                wait([one.submit(server.url) for _ in range(20)])
        after = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    assert after <= before + 40  # the server's own ends of connections, at the most


def test_wrong_settings_are_told_at_once() -> None:
    with pytest.raises(UsageError, match="not a contact"):
        Fetcher(FetchRules(contact="two\nlines"))


def test_more_requests_than_files_are_an_error_with_a_way_out() -> None:
    with pytest.raises(UsageError, match="ulimit -n"):
        Fetcher(FetchRules(in_flight=10**9))


# ------------------------------------------------------------------------------------------ objects


def test_objects_are_not_asked_for_unless_the_user_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With whose credentials else would they be read?"""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with WebServer(ok(IMAGE)) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint.url)
        for url in ("s3://payroll/2026.jpg", " S3://payroll/2026.jpg"):
            fetched = fetch(url, allow_s3=False)
            assert (fetched.code, fetched.host) == (Code.PRIVATE_ADDRESS, "payroll")
            assert fetched.detail.endswith("with your credentials: --allow-s3 does that")
        assert endpoint.connections == 0
        assert fetch("s3://payroll/2026.jpg").data == IMAGE
        asked = endpoint.requests[-1]
        assert "mine" in f"{asked.path} {asked.headers}"


def test_objects_are_read_through_the_store(bucket: str) -> None:
    from tests.kit.s3 import s3_client

    with s3_client() as client:
        client.put_object(Bucket=bucket, Key="a b/ü.jpg", Body=IMAGE)
        client.put_object(Bucket=bucket, Key="empty", Body=b"")
    with fetcher(max_nbytes=len(IMAGE)) as one:
        urls = ["a b/ü.jpg", "empty", "none.jpg", "../x"]
        found = [one.submit(f"s3://{bucket}/{name}").result(LONG_S) for name in urls]
        none = one.submit("s3://no-such-bucket-at-all/x").result(LONG_S)
    assert found[0] == Fetched(data=IMAGE, host=bucket)
    assert [one.code for one in found[1:]] == [Code.EMPTY, Code.HTTP_4XX, Code.BAD_URL]
    assert none.code is Code.HTTP_4XX
    assert fetch(f"s3://{bucket}/a b/ü.jpg", max_nbytes=100).code is Code.TOO_MANY_BYTES
