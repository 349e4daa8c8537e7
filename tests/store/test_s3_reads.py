"""GETs over open connections: few connections, and whatever is odd goes through the session."""

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from botocore.exceptions import EndpointConnectionError, ReadTimeoutError
from botocore.httpsession import URLLib3Session
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.webserver import Behaviour, WebServer, in_turn, raw, response, stall
from wdsprep.store.base import Entry
from wdsprep.store.s3.listing import ALONE, STRETCHES, Page, Stretch, listing
from wdsprep.store.s3.reads import Wire

BODY = bytes(range(256)) * 400
PLAIN = raw(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY), keep=True)
CHUNKED = b"HTTP/1.1 403 No\r\nTransfer-Encoding: chunked\r\n\r\n8\r\n<Error/>\r\n0\r\n\r\n"


@contextmanager
def wired(behaviour: Behaviour = PLAIN, **session: Any) -> Iterator[tuple[WebServer, str, Wire]]:
    """A server, the URL of a file there, and a wire that gets it."""
    with WebServer(behaviour) as server, closing(URLLib3Session(**session)) as connections:
        yield server, f"{server.url}/bucket/key?signed=%20yes", Wire(connections)


def get(wire: Wire, url: str) -> bytes:
    with closing(wire.get(url, {"Range": "bytes=0-9"})) as answer:
        assert answer.status == 200
        data: bytes = answer.body.read(answer.nbytes)
        answer.keep()
    return data


def test_one_connection_serves_all_with_the_same_headers_that_matter() -> None:
    with wired() as (server, url, wire):
        assert [get(wire, url) for _ in range(20)] == [BODY] * 20
    assert server.connections == 1
    for name in ("host", "range", "accept-encoding"):
        assert len({request.headers[name] for request in server.requests}) == 1


@pytest.mark.parametrize(
    "behaviour",
    [
        pytest.param(raw(response(200, BODY)), id="closes unsaid"),
        pytest.param(raw(response(200, BODY, Connection="close")), id="closes as said"),
        pytest.param(in_turn(PLAIN, raw(b"HTTP/1.1 200 OK\r\nCon"), PLAIN), id="breaks off"),
    ],
)
def test_a_connection_that_ends_is_replaced(behaviour: Behaviour) -> None:
    with wired(behaviour) as (server, url, wire):
        assert [get(wire, url) for _ in range(5)] == [BODY] * 5
    assert server.connections > 1


def test_a_body_that_was_left_ends_its_connection() -> None:
    with wired() as (server, url, wire):
        get(wire, url)
        wire.get(url, {}).close()
        assert get(wire, url) == BODY
    assert server.connections == 2


def test_silence_is_a_timeout_as_boto3_has_it() -> None:
    with wired(in_turn(PLAIN, stall, PLAIN), timeout=(5, 0.2)) as (_server, url, wire):
        get(wire, url)
        with pytest.raises(ReadTimeoutError):
            get(wire, url)
        assert get(wire, url) == BODY


def test_an_answer_in_chunks_is_read_to_its_end() -> None:
    with wired(in_turn(PLAIN, raw(CHUNKED, keep=True)), timeout=(5, 20)) as (_server, url, wire):
        get(wire, url)
        with closing(wire.get(url, {})) as answer:
            assert (answer.status, answer.nbytes) == (403, -1)
            assert answer.body.read(8192) == b"<Error/>"


def test_nobody_there_is_said_as_boto3_says_it() -> None:
    with wired() as (_server, url, wire):
        with pytest.raises(EndpointConnectionError):
            get(wire, "http://127.0.0.1:1/bucket/key")
        assert get(wire, url) == BODY


DIGESTS = [f"{n * 2654435761 % 2**32:08x}" for n in range(1_500)]
KINDS = {
    "counted": [f"receipts/256/{n:06d}.json" for n in range(1_500)],
    "two buckets": [f"receipts/{b}/{n:06d}.json" for b in (256, 512) for n in range(900)],
    "unpadded": [f"img_{n}.jpg" for n in range(1_500)],
    "digests": [f"data/{name}.jpg" for name in DIGESTS],
    "words": [f"{chr(97 + n % 26)}{chr(65 + n % 23)}{n}" for n in range(1_500)],
    "gaps": [f"x/{n:09d}" for n in [*range(300), *range(7 * 10**8, 7 * 10**8 + 900)]],
    "not ASCII": [f"Bild {chr(0xE4 + n % 40)}{n:05d}.jpg" for n in range(700)],
    "one long name": [*("a" * n for n in range(1, 600)), "b"],
}


class PagedServer:
    """Pages of ten names; counts them."""

    def __init__(self, names: Sequence[str], size: int = 10) -> None:
        self.names, self.size = sorted(names, key=str.encode), size
        self.pages = 0

    def ask(self, stretch: Stretch) -> Page:
        self.pages += 1
        after = stretch.token or stretch.after
        start = bisect_right(self.names, after)
        page = self.names[start : start + self.size]
        entries = [Entry(name=name, nbytes=0, stamp="") for name in page]
        return entries, page[-1] if page != self.names[start:] else ""


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_is_listed_once_in_order_for_few_pages_more(kind: str) -> None:
    server = PagedServer(KINDS[kind])
    assert [entry.name for entry in listing(server.ask, "")] == server.names
    needed = len(server.names) / server.size
    assert server.pages <= 1.7 * needed + 2 * STRETCHES


@settings(max_examples=100, deadline=None)
@given(
    st.sets(st.text("019afzAZ/._-é~ ", min_size=1, max_size=5), max_size=200),
    st.integers(1, 7),
    st.sampled_from(["", "0", "a/"]),
)
def test_whatever_the_names(names: set[str], size: int, prefix: str) -> None:
    server = PagedServer([prefix + name for name in names], size)
    with patch("wdsprep.store.s3.listing.MOST", 2), patch("wdsprep.store.s3.listing.ALONE", 3):
        assert [entry.name for entry in listing(server.ask, prefix)] == server.names


def test_pages_of_a_long_listing_are_asked_for_side_by_side() -> None:
    """After the first pages, the server answers only when all places are taken."""

    class Patient(PagedServer):
        def __init__(self) -> None:
            super().__init__(KINDS["counted"])
            self.barrier = threading.Barrier(STRETCHES)

        def ask(self, stretch: Stretch) -> Page:
            if stretch.after and not stretch.token and stretch.until < "receipts/256/0010":
                self.barrier.wait(timeout=60)
            return super().ask(stretch)

    server = Patient()
    assert [entry.name for entry in listing(server.ask, "receipts/")] == server.names


def test_a_short_listing_and_one_that_is_left_cost_the_pages_that_were_read() -> None:
    server = PagedServer(KINDS["counted"][: 10 * ALONE])
    assert len(list(listing(server.ask, ""))) == 10 * ALONE
    assert server.pages == ALONE
    server = PagedServer(KINDS["counted"])
    found = listing(server.ask, "")
    next(found)
    found.close()
    assert server.pages == 1


def test_an_error_in_a_later_stretch_reaches_the_reader_in_its_place() -> None:
    class Broken(PagedServer):
        def ask(self, stretch: Stretch) -> Page:
            if stretch.after.startswith("receipts/256/001"):
                raise OSError("gone")
            return super().ask(stretch)

    found = []
    with pytest.raises(OSError, match="gone"):
        found.extend(entry.name for entry in listing(Broken(KINDS["counted"]).ask, "receipts/"))
    found_before = [name for name in KINDS["counted"] if name < "receipts/256/001"]
    assert found[: len(found_before)] == found_before[: len(found)]
