"""What is particular to S3: uploads in parts, an unreliable network, settings and refusals."""

import contextlib
import multiprocessing
import os
import pickle
import random
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.kit.faultproxy import (
    Chunked,
    Delay,
    DelayBody,
    Drop,
    DropAfter,
    Fault,
    FaultProxy,
    Give,
    Rule,
    Status,
    Truncate,
    first,
)
from tests.kit.latent_sets import write_latents
from tests.kit.s3 import S3Server, s3_client
from wdsprep.dataset import read_manifest
from wdsprep.errors import (
    AccessError,
    ExistsError,
    NotFoundError,
    ShortReadError,
    StoreError,
    UsageError,
)
from wdsprep.manifest import Manifest
from wdsprep.run import sweep
from wdsprep.store import open_store, s3_uploads, stream, write_bytes
from wdsprep.store.s3 import WRITER, S3Store
from wdsprep.store.s3_errors import ATTEMPTS
from wdsprep.store.s3_reads import MOST_REFUSALS

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["boto3", "tests.store.test_s3"])
MIB = 1 << 20
BIG = random.Random(0).randbytes(11 * MIB)  # three parts


@contextlib.contextmanager
def through(
    server: S3Server, bucket: str, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[FaultProxy, S3Store]]:
    with FaultProxy(server.url, rule) as proxy, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with opened(f"s3://{bucket}/data") as store:
            yield proxy, store


@contextlib.contextmanager
def opened(url: str) -> Iterator[S3Store]:
    store = S3Store(url, part_nbytes=5 * MIB, first_pause_s=0.001)
    with contextlib.closing(store):
        yield store


@pytest.fixture
def parted(bucket: str) -> Iterator[S3Store]:
    with opened(f"s3://{bucket}/data") as store:
        yield store


def uploads(bucket: str) -> list[str]:
    with s3_client() as client:
        return [u["Key"] for u in client.list_multipart_uploads(Bucket=bucket).get("Uploads", ())]


def one_line(error: Exception, *parts: str) -> bool:
    text = str(error)
    assert "\n" not in text
    assert [part for part in parts if part not in text] == [], text
    return True


# Parts


@pytest.mark.parametrize("nbytes", [5 * MIB - 1, 5 * MIB, 5 * MIB + 1, 11 * MIB])
def test_file_in_parts_is_whole(parted: S3Store, bucket: str, nbytes: int) -> None:
    data, at = memoryview(BIG)[:nbytes], 0
    with parted.write("big") as sink:
        while at < nbytes:
            sink.write(bytes(data[at : at + 999_983]))
            at += 999_983
    assert parted.read("big") == data
    assert uploads(bucket) == []
    with stream(parted, "big", chunk_nbytes=4 * MIB) as file:
        assert file.read() == data


def test_several_parts_are_in_flight(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three parts meet at a barrier: one after the other, they would wait for ever."""
    together = threading.Barrier(3, timeout=20)

    def rule(_method: str, path: str, _n: int, _headers: object) -> None:
        if "partNumber" in path:
            together.wait()

    with through(s3_server, bucket, rule, monkeypatch) as (_, store):
        write_bytes(store, "big", BIG)
        assert store.read("big") == BIG


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()])
def test_exception_aborts_the_upload(parted: S3Store, bucket: str, error: BaseException) -> None:
    with pytest.raises(type(error)):
        break_off(parted, bucket, error)
    assert uploads(bucket) == []
    assert list(parted.list()) == []


def break_off(store: S3Store, bucket: str, error: BaseException) -> None:
    with store.write("big") as sink:
        sink.write(BIG)
        assert uploads(bucket) == ["data/big"]
        raise error


def test_part_that_fails_for_good_aborts_the_upload(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = first(99, Status(500), part="partNumber=2")
    with through(s3_server, bucket, rule, monkeypatch) as (proxy, store):
        with pytest.raises(StoreError) as caught:
            write_bytes(store, "big", BIG)
        assert one_line(caught.value, f"{store.url}/big", "500 InternalError", "try later")
        assert len([path for _, path in proxy.requests if "partNumber=2" in path]) == ATTEMPTS
        assert uploads(bucket) == []
        assert list(store.list()) == []


def test_failed_part_is_fatal_even_to_a_caller_that_goes_on(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = first(ATTEMPTS, Status(503), part="uploads")
    with through(s3_server, bucket, rule, monkeypatch) as (_, store):
        going_on = contextlib.suppress(Exception)
        with pytest.raises(StoreError), store.write("big") as sink, going_on:
            sink.write(BIG)
        assert list(store.list()) == []
        assert uploads(bucket) == []


# Uploads that are left


def begin_uploads(bucket: str, *keys: str) -> None:
    with s3_client() as client:
        for key in keys:
            client.create_multipart_upload(Bucket=bucket, Key=key)


@pytest.fixture
def aged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was begun, it was over a day ago."""
    monkeypatch.setattr("wdsprep.store.s3.ABANDONED_UPLOAD", timedelta(hours=-1))


def test_uploads_of_nobody_knows_whom_are_aborted_when_old_and_under_names_of_ours(
    parted: S3Store, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = ["256/000000.tar", "data/theirs", "data/x/theirs", "database", "other"]
    begin_uploads(bucket, "data/256/000000.tar", "data/x/000000.tar", *theirs)
    ours = re.compile(r"\w+/\d+\.tar").fullmatch
    assert parted.sweep(ours) == 0
    monkeypatch.setattr("wdsprep.store.s3.ABANDONED_UPLOAD", timedelta(hours=-1))
    assert parted.sweep() == 0
    assert parted.sweep(ours) == 2
    assert uploads(bucket) == theirs


@pytest.mark.usefixtures("aged")
def test_a_dataset_aborts_what_could_be_a_part_of_it_alone(bucket: str) -> None:
    """At the root of a bucket, where others write too."""
    theirs = ["2024/backup.tar", "256/notes.txt", "backup.tar", "rejects/2024/a.jsonl"]
    shards = ["256/000000.tar", "512/000001_01.tar"]
    images = Manifest(dataset="images", settings={"buckets": [256, 512]})
    begin_uploads(bucket, *theirs, *shards, "wdsprep.json")
    with opened(f"s3://{bucket}") as store:
        latents = read_manifest(open_store(write_latents(store.url, (2,))))
        assert latents is not None
        sweep(store, images)
        assert uploads(bucket) == theirs
        begin_uploads(bucket, "256/what the tar was called.tar", "2023/x.tar")
        sweep(store, images)
        assert len(uploads(bucket)) == len(theirs) + 2
        sweep(store, latents)
        assert uploads(bucket) == sorted(["2023/x.tar", *theirs])


def write_slowly(url: str, env: dict[str, str], name: str, ready: Any, go_on: Any) -> None:
    os.environ.update(env)
    with opened(url) as store, store.write(name) as sink:
        sink.write(BIG[: 5 * MIB])
        ready.set()
        go_on.wait(60)
        sink.write(BIG[5 * MIB :])


@contextlib.contextmanager
def writing(store: S3Store, *names: str) -> Iterator[list[tuple[Any, Any]]]:
    """Processes that have begun an upload, and what makes them go on."""
    writers, env = [], {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    for name in names:
        ready, go_on = FORKING.Event(), FORKING.Event()
        writer = FORKING.Process(target=write_slowly, args=(store.url, env, name, ready, go_on))
        writer.start()
        writers.append((writer, ready, go_on))
    try:
        assert all(ready.wait(60) for _, ready, _ in writers)
        yield [(writer, go_on) for writer, _, go_on in writers]
    finally:
        for writer, _, _ in writers:
            writer.kill()
            writer.join()


@pytest.mark.usefixtures("aged")
def test_the_upload_of_a_dead_writer_is_aborted_at_once_that_of_a_living_one_never(
    parted: S3Store, bucket: str
) -> None:
    """However old, and whether or not the writer runs just now."""
    with writing(parted, "alive", "dead", "stopped") as writers:
        alive, dead, stopped = writers
        os.kill(stopped[0].pid, signal.SIGSTOP)
        assert parted.sweep(lambda _name: True) == 0
        dead[0].kill()
        dead[0].join()
        assert parted.sweep(lambda _name: True) == 1
        assert uploads(bucket) == ["data/alive", "data/stopped"]
        os.kill(stopped[0].pid, signal.SIGCONT)
        for writer, go_on in (alive, stopped):
            go_on.set()
            writer.join()
            assert writer.exitcode == 0
    assert parted.read("alive") == parted.read("stopped") == BIG
    assert uploads(bucket) == []


def test_an_upload_that_could_not_be_aborted_is_so_by_the_next_sweep(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = first(ATTEMPTS, Status(503), "DELETE")
    with through(s3_server, bucket, rule, monkeypatch) as (_, store):
        with pytest.raises(ZeroDivisionError):
            break_off(store, bucket, ZeroDivisionError())
        assert uploads(bucket) == ["data/big"]
        assert store.sweep() == 1
        assert uploads(bucket) == []


def test_notes_of_uploads_are_few_and_of_this_user_alone(
    tmp_path: Path, parted: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    write_bytes(parted, "big", BIG)
    (folder,) = tmp_path.iterdir()
    assert list(folder.iterdir()) == []
    assert folder.stat().st_mode & 0o777 == 0o700
    for name in ("old", "young"):
        (folder / name).touch()
    os.utime(folder / "old", (0, 0))
    parted.sweep()
    assert [path.name for path in folder.iterdir()] == ["young"]
    folder.chmod(0o777)
    assert s3_uploads.write_note("bucket/key/1") is None
    assert s3_uploads.writer_of("young") is s3_uploads.Writer.UNKNOWN
    write_bytes(parted, "big", BIG)


# An unreliable network

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
def test_every_operation_outlives(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """Each request in turn meets the fault twice, whatever it asks for."""
    seen: dict[tuple[str, str], int] = {}

    def twice(method: str, path: str, _n: int, _headers: object) -> Fault | None:
        key = method, path
        seen[key] = seen.get(key, 0) + 1
        return fault if seen[key] <= 2 else None

    with through(s3_server, bucket, twice, monkeypatch) as (proxy, store):
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
        lost = [key for key in set(proxy.requests) if seen[key] < 3]
        assert lost == [] or isinstance(fault, Delay | DelayBody | DropAfter)
    assert uploads(bucket) == []


@pytest.mark.parametrize("fault", [Drop(), DropAfter(), Status(503), Status(429)], ids=repr)
def test_fault_without_end_is_one_clear_line_after_eight_attempts(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    with through(s3_server, bucket, first(999, fault), monkeypatch) as (proxy, store):
        for act in (
            lambda: store.read("f"),
            lambda: list(store.list()),
            lambda: write_bytes(store, "f", b"x"),
            lambda: store.delete("f"),
            store.sweep,
        ):
            before = len(proxy.requests)
            with pytest.raises(StoreError) as caught:
                act()
            assert one_line(caught.value, store.url)
            assert len(proxy.requests) == before + ATTEMPTS


@pytest.mark.parametrize("exclusive", [False, True])
def test_lost_answer_of_a_write_is_success(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch, exclusive: bool
) -> None:
    rule = first(1, DropAfter(), "PUT")
    with through(s3_server, bucket, rule, monkeypatch) as (proxy, store):
        write_bytes(store, "f", b"mine", exclusive=exclusive)
        assert len([1 for method, _ in proxy.requests if method == "PUT"]) == 2
        assert store.read("f") == b"mine"
        with pytest.raises(ExistsError):
            write_bytes(store, "f", b"mine", exclusive=True)


def test_lost_answer_is_no_excuse_where_somebody_else_was_first(
    s3_server: S3Server, bucket: str, s3_store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bytes(s3_store, "f", b"same")
    rule = first(1, DropAfter(), "PUT")
    with through(s3_server, bucket, rule, monkeypatch) as (_, store), pytest.raises(ExistsError):
        write_bytes(store, "f", b"same", exclusive=True)


def test_lost_answer_of_a_completion_is_success(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = first(1, DropAfter(), "POST", "uploadId")
    with through(s3_server, bucket, rule, monkeypatch) as (_, store):
        write_bytes(store, "big", BIG)
        assert store.read("big") == BIG
    assert uploads(bucket) == []


def test_body_that_breaks_off_is_asked_for_again(
    s3_server: S3Server, bucket: str, s3_store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bytes(s3_store, "big", BIG)
    with through(s3_server, bucket, first(3, Truncate(100_000)), monkeypatch) as (_, store):
        assert store.read("big") == BIG
        assert [e.name for e in store.list()] == ["big"]
    with through(s3_server, bucket, first(3, Truncate(100)), monkeypatch) as (_, store):
        assert [e.name for e in store.list()] == ["big"]


@pytest.mark.parametrize("kept", [0, 1, 50])
@pytest.mark.parametrize("part", ["uploads", "uploadId"])
def test_upload_outlives_an_answer_that_breaks_off(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch, part: str, kept: int
) -> None:
    rule = first(1, Truncate(kept), "POST", part)
    with through(s3_server, bucket, rule, monkeypatch) as (proxy, store):
        write_bytes(store, "big", BIG)
        assert store.read("big") == BIG
        assert len([1 for method, path in proxy.requests if method == "POST"]) == 3


@pytest.mark.parametrize("kept", [0, 1, 999])
def test_body_that_always_breaks_off_is_never_short_data(
    s3_server: S3Server, bucket: str, s3_store: S3Store, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    write_bytes(s3_store, "f", b"x" * 1000)
    with through(s3_server, bucket, first(999, Truncate(kept)), monkeypatch) as (proxy, store):
        with pytest.raises(ShortReadError) as caught:
            store.read("f")
        assert one_line(caught.value, f"{store.url}/f", "broke off", "check the network")
        assert len(proxy.requests) == ATTEMPTS
        with pytest.raises(ShortReadError):
            stream(store, "f").read()
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
        with pytest.raises(StoreError) as caught:
            store.read("f")
        assert one_line(caught.value, f"127.0.0.1:{port}", "check the network or AWS_ENDPOINT_URL")
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
        store.close()
        write_bytes(store, "f", b"x")
        assert store.read("f") == b"x"


# Reads by signed URLs


def signed(proxy: FaultProxy) -> list[str]:
    return [path for _, path in proxy.requests if "X-Amz-Signature" in path]


def test_one_signature_serves_all_ranges_of_an_object(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with through(s3_server, bucket, lambda *_: None, monkeypatch) as (proxy, store):
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
    s3_server: S3Server, bucket: str, s3_store: S3Store, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    write_bytes(s3_store, "big", BIG)
    buffer = bytearray(MIB)
    with through(s3_server, bucket, first(2, fault), monkeypatch) as (proxy, store):
        assert store.read_into("big", memoryview(buffer), start=5) == MIB
        assert buffer == BIG[5 : MIB + 5]
        assert len(signed(proxy)) == len(proxy.requests) == 3


@pytest.mark.parametrize("status", [200, 301, 307, 400, 403])
def test_what_refuses_a_url_is_asked_as_boto3_asks(
    s3_server: S3Server,
    bucket: str,
    s3_store: S3Store,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
) -> None:
    """And the next read signs anew."""
    write_bytes(s3_store, "f", b"0123456789")
    rule, buffer = first(1, Status(status), part="X-Amz-Signature"), bytearray(4)
    with through(s3_server, bucket, rule, monkeypatch) as (proxy, store):
        assert store.read_into("f", memoryview(buffer), start=2) == 4
        assert buffer == b"2345"
        assert store.read("f", start=1, nbytes=2) == b"12"
        assert [("X-Amz-Signature" in path) for _, path in proxy.requests] == [True, False, True]


def test_urls_are_given_up_with_a_warning_where_all_are_refused(
    s3_server: S3Server,
    bucket: str,
    s3_store: S3Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_bytes(s3_store, "f", b"x")
    rule = first(9999, Status(403), part="X-Amz-Signature")
    with through(s3_server, bucket, rule, monkeypatch) as (proxy, store):
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
def test_a_wrong_range_is_never_taken_for_the_bytes(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch, kind: str, part: str
) -> None:
    """Where boto3's own request brings the right one, that is taken."""
    with through(s3_server, bucket, first(99, WRONG[kind], "GET", part), monkeypatch) as (
        proxy,
        store,
    ):
        write_bytes(store, "f", TEN)
        buffer = bytearray(4)
        for act in (
            lambda: store.read("f", start=2, nbytes=4),
            lambda: buffer[: store.read_into("f", memoryview(buffer), start=2)],
        ):
            if part and kind == "the whole file":
                assert act() == b"2345"
                continue
            with pytest.raises(StoreError) as caught:
                act()
            assert one_line(caught.value, "f: asked for bytes=2-5, the server gave", "proxy")
        assert len(proxy.requests) <= 1 + 2 * 2  # a server that ignores ranges will do so again


def test_a_range_that_is_the_whole_file_may_come_as_one(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with through(s3_server, bucket, first(99, Give(TEN), "GET"), monkeypatch) as (proxy, store):
        write_bytes(store, "f", TEN)
        for _ in range(3):
            assert (
                store.read("f") == store.read("f", nbytes=10) == store.read("f", nbytes=11) == TEN
            )
        assert len(signed(proxy)) == len(proxy.requests) - 1


def test_answers_in_chunks_cost_no_time(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, data = first(99, Chunked()), BIG[:200_000]
    with through(s3_server, bucket, rule, monkeypatch) as (proxy, store):
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
        assert len(proxy.requests) <= 11
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
            assert [store.read("f", start=n, nbytes=1) for n in range(5)] == [
                b"0",
                b"1",
                b"2",
                b"3",
                b"4",
            ]
        assert hosts == ["127.0.0.1"] * 6
        assert len(signed(proxy)) == 5


# Settings and refusals


def refusal(act: Any, kind: type[Exception], *parts: str) -> None:
    with pytest.raises(kind) as caught:
        act()
    assert type(caught.value) is kind
    assert one_line(caught.value, *parts)


def refused(url: str, kind: type[Exception], *parts: str) -> None:
    """Every operation says the same, at once."""
    began = time.monotonic()
    with opened(url) as store:
        refusal(lambda: store.read("f"), kind, *parts)
        refusal(lambda: list(store.list()), kind, *parts)
        refusal(lambda: write_bytes(store, "f", b"x"), kind, *parts)
        refusal(lambda: write_bytes(store, "f", b"x", exclusive=True), kind, *parts)
        refusal(lambda: write_bytes(store, "f", BIG), kind, *parts)
        refusal(lambda: store.delete("f"), kind, *parts)
        refusal(store.sweep, kind, *parts)
    assert time.monotonic() - began < 5


def test_no_such_bucket(s3_env: dict[str, str]) -> None:  # noqa: ARG001
    place = "s3://wdsprep-no-such-bucket"
    refused(f"{place}/x", NotFoundError, f"{place}: no such bucket: create it")


def test_wrong_key(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    refused(f"s3://{bucket}", AccessError, f"s3://{bucket}", "check AWS_ACCESS_KEY_ID")


def test_wrong_secret(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    refused(f"s3://{bucket}", AccessError, f"s3://{bucket}", "check AWS_SECRET_ACCESS_KEY")


def test_no_credentials(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    refused(
        f"s3://{bucket}", AccessError, f"s3://{bucket}", "no credentials: set AWS_ACCESS_KEY_ID"
    )


def test_half_a_pair_of_keys(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    refused(f"s3://{bucket}", AccessError, f"s3://{bucket}", "AWS_SECRET_ACCESS_KEY")


def test_unknown_profile(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    refused(f"s3://{bucket}", AccessError, f"s3://{bucket}", "(nobody)", "check the AWS settings")


def test_endpoint_that_is_no_url(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "nonsense")
    refused(f"s3://{bucket}", AccessError, f"s3://{bucket}", "nonsense", "check the AWS settings")


def test_bucket_name_that_cannot_be(s3_env: dict[str, str]) -> None:  # noqa: ARG001
    refused("s3://no*bucket/x", UsageError, "s3://no*bucket/x", "no*bucket")


def test_bucket_of_somebody_else(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = first(999, Status(403))
    with through(s3_server, bucket, rule, monkeypatch) as (proxy, _):
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


def test_settings_survive_pickling_and_the_client_does_not(bucket: str) -> None:
    with opened(f"s3://{bucket}/data/") as store:
        write_bytes(store, "f", b"x")
        copy = pickle.loads(pickle.dumps(store))
        ours, theirs = ({**vars(one), "_holds": None} for one in (store, copy))
        assert theirs == {**ours, "_clients": {}}


def test_fork_gets_a_client_of_its_own(s3_store: S3Store) -> None:
    write_bytes(s3_store, "f", b"parent")
    child = os.fork()
    if child == 0:
        mine = os.getpid() in s3_store._clients
        write_bytes(s3_store, "g", b"child")
        os._exit(0 if not mine and s3_store.read("f") == b"parent" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert s3_store.read("g") == b"child"


def test_unclosed_store_is_no_leak(bucket: str) -> None:
    """Nobody has to close a store; that the tests end without a warning is the claim."""
    store = open_store(f"s3://{bucket}/data")
    write_bytes(store, "f", b"x")
    del store


def test_listing_goes_on_after_a_thousand(parted: S3Store, bucket: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    made = [f"{n:04}" for n in range(1001)]
    with s3_client(max_pool_connections=8) as client, ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda n: client.put_object(Bucket=bucket, Key=f"data/{n}"), made):
            pass
    assert [entry.name for entry in parted.list()] == made
    with patch("wdsprep.store.s3_ahead.ALONE", 1):  # as from the ninth thousand on
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
