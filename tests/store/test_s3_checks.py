"""What bodies carry for the server to check them by, and that it refuses those that were bent."""

import hashlib
import ssl
from email.message import Message
from typing import Any

import pytest

from tests.kit.faultproxy import CRC, Bend, Fault, FaultProxy, Status
from tests.kit.stores import BIG, one_line, uploads
from tests.kit.webserver import Authority
from tests.store.conftest import Through
from wdsprep.errors import StoreError
from wdsprep.store.base import write_bytes
from wdsprep.store.s3.uploads import BodyChecks, S3Sink

UNSIGNED = "UNSIGNED-PAYLOAD"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def certificate(authority: Authority) -> ssl.SSLContext:
    return authority.context()


@pytest.fixture(params=["http", "https", "https and CRC-32"])
def kind(
    request: pytest.FixtureRequest,
    authority: Authority,
    certificate: ssl.SSLContext,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Any]:
    """How the server is spoken to: as `FaultProxy` has it."""
    if request.param == "http":
        return {}
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))
    return {"tls": certificate, "knows_crc": "CRC" in request.param}


class Heads:
    """Of the requests that carry files, by what they are."""

    def __init__(self, fault: Fault | None = None, on: str = "\n") -> None:
        self.small: list[Message] = []
        self.parts: list[Message] = []
        self.begun: list[str] = []
        self._fault, self._on = fault, on

    def __call__(self, method: str, path: str, _n: int, headers: Message) -> Fault | None:
        if method == "PUT":
            (self.parts if "partNumber" in path else self.small).append(headers)
        is_begin = method == "POST" and path.endswith("?uploads")
        algorithm = headers.get("x-amz-checksum-algorithm", "")
        if is_begin:
            self.begun.append(algorithm)
        if self._on == "begin":
            return self._fault if is_begin and algorithm else None
        return self._fault if self._on in path else None


def test_a_body_carries_what_costs_least_of_what_the_server_checks(
    through: Through, kind: dict[str, Any]
) -> None:
    heads = Heads()
    with through(heads, **kind) as (_, store):
        write_bytes(store, "small", b"0123456789")
        write_bytes(store, "big", BIG)
        write_bytes(store, "big", BIG)
        assert store.read("big") == BIG
        assert store.read("small") == b"0123456789"
    sha256 = {head["x-amz-content-sha256"] for head in heads.small}
    assert sha256 == {UNSIGNED if kind else hashlib.sha256(b"0123456789").hexdigest()}
    assert {head["x-amz-content-sha256"] == UNSIGNED for head in heads.parts} == {bool(kind)}
    with_crc, with_md5 = (
        [name in head for head in heads.small + heads.parts] for name in (CRC, "Content-MD5")
    )
    knows = kind.get("knows_crc", False)
    assert with_crc == [False] + [knows] * 6
    assert with_md5[:1] == [bool(kind)]
    assert with_md5[4:] == [bool(kind) and not knows] * 3  # from then on it is known


@pytest.mark.parametrize("part", ["small", "partNumber=2"])
def test_a_bent_body_is_refused(
    through: Through, bucket: str, kind: dict[str, Any], part: str
) -> None:
    name, data = ("small", b"0123456789") if part == "small" else ("big", BIG)
    with through(lambda *_: None, **kind) as (_, store):
        write_bytes(store, "before", BIG)
    with through(Heads(Bend(), part), **kind) as (_, store):
        with pytest.raises(StoreError) as caught:
            write_bytes(store, name, data)
        code = "BadDigest" if kind else "XAmzContentSHA256Mismatch"
        assert one_line(caught.value, f"{store.url}/{name}", f"400 {code}")
        assert [entry.name for entry in store.list()] == ["before"]
        assert uploads(bucket) == []


@pytest.mark.parametrize("kind", ["https"], indirect=True)
@pytest.mark.parametrize("status", [400, 501])
def test_a_server_that_refuses_crc_32_is_asked_for_it_once(
    through: Through, kind: dict[str, Any], status: int
) -> None:
    heads = Heads(Status(status), "begin")
    with through(heads, **kind) as (_, store):
        for _ in range(2):
            write_bytes(store, "big", BIG)
        assert store.read("big") == BIG
    assert heads.begun == ["CRC32", "", ""]
    assert ["Content-MD5" in head for head in heads.parts] == [True] * 6


def test_a_part_whose_crc_32_does_not_come_back_any_more_goes_again_with_its_md5(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As behind a balancer, or where a server was rolled back."""
    sent: list[tuple[int, bool]] = []

    def ask(operation: str, **what: Any) -> dict[str, Any]:
        if operation == "create_multipart_upload":
            return {"UploadId": "u", "ChecksumAlgorithm": "CRC32"}
        if operation != "upload_part":
            return {"ETag": "e"}
        sent.append((what["PartNumber"], "ContentMD5" in what))
        knows = what["PartNumber"] < 3
        return {"ETag": "e", **({"ChecksumCRC32": what["ChecksumCRC32"]} if knows else {})}

    monkeypatch.setattr("wdsprep.store.s3.uploads.PARTS_IN_FLIGHT", 1)
    sink = S3Sink(ask, "bucket/key", 10, BodyChecks(is_signed=False), {})
    for _ in range(4):
        sink.write(b"0123456789")
    sink.finish()
    assert sent == [(1, True), (2, False), (3, False), (3, True), (4, True)]


class Forgetful(FaultProxy):
    """Gives no CRC-32 back."""

    given_back = ("x-amz-checksum-algorithm",)


@pytest.mark.parametrize("kind", ["https"], indirect=True)
def test_a_server_that_does_not_give_crc_32_back_gets_md5_for_ever(
    through: Through, kind: dict[str, Any]
) -> None:
    heads = Heads()
    options = {**kind, "knows_crc": True, "kind": Forgetful}
    with through(heads, **options) as (_, store):
        for _ in range(2):
            write_bytes(store, "big", BIG)
    assert [CRC in head and "Content-MD5" in head for head in heads.parts] == [True] * 6
