"""The signature of each body by which the server refuses those that were bent."""

import hashlib
from email.message import Message
from typing import Any

import pytest

from tests.kit.faultproxy import Bend, Fault
from tests.kit.stores import BIG, one_line_error, uploads
from tests.kit.webserver import Authority
from tests.store.conftest import Through
from wdsprep.errors import StoreError
from wdsprep.store.base import write_bytes


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("authority"))


@pytest.fixture(params=["http", "https"])
def kind(
    request: pytest.FixtureRequest, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """How the server is spoken to: as `FaultProxy` has it."""
    if request.param == "http":
        return {}
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))
    return {"tls": authority.context()}


def test_the_sha_256_of_each_body_is_signed(through: Through, kind: dict[str, Any]) -> None:
    signed = []

    def note(method: str, _path: str, _n: int, headers: Message) -> None:
        if method == "PUT":
            signed.append(headers["x-amz-content-sha256"])

    with through(note, **kind) as (_, store):
        write_bytes(store, "small", b"0123456789")
        write_bytes(store, "big", BIG)
        assert store.read("big") == BIG
        part_nbytes = store.part_nbytes
    parts = [BIG[at : at + part_nbytes] for at in range(0, len(BIG), part_nbytes)]
    expected = [hashlib.sha256(body).hexdigest() for body in (b"0123456789", *parts)]
    assert sorted(signed) == sorted(expected)


@pytest.mark.parametrize("part", ["small", "partNumber=2"])
def test_a_bent_body_is_refused(
    through: Through, bucket: str, kind: dict[str, Any], part: str
) -> None:
    name, data = ("small", b"0123456789") if part == "small" else ("big", BIG)

    def bend(_method: str, path: str, _n: int, _headers: Message) -> Fault | None:
        return Bend() if part in path else None

    with through(bend, **kind) as (_, store):
        write_bytes(store, "before", b"sound")
        with one_line_error(StoreError, f"{store.url}/{name}", "400 XAmzContentSHA256Mismatch"):
            write_bytes(store, name, data)
        assert [entry.name for entry in store.list()] == ["before"]
        assert uploads(bucket) == []
