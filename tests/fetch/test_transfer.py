"""One request: whatever comes of it has its code, wherever it leads and whoever answers."""

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.kit.fetches import (
    ANSWERS,
    CHUNKED,
    HEAD,
    IMAGE,
    LONG_S,
    SHORT_S,
    drip,
    fetch,
    fetcher,
    slow_header,
)
from tests.kit.webserver import (
    Authority,
    Behaviour,
    Connection,
    Request,
    WebServer,
    black_hole,
    ok,
    raw,
    redirect,
    refused_port,
    stall,
    status,
)
from wdsprep.dataset.reject_codes import Code
from wdsprep.errors import WorkError
from wdsprep.fetch.client import Fetcher


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
    "a header": "wdsprep.fetch.transfer.Head",
    "a body": "wdsprep.fetch.transfer.too_many_bytes",
    "a socket": "wdsprep.fetch.transfer.is_public",
    "an opt-out": "wdsprep.fetch.answer_rules.opt_out",
    "a redirect": "wdsprep.fetch.client.follow",
    "a robots.txt": "wdsprep.fetch.client.read_robots",
    "a turn": "wdsprep.fetch.limits.HostLimits.take",
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
    rules = {
        "ignore_robots": False,
        "max_nbytes": 20_000,
        "allow_private_hosts": place != "a socket",
    }
    with WebServer(THROWING) as server, fetcher(**rules) as one:
        with monkeypatch.context() as patch:
            patch.setattr(PLACES[place], throw)
            for kind in kinds:
                raised.append(kind("\x1b[31m"))
                fetched = one.submit(server.url + path).result(LONG_S)
                assert fetched.code is Code.FAULT, kind
                assert fetched.detail.startswith("a bug: "), kind
        fetched = one.submit(server.url + "/ok").result(LONG_S)
        assert fetched.code is (Code.PRIVATE_ADDRESS if place == "a socket" else None)


@pytest.mark.parametrize("error", [WorkError("no socket"), MemoryError()])
def test_what_is_no_urls_doing_is_raised(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def throw(**_: object) -> Any:
        raise error

    monkeypatch.setattr("wdsprep.fetch.transfer.Head", throw)
    with WebServer({"/": ok(IMAGE)}) as server, fetcher() as one, pytest.raises(type(error)):
        one.submit(server.url).result(LONG_S)


@pytest.mark.parametrize("behave", [stall, slow_header, drip], ids=lambda behave: behave.__name__)
def test_no_server_stretches_the_time_of_an_attempt(behave: Behaviour) -> None:
    with WebServer({"/": behave}) as server:
        started = time.monotonic()
        fetched = fetch(server.url, timeout=SHORT_S)
        assert fetched.code is Code.TIMEOUT
        assert time.monotonic() - started > SHORT_S


def test_the_hops_of_a_redirect_share_one_time_limit() -> None:
    def late(to: str) -> Behaviour:
        def behave(connection: Connection, request: Request) -> bool:
            return connection.rest(SHORT_S * 2 / 3) and redirect(to)(connection, request)

        return behave

    with WebServer({f"/{hop}": late(f"/{hop + 1}") for hop in range(5)}) as server:
        assert fetch(f"{server.url}/0", timeout=SHORT_S).code is Code.TIMEOUT
        assert server.paths() in (["/0", "/1"], ["/0"])


def test_what_no_server_answers_has_its_code_too(patient: Fetcher) -> None:
    port = refused_port()
    for url, code, detail in (
        (f"http://127.0.0.1:{port}/x", Code.REFUSED, f"to connect to 127.0.0.1:{port}"),
        ("http://nobody.invalid/x", Code.DNS, ""),
    ):
        fetched = patient.submit(url).result(LONG_S)
        assert (fetched.code, fetched.host) == (code, url.split("/")[2].partition(":")[0])
        assert fetched.detail.endswith(detail)


def test_a_black_hole_times_out() -> None:
    with black_hole() as url:
        assert fetch(url, timeout=SHORT_S).code is Code.TIMEOUT


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


def test_what_is_asked_for_says_who_asks_and_opt_outs_bind_only_who_obeys_them(
    answering: WebServer,
) -> None:
    fetch(f"{answering.url}/good?who", contact="https://a.example/bot")
    asked = answering.requests[-1]
    assert asked.headers["user-agent"].startswith("wdsprep/")
    assert asked.headers["user-agent"].endswith("(+https://a.example/bot)")
    assert asked.headers["accept-encoding"] == "identity"
    assert asked.headers["accept"].startswith("image/*")
    assert not {"cookie", "authorization", "referer"} & {*map(str.lower, asked.headers)}
    assert fetch(f"{answering.url}/noai", ignore_opt_outs=True).data == IMAGE


# ---------------------------------------------------------------------------------------- redirects


def test_as_many_redirects_as_allowed_are_followed() -> None:
    routes: dict[str, Behaviour] = {f"/{hop}": redirect(f"/{hop + 1}", 301) for hop in range(3)}
    with WebServer({**routes, "/3": ok(IMAGE)}) as server:
        assert fetch(f"{server.url}/0", redirects=3).data == IMAGE
        fetched = fetch(f"{server.url}/0", redirects=2)
        assert (fetched.code, fetched.detail) == (Code.REDIRECTS, "more than 2")
        assert server.paths()[-1] == "/2"


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
        for rules in ({}, {"ignore_robots": False}):  # whose robots.txt is not asked for either
            fetched = fetch(f"http://{host}:{server.port}/", allow_private_hosts=False, **rules)
            assert fetched.code is Code.PRIVATE_ADDRESS
            assert not fetched.detail.startswith("robots.txt")
        assert not server.requests
        assert server.connections == 0


def test_a_redirect_to_a_private_address_is_refused_where_the_connection_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By name too, which is what rebinding comes to: what counts is the address it has then."""
    monkeypatch.setattr("wdsprep.fetch.transfer.is_public", lambda host: host == "127.0.0.2")
    with WebServer({"/": ok(IMAGE)}) as private:
        to = {"/a": redirect(private.url), "/b": redirect(f"http://localhost:{private.port}/")}
        with WebServer({**to, "/c": ok(IMAGE)}, address="127.0.0.2") as server:
            assert fetch(f"{server.url}/c", allow_private_hosts=False).data == IMAGE
            for path in to:
                fetched = fetch(server.url + path, allow_private_hosts=False)
                assert (fetched.code, fetched.host) == (Code.PRIVATE_ADDRESS, "127.0.0.2")
        assert private.connections == 0


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with WebServer(status(502)) as proxy, WebServer({"/": ok(IMAGE)}) as server:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        assert fetch(server.url).data == IMAGE
        assert fetch(server.url, allow_private_hosts=False).code is Code.PRIVATE_ADDRESS
        assert proxy.connections == 0


# ---------------------------------------------------------------------------------------------- TLS


def test_certificates_are_checked(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """An authority that nobody knows is not believed."""
    with WebServer({"/": ok(IMAGE)}, tls=authority.context()) as server:
        assert fetch(server.url).code is Code.TLS
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
