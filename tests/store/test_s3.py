"""What is particular to S3: reads by signed URLs, settings and refusals."""

import os
import socket
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.kit.faultproxy import Chunked, Drop, FaultProxy, Give, Status, Truncate, first
from tests.kit.s3 import S3Server, s3_client
from tests.kit.stores import BIG, MIB, one_line_error, opened
from tests.store.conftest import Through
from wdsprep.errors import AccessError, NotFoundError, StoreError, UsageError
from wdsprep.store.base import write_bytes
from wdsprep.store.s3.reads import MOST_REFUSALS
from wdsprep.store.s3.s3_store import S3Store
from wdsprep.store.s3.uploads import WRITER

# Reads by signed URLs


def signed(proxy: FaultProxy) -> list[str]:
    return [path for _, path in proxy.seen if "X-Amz-Signature" in path]


def test_one_signature_serves_all_ranges_of_an_object(through: Through) -> None:
    with through(lambda *_: None) as (proxy, store):
        write_bytes(store, "a b+c%20/ü?&=.tar", b"0123456789")
        for start in range(10):
            data = store.read("a b+c%20/ü?&=.tar", start=start, nbytes=3)
            assert data == b"0123456789"[start : start + 3]
        assert len(signed(proxy)) == 10
        assert len(set(signed(proxy))) == 1


def test_memory_is_filled_as_far_as_the_file_goes(parted: S3Store) -> None:
    write_bytes(parted, "f", b"0123456789")
    for start in (0, 3, 9, 10, 99):
        buffer = bytearray(b"....")
        wanted = b"0123456789"[start : start + 4]
        assert parted.read_into("f", memoryview(buffer), start=start) == len(wanted)
        assert buffer == wanted + b"...."[len(wanted) :]
    with pytest.raises(NotFoundError, match="no such object"):
        parted.read_into("g", memoryview(buffer), start=0)


@pytest.mark.parametrize("fault", [Drop(), Status(503), Truncate(70_000)], ids=repr)
def test_memory_is_filled_again_where_the_network_failed(
    through: Through, s3_store: S3Store, fault: Any
) -> None:
    write_bytes(s3_store, "big", BIG)
    buffer = bytearray(MIB)
    with through(first(2, fault)) as (proxy, store):
        assert store.read_into("big", memoryview(buffer), start=5) == MIB
        assert buffer == BIG[5 : MIB + 5]
        assert len(signed(proxy)) == len(proxy.seen) == 3


@pytest.mark.parametrize("status", [200, 301, 307, 400, 403])
def test_what_refuses_a_url_is_asked_as_boto3_asks(
    through: Through, s3_store: S3Store, status: int
) -> None:
    """And the next read signs anew."""
    write_bytes(s3_store, "f", b"0123456789")
    rule, buffer = first(1, Status(status), part="X-Amz-Signature"), bytearray(4)
    with through(rule) as (proxy, store):
        assert store.read_into("f", memoryview(buffer), start=2) == 4
        assert buffer == b"2345"
        assert store.read("f", start=1, nbytes=2) == b"12"
        assert [("X-Amz-Signature" in path) for _, path in proxy.seen] == [True, False, True]


def test_urls_are_given_up_with_a_warning_where_all_are_refused(
    through: Through, bucket: str, s3_store: S3Store, caplog: pytest.LogCaptureFixture
) -> None:
    write_bytes(s3_store, "f", b"x")
    rule = first(9999, Status(403), part="X-Amz-Signature")
    with through(rule) as (proxy, store):
        for _ in range(MOST_REFUSALS + 5):
            assert store.read("f") == b"x"
        assert len(signed(proxy)) == MOST_REFUSALS
    assert caplog.text.count(f"s3://{bucket} refuses signed URLs (403") == 1


TEN = b"0123456789"
WRONG = {
    "the whole file": Give(TEN),
    "another range": Give(b"1234", "bytes 1-4/10"),
    "a shorter one": Give(b"23", "bytes 2-3/10"),
    "a longer one": Give(b"23456", "bytes 2-6/10"),
    "one of a file that ends within": Give(b"2345", "bytes 2-5/5"),
    "one of nobody knows what": Give(b"234", "bytes 2-4/*"),
    "no range at all": Give(b"2345", "bytes"),
}


@pytest.mark.parametrize("part", ["", "X-Amz-Signature"], ids=["boto3 too", "by URL"])
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_range_is_never_taken_for_the_bytes(through: Through, kind: str, part: str) -> None:
    """Where boto3's own request brings the right one, that is taken."""
    with through(first(99, WRONG[kind], "GET", part)) as (proxy, store):
        write_bytes(store, "f", TEN)
        buffer = bytearray(4)
        for act in (
            lambda: store.read("f", start=2, nbytes=4),
            lambda: buffer[: store.read_into("f", memoryview(buffer), start=2)],
        ):
            if part and kind == "the whole file":
                assert act() == b"2345"
                continue
            with one_line_error(StoreError, "when asked for bytes=2-5, so it or a proxy", "proxy"):
                act()
        assert len(proxy.seen) <= 1 + 2 * 2  # a server that ignores ranges will do so again


def test_a_range_that_is_the_whole_file_may_come_as_one(through: Through) -> None:
    with through(first(99, Give(TEN), "GET")) as (proxy, store):
        write_bytes(store, "f", TEN)
        for _ in range(3):
            assert {store.read("f", nbytes=nbytes) for nbytes in (None, 10, 11)} == {TEN}
        assert len(signed(proxy)) == len(proxy.seen) - 1


def test_answers_in_chunks_cost_no_time(through: Through) -> None:
    rule, data = first(99, Chunked()), BIG[:200_000]
    with through(rule) as (proxy, store):
        began, buffer = time.monotonic(), bytearray(100)
        write_bytes(store, "f", data)
        write_bytes(store, "empty", b"")
        assert store.read("f") == data
        assert store.read("empty") == store.read("f", start=len(data)) == b""
        assert store.read("f", start=150_000, nbytes=99_999) == data[150_000:]
        assert store.read_into("f", memoryview(buffer), start=7) == 100
        assert buffer == data[7:107]
        with pytest.raises(NotFoundError):
            store.read("none")
        assert [entry.name for entry in store.list()] == ["empty", "f"]
        assert len(proxy.seen) <= 11
    assert time.monotonic() - began < 5


def test_a_default_port_that_is_spelt_out_is_signed_as_it_is_sent(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway stands behind port 80, where only root could put it."""
    ask, hosts = socket.getaddrinfo, list[str]()

    def at_port_80(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        return ask(host, real if port == 80 else port, *args, **kwargs)

    def see(_method: str, _path: str, _n: int, headers: Any) -> None:
        hosts.append(headers["Host"])

    with FaultProxy(s3_server.url, see) as proxy:
        real = int(proxy.url.rpartition(":")[2])
        monkeypatch.setattr(socket, "getaddrinfo", at_port_80)
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:80")
        with opened(f"s3://{bucket}/data") as store:
            write_bytes(store, "f", b"0123456789")
            digits = [store.read("f", start=n, nbytes=1) for n in range(5)]
            assert digits == [b"0", b"1", b"2", b"3", b"4"]
        assert hosts == ["127.0.0.1"] * 6
        assert len(signed(proxy)) == 5


# Settings and refusals


def refused(url: str, kind: type[Exception], *parts: str) -> None:
    """Every operation says the same, at once: eight attempts at each would take minutes."""
    began = time.monotonic()
    with opened(url) as store:
        for act in (
            lambda: store.read("f"),
            lambda: list(store.list()),
            lambda: write_bytes(store, "f", b"x"),
            lambda: write_bytes(store, "f", b"x", exclusive=True),
            lambda: write_bytes(store, "f", BIG),
            lambda: store.delete("f"),
            store.sweep,
        ):
            with one_line_error(kind, *parts):
                act()
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({"ACCESS_KEY_ID": "nobody"}, ["check AWS_ACCESS_KEY_ID"]),
        ({"SECRET_ACCESS_KEY": "wrong"}, ["check AWS_SECRET_ACCESS_KEY"]),
        ({"ACCESS_KEY_ID": "", "SECRET_ACCESS_KEY": ""}, [": no credentials: set AWS_ACCESS_KEY"]),
        ({"SECRET_ACCESS_KEY": ""}, ["half of the credentials is missing, AWS_SECRET_ACCESS_KEY"]),
        ({"PROFILE": "nobody"}, ["(nobody)", "check the AWS settings"]),
        ({"ENDPOINT_URL": "nonsense"}, ["nonsense", "check the AWS settings"]),
    ],
)
def test_settings_that_open_nothing(
    changed: dict[str, str], parts: list[str], bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in changed.items():
        monkeypatch.setenv(f"AWS_{name}", value)
        if not value:
            monkeypatch.delenv(f"AWS_{name}")
    refused(f"s3://{bucket}/data", AccessError, f"s3://{bucket}: ", *parts)


@pytest.mark.usefixtures("s3_env")
def test_buckets_that_are_not_there() -> None:
    place = "s3://wdsprep-no-such-bucket"
    refused(f"{place}/x", NotFoundError, f"{place}: no such bucket: create it")
    refused("s3://no*bucket/x", UsageError, "s3://no*bucket/x", "no*bucket")


def test_bucket_of_somebody_else(
    through: Through, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = first(999, Status(403))
    with through(rule) as (proxy, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        refused(f"s3://{bucket}", AccessError, f"s3://{bucket}", "access denied: check the perm")


def test_profile_file_gives_credentials_and_endpoint(
    s3_env: dict[str, str], bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in s3_env:
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(
        "[profile lab]\n"
        f"endpoint_url = {s3_env['AWS_ENDPOINT_URL']}\n"
        f"region = {s3_env['AWS_DEFAULT_REGION']}\n"
        f"aws_access_key_id = {s3_env['AWS_ACCESS_KEY_ID']}\n"
        f"aws_secret_access_key = {s3_env['AWS_SECRET_ACCESS_KEY']}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    with opened(f"s3://{bucket}/data") as store:
        write_bytes(store, "f", b"x")
        assert store.read("f") == b"x"


def test_fork_gets_a_client_of_its_own(s3_store: S3Store) -> None:
    write_bytes(s3_store, "f", b"parent")
    of_parent = s3_store.client
    child = os.fork()
    if child == 0:
        is_own = s3_store.client is not of_parent
        write_bytes(s3_store, "g", b"child")
        os._exit(0 if is_own and s3_store.read("f") == b"parent" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert s3_store.read("g") == b"child"


def test_listing_goes_on_after_a_thousand(parted: S3Store, bucket: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    made = [f"{n:04}" for n in range(1001)]
    with s3_client(max_pool_connections=8) as client, ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda n: client.put_object(Bucket=bucket, Key=f"data/{n}"), made):
            pass
    assert [entry.name for entry in parted.list()] == made
    with patch("wdsprep.store.s3.listing.ALONE", 1):  # as from the ninth thousand on
        assert [entry.name for entry in parted.list()] == made


def test_console_folder_is_no_file(parted: S3Store, bucket: str) -> None:
    with s3_client() as client:
        for key in ("data/", "data/a/", "data/a/f"):
            client.put_object(Bucket=bucket, Key=key)
    assert [entry.name for entry in parted.list()] == ["a/f"]


def test_bytes_are_what_other_clients_see(parted: S3Store, bucket: str) -> None:
    write_bytes(parted, "big", BIG)
    with s3_client() as client:
        answer = client.get_object(Bucket=bucket, Key="data/big")
        assert answer["Body"].read() == BIG
        assert list(answer["Metadata"]) == [WRITER]


def test_objects_say_what_they_are(parted: S3Store, bucket: str) -> None:
    """A page on S3 opens in a browser: the report."""
    kinds = {
        "report.html": "text/html; charset=utf-8",
        "a.b/REPORT.HTML": "text/html; charset=utf-8",
        "wdsprep.json": "application/json",
        "256/000000.tar": "application/x-tar",
        "256/000000.tar.idx": "binary/octet-stream",
        "html": "binary/octet-stream",
    }
    for data in (b"<html>", BIG):
        for name in kinds:
            write_bytes(parted, name, data)
        with s3_client() as client:
            heads = {n: client.head_object(Bucket=bucket, Key=f"data/{n}") for n in kinds}
        assert {name: head["ContentType"] for name, head in heads.items()} == kinds
