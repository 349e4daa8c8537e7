"""What the S3 server and the fault proxy of the tests do, so that other tests can rely on it."""

import contextlib
import http.client
import http.server
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.kit.faultproxy import (
    Delay,
    DelayBody,
    Drop,
    DropAfter,
    Fault,
    FaultProxy,
    Handler,
    Status,
    Truncate,
    first,
)
from tests.kit.s3 import S3Server, run_tool, s3_client, start_server

MIB = 1024 * 1024


@pytest.fixture
def client(bucket: str) -> Iterator[Any]:  # noqa: ARG001
    with s3_client() as made:
        yield made


@contextlib.contextmanager
def faulty(server: S3Server, fault: Fault | None, **match: str) -> Iterator[tuple[FaultProxy, Any]]:
    """A proxy that does this to the first request, or to none, and a client that talks to it."""
    rule = first(1 if fault else 0, fault or Drop(), **match)
    with FaultProxy(server.url, rule) as proxy, s3_client(proxy.url) as client:
        yield proxy, client


def error_code(call: Any, **kwargs: Any) -> str:
    from botocore.exceptions import ClientError

    with pytest.raises(ClientError) as caught:
        call(**kwargs)
    return str(caught.value.response["Error"]["Code"])


def body(client: Any, bucket: str, key: str, **kwargs: Any) -> bytes:
    with contextlib.closing(client.get_object(Bucket=bucket, Key=key, **kwargs)["Body"]) as stream:
        return bytes(stream.read())


def keys(client: Any, bucket: str) -> list[str]:
    return [found["Key"] for found in client.list_objects_v2(Bucket=bucket).get("Contents", [])]


def upload_parts(client: Any, bucket: str, key: str, *parts: bytes) -> dict[str, Any]:
    """Upload in parts; what is left to say to complete_multipart_upload."""
    upload = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    target = {"Bucket": bucket, "Key": key, "UploadId": upload}
    done = []
    for number, data in enumerate(parts, 1):
        answer = client.upload_part(**target, PartNumber=number, Body=data)
        done.append({"PartNumber": number, "ETag": answer["ETag"]})
    return {**target, "MultipartUpload": {"Parts": done}}


def test_put_get_list(client: Any, bucket: str) -> None:
    client.put_object(Bucket=bucket, Key="a/b", Body=b"0123456789")
    assert body(client, bucket, "a/b") == b"0123456789"
    assert body(client, bucket, "a/b", Range="bytes=2-4") == b"234"
    assert keys(client, bucket) == ["a/b"]
    assert error_code(client.get_object, Bucket=bucket, Key="none") == "NoSuchKey"


def test_conditional_put_of_an_existing_key_is_refused(client: Any, bucket: str) -> None:
    new = {"Bucket": bucket, "Key": "k", "IfNoneMatch": "*"}
    client.put_object(**new, Body=b"first")
    assert error_code(client.put_object, **new, Body=b"second") == "PreconditionFailed"
    assert body(client, bucket, "k") == b"first"


def test_corrupt_upload_is_refused(client: Any, bucket: str) -> None:
    wrong = {"Bucket": bucket, "Key": "k", "Body": b"x", "ContentMD5": "A" * 22 + "=="}
    assert error_code(client.put_object, **wrong) == "BadDigest"
    assert keys(client, bucket) == []


def test_multipart_upload_shows_when_complete(client: Any, bucket: str) -> None:
    parts = upload_parts(client, bucket, "big", b"a" * 5 * MIB, b"b")
    uploads = client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert [(found["Key"], found["UploadId"]) for found in uploads] == [("big", parts["UploadId"])]
    assert keys(client, bucket) == []
    client.complete_multipart_upload(**parts)
    assert body(client, bucket, "big") == b"a" * 5 * MIB + b"b"
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)


def test_this_server_ignores_the_condition_on_multipart_completion(
    client: Any, bucket: str
) -> None:
    """AWS answers 412; Ceph 16 overwrites. When this fails, Ceph has learned it: celebrate."""
    client.put_object(Bucket=bucket, Key="k", Body=b"first")
    parts = upload_parts(client, bucket, "k", b"second")
    client.complete_multipart_upload(**parts, IfNoneMatch="*")
    assert body(client, bucket, "k") == b"second"


def test_restarted_gateway_keeps_the_data(client: Any, bucket: str, s3_server: S3Server) -> None:
    parts = upload_parts(client, bucket, "big", b"a" * 5 * MIB, b"b")
    client.put_object(Bucket=bucket, Key="k", Body=b"kept")
    s3_server.restart_gateway()
    with s3_client() as later:
        assert body(later, bucket, "k") == b"kept"
        later.complete_multipart_upload(**parts)
        began = time.monotonic()
        later.create_bucket(Bucket=f"{bucket}-2")
        assert time.monotonic() - began < 5, "the dead gateway holds up the new one"


def test_stop_leaves_no_process_and_no_directory(s3_server: S3Server, tmp_path: Path) -> None:
    home = tmp_path / "server"
    server = start_server(home, ttl=60)
    try:
        again = run_tool("start", "--dir", home)
        assert server.url in again.stdout
        assert server.url != s3_server.url
        assert len(processes_of(home)) == 4
    finally:
        stopped = run_tool("stop", "--dir", home)
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert processes_of(home) == []
    assert not home.exists()
    assert len(processes_of(s3_server.home)) == 4


def test_server_stops_when_its_time_is_over(s3_server: S3Server, tmp_path: Path) -> None:  # noqa: ARG001
    home = tmp_path / "server"
    start_server(home, ttl=3)
    deadline = time.monotonic() + 20
    while home.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not home.exists()
    assert [line for line in processes_of(home) if b"watchdog" not in line] == []


def test_directory_of_something_else_is_left_alone(s3_server: S3Server, tmp_path: Path) -> None:  # noqa: ARG001
    (tmp_path / "precious").write_text("kept")
    refused = run_tool("start", "--dir", tmp_path)
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert run_tool("stop", "--dir", tmp_path).returncode == 0
    assert (tmp_path / "precious").read_text() == "kept"


def test_port_in_use_is_refused(s3_server: S3Server, tmp_path: Path) -> None:
    port = s3_server.url.rsplit(":", 1)[1]
    refused = run_tool("start", "--dir", tmp_path / "server", "--port", port)
    assert refused.returncode == 1
    assert refused.stderr == f"s3-server: port {port}: Address already in use\n"


def test_failure_names_the_log_and_leaves_no_process(
    s3_server: S3Server,  # noqa: ARG001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = tmp_path / "bin" / "radosgw"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho broken\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(broken.parent), prepend=os.pathsep)
    home = tmp_path / "server"
    failed = run_tool("start", "--dir", home)
    assert failed.returncode == 1
    assert str(home / "rgw.log") in failed.stderr.splitlines()[-1]
    assert (home / "rgw.log").read_text() == "broken\n"
    assert processes_of(home) == []


def processes_of(home: Path) -> list[bytes]:
    """Command lines that name the directory; a process that ended has none."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            line = Path("/proc", pid, "cmdline").read_bytes()
            if os.fsencode(home) in line.replace(b"/ceph.conf", b"").split(b"\0"):
                found.append(line)
    return found


def test_proxy_passes_everything_on(s3_server: S3Server, bucket: str) -> None:
    with faulty(s3_server, None) as (proxy, client):
        client.put_object(Bucket=bucket, Key="k", Body=b"0123456789")
        assert body(client, bucket, "k") == b"0123456789"
        assert body(client, bucket, "k", Range="bytes=2-4") == b"234"
        assert client.head_object(Bucket=bucket, Key="k")["ContentLength"] == 10
        assert keys(client, bucket) == ["k"]
        parts = upload_parts(client, bucket, "big", b"a" * 5 * MIB, b"b")
        client.complete_multipart_upload(**parts)
        client.delete_object(Bucket=bucket, Key="k")
        assert keys(client, bucket) == ["big"]
        assert proxy.requests[:2] == [("PUT", f"/{bucket}/k"), ("GET", f"/{bucket}/k")]


def test_proxy_passes_chunked_bodies_on() -> None:
    """To an upstream of our own: Ceph 16 answers 411 to a PUT without a length."""
    seen: list[bytes] = []

    class Upstream(Handler):
        def relay(self) -> None:
            assert self.is_chunked()
            seen.append(self.read_body())
            self.answer(200, [], b"")

        do_PUT = relay  # noqa: N815

    with http.server.HTTPServer(("127.0.0.1", 0), Upstream) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        with FaultProxy(url, first(0, Drop())) as proxy:
            port = urlsplit(proxy.url).port or 0
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            with contextlib.closing(connection):
                connection.request("PUT", "/b/k", iter([b"one ", b"two"]), encode_chunked=True)
                assert connection.getresponse().status == 200
        thread.join()
    assert seen == [b"one two"]


def test_proxy_answers_expect_itself(s3_server: S3Server) -> None:
    with faulty(s3_server, Status(503)) as (proxy, _):
        address = ("127.0.0.1", urlsplit(proxy.url).port or 0)
        with socket.create_connection(address, timeout=10) as sock:
            sock.sendall(b"PUT /b/k HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\n")
            sock.sendall(b"Content-Length: 2\r\n\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 100 ")
            sock.sendall(b"ok")
            assert sock.recv(1000).startswith(b"HTTP/1.1 503 ")


def test_drop_before_and_after(s3_server: S3Server, bucket: str, client: Any) -> None:
    from botocore.exceptions import ConnectionClosedError

    for fault, arrives in ((Drop(), False), (DropAfter(), True)):
        with faulty(s3_server, fault, method="PUT") as (_, through):
            with pytest.raises(ConnectionClosedError):
                through.put_object(Bucket=bucket, Key="k", Body=b"x")
            assert (keys(client, bucket) == ["k"]) is arrives


def test_truncated_body(s3_server: S3Server, bucket: str, client: Any) -> None:
    from botocore.exceptions import ResponseStreamingError

    client.put_object(Bucket=bucket, Key="k", Body=b"x" * 1000)
    with faulty(s3_server, Truncate(100)) as (_, through):
        answer = through.get_object(Bucket=bucket, Key="k")
        assert answer["ContentLength"] == 1000
        with contextlib.closing(answer["Body"]) as stream, pytest.raises(ResponseStreamingError):
            stream.read()
        assert len(body(through, bucket, "k")) == 1000


@pytest.mark.parametrize(("code", "name"), [(503, "SlowDown"), (429, "TooManyRequests")])
def test_status(s3_server: S3Server, bucket: str, client: Any, code: int, name: str) -> None:
    with faulty(s3_server, Status(code, {"Retry-After": "1"})) as (_, through):
        put = {"Bucket": bucket, "Key": "k", "Body": b"x"}
        assert error_code(through.put_object, **put) == name
        assert keys(client, bucket) == []
        through.put_object(**put)
        assert keys(client, bucket) == ["k"]


@pytest.mark.parametrize("fault", [Delay(0.5), DelayBody(0.25)])
def test_delays(s3_server: S3Server, bucket: str, client: Any, fault: Fault) -> None:
    data = os.urandom(100_000)  # two chunks
    client.put_object(Bucket=bucket, Key="k", Body=data)
    with faulty(s3_server, fault, method="GET") as (_, through):
        began = time.monotonic()
        assert body(through, bucket, "k") == data
        assert time.monotonic() - began >= 0.5


def test_error_in_a_rule_comes_out(s3_server: S3Server, bucket: str) -> None:
    from botocore.exceptions import ConnectionClosedError

    def broken(_method: str, _path: str, n: int, _headers: object) -> None:
        raise ZeroDivisionError(n)

    with (
        pytest.raises(ZeroDivisionError),
        FaultProxy(s3_server.url, broken) as proxy,
        s3_client(proxy.url) as client,
        contextlib.suppress(ConnectionClosedError),
    ):
        client.list_objects_v2(Bucket=bucket)
