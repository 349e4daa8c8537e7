"""An unreliable network to S3 is outlived, and one that stays so is one clear line."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from tests.kit.faultproxy import Delay, DelayBody, Drop, DropAfter, Fault, Status, Truncate, first
from tests.kit.s3 import S3Server
from tests.kit.stores import BIG, one_line_error, uploads
from tests.store.conftest import Through
from wdsprep.dataset.chunks import Chunks
from wdsprep.errors import ExistsError, ShortReadError, StoreError
from wdsprep.store.base import write_bytes
from wdsprep.store.remote import ATTEMPTS
from wdsprep.store.s3.s3_store import S3Store

FAULTS: list[Fault] = [
    Drop(),
    DropAfter(),
    Status(500),
    Status(503, {"Retry-After": "1"}),
    Status(429),
    Delay(0.05),
    DelayBody(0.01),
]


@pytest.mark.usefixtures("aged")
@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_every_operation_outlives(through: Through, bucket: str, fault: Fault) -> None:
    """Each request in turn meets the fault twice, whatever it asks for."""
    seen: dict[tuple[str, str], int] = {}

    def twice(method: str, path: str, _n: int, _headers: object) -> Fault | None:
        key = method, path
        seen[key] = seen.get(key, 0) + 1
        return fault if seen[key] <= 2 else None

    with through(twice) as (proxy, store):
        write_bytes(store, "small", b"0123456789")
        write_bytes(store, "once", b"once", exclusive=True)
        write_bytes(store, "big", BIG)
        assert [(e.name, e.nbytes) for e in store.list()] == [
            ("big", len(BIG)),
            ("once", 4),
            ("small", 10),
        ]
        assert store.read("small", start=2, nbytes=3) == b"234"
        assert store.read("big") == BIG
        store.delete("small")
        store.sweep(lambda _name: True)
        assert [e.name for e in store.list()] == ["big", "once"]
        lost = [key for key in set(proxy.seen) if seen[key] < 3]
        assert lost == [] or isinstance(fault, Delay | DelayBody | DropAfter)
    assert uploads(bucket) == []


@pytest.mark.parametrize("fault", [Drop(), DropAfter(), Status(503), Status(429)], ids=repr)
def test_fault_without_end_is_one_clear_line_after_eight_attempts(
    through: Through, fault: Fault
) -> None:
    with through(first(999, fault)) as (proxy, store):
        for act in (
            lambda: store.read("f"),
            lambda: list(store.list()),
            lambda: write_bytes(store, "f", b"x"),
            lambda: store.delete("f"),
            lambda: store.read_mark("f"),
            store.sweep,
        ):
            before = len(proxy.seen)
            with one_line_error(StoreError, store.url):
                act()
            assert len(proxy.seen) == before + ATTEMPTS


@pytest.mark.parametrize("nbytes", [0, 100])
def test_a_refusal_that_breaks_off_is_known_by_its_status(through: Through, nbytes: int) -> None:
    """A retry meets what it has done already, and then cannot read the code."""
    faults: Iterator[Fault] = iter(())

    def rule(method: str, _path: str, _n: int, _headers: object) -> Fault | None:
        return next(faults, None) if method == "PUT" else None

    with through(rule) as (_, store):
        faults = iter((DropAfter(), Truncate(nbytes)))
        write_bytes(store, "f", b"mine", exclusive=True)
        faults = iter((DropAfter(), Truncate(nbytes)))
        with store.hold("f.hold"):
            assert [e.name for e in store.list()] == ["f", "f.hold"]
        assert [e.name for e in store.list()] == ["f"]


def test_lost_answer_is_no_excuse_where_somebody_else_was_first(
    through: Through, s3_store: S3Store
) -> None:
    write_bytes(s3_store, "f", b"same")
    rule = first(1, DropAfter(), "PUT")
    with through(rule) as (_, store), pytest.raises(ExistsError):
        write_bytes(store, "f", b"same", exclusive=True)


def test_body_that_breaks_off_is_asked_for_again(through: Through, s3_store: S3Store) -> None:
    write_bytes(s3_store, "big", BIG)
    with through(first(3, Truncate(100_000))) as (_, store):
        assert store.read("big") == BIG
        assert [e.name for e in store.list()] == ["big"]
    with through(first(3, Truncate(100))) as (_, store):
        assert [e.name for e in store.list()] == ["big"]


@pytest.mark.parametrize("kept", [0, 1, 50])
@pytest.mark.parametrize("part", ["uploads", "uploadId"])
def test_upload_outlives_an_answer_that_breaks_off(through: Through, part: str, kept: int) -> None:
    rule = first(1, Truncate(kept), "POST", part)
    with through(rule) as (proxy, store):
        write_bytes(store, "big", BIG)
        assert store.read("big") == BIG
        assert len([1 for method, path in proxy.seen if method == "POST"]) == 3


@pytest.mark.parametrize("kept", [0, 1, 999])
def test_body_that_always_breaks_off_is_never_short_data(
    through: Through, s3_store: S3Store, kept: int
) -> None:
    write_bytes(s3_store, "f", b"x" * 1000)
    with through(first(999, Truncate(kept))) as (proxy, store):
        with one_line_error(ShortReadError, f"{store.url}/f", "broke off", "check the network"):
            store.read("f")
        assert len(proxy.seen) == ATTEMPTS
        with pytest.raises(ShortReadError):
            Chunks(store, "f").as_stream().read()
        if kept < 300:
            with pytest.raises(StoreError):
                list(store.list())


def test_gateway_restart_is_outlived(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While connections are refused, as they are while a gateway starts again."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    with contextlib.closing(S3Store(f"s3://{bucket}/data", first_pause_s=0.01)) as store:
        with one_line_error(
            StoreError, f"127.0.0.1:{port}", "check the network or AWS_ENDPOINT_URL"
        ):
            store.read("f")
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
        store.close()
        write_bytes(store, "f", b"x")
        assert store.read("f") == b"x"
