"""A file on a web server: nothing but the bytes that were asked for, all of one version."""

import time

import pytest

from tests.kit.webserver import (
    Behaviour,
    Connection,
    Request,
    WebServer,
    in_turn,
    ranges_of,
    raw,
    response,
    status,
)
from wdsprep.dataset.chunks import Chunks
from wdsprep.errors import AccessError, ShortReadError, StoreError
from wdsprep.store.web import WebStore

TEN = b"0123456789"


def part(body: bytes, span: str | None, **headers: object) -> Behaviour:
    return raw(response(206, body, Content_Range=span, ETag='"1"', **headers), keep=True)


def store_of(server: WebServer, query: str = "") -> WebStore:
    return WebStore(f"{server.url}/f.bin{query}", first_pause_s=0.001)


def test_any_range_is_read_and_none_beyond_the_end() -> None:
    with WebServer(ranges_of(TEN)) as server:
        store = store_of(server)
        assert store.read("f.bin") == TEN
        for start in range(12):
            assert store.read("f.bin", start=start) == TEN[start:]
            assert store.read("f.bin", start=start, nbytes=3) == TEN[start : start + 3]
        assert Chunks(store, "f.bin", chunk_nbytes=5).as_stream().read() == TEN
        assert [entry.nbytes for entry in store.list()] == [10]


WRONG = {
    "another range": part(b"1234", "bytes 1-4/10"),
    "a shorter one": part(b"23", "bytes 2-3/10"),
    "a longer one": part(b"23456", "bytes 2-6/10"),
    "one of a file that ends within": part(b"2345", "bytes 2-5/5"),
    "one of a file of no known length": part(b"2345", "bytes 2-5/*"),
    "no range": part(b"2345", None),
    "several": part(b"2345", None, Content_Type="multipart/byteranges; boundary=x"),
    "the whole file": status(200, TEN, ETag='"1"'),
    "an end that is none": status(416, Content_Range="bytes */10"),
    "an end of nothing known": status(416),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_range_is_never_taken_for_the_bytes(kind: str) -> None:
    with WebServer(WRONG[kind]) as server, pytest.raises(StoreError, match=r"f\.bin.*range"):
        store_of(server).read("f.bin", start=2, nbytes=4)


def test_a_body_of_another_length_than_its_range_is_never_taken() -> None:
    for body in (b"234", b"23456"):
        right, wrong = part(b"2345", "bytes 2-5/10"), part(body, "bytes 2-5/10")
        with WebServer(in_turn(wrong, right)) as server:
            assert store_of(server).read("f.bin", start=2, nbytes=4) == b"2345"


@pytest.mark.parametrize("other", [ranges_of(TEN[::-1], '"2"'), ranges_of(TEN + b"x")])
def test_all_reads_are_of_one_version(other: Behaviour) -> None:
    with WebServer(in_turn(ranges_of(TEN), other)) as server:
        store = store_of(server)
        assert store.read("f.bin", nbytes=2) == b"01"
        with pytest.raises(StoreError, match=r"f\.bin: the file has changed while it was read"):
            store.read("f.bin", start=2, nbytes=2)
        (now,) = store.list()
        assert len(store.read("f.bin")) == now.nbytes


def test_a_whole_file_that_nobody_asked_for_is_not_waited_for() -> None:
    def endless(connection: Connection, _: Request) -> bool:
        connection.send(response(200, TEN, Content_Length=10**12))
        connection.wait_for_the_end()
        return False

    began = time.monotonic()
    with WebServer(endless) as server:
        for act in (lambda: store_of(server).read("f.bin"), lambda: list(store_of(server).list())):
            with pytest.raises(AccessError, match="does not serve ranges of bytes: download"):
                act()
    assert time.monotonic() - began < 5


def test_a_body_that_breaks_off_is_asked_for_again_and_not_for_ever() -> None:
    cut = raw(response(206, b"01", Content_Range="bytes 0-9/10", Content_Length=10))
    with WebServer(in_turn(cut, cut, ranges_of(TEN))) as server:
        assert store_of(server).read("f.bin") == TEN
    with WebServer(cut) as server, pytest.raises(ShortReadError, match=r"f\.bin cannot be read"):
        store_of(server).read("f.bin")
