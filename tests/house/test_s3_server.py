"""What the S3 server and the fault proxy of the tests do, so that other tests can rely on it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.faultproxy import (
    Drop,
    Fault,
    FaultProxy,
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


def test_conditional_put_of_an_existing_key_is_refused(client: Any, bucket: str) -> None:
    new = {"Bucket": bucket, "Key": "k", "IfNoneMatch": "*"}
    client.put_object(**new, Body=b"first")
    assert error_code(client.put_object, **new, Body=b"second") == "PreconditionFailed"
    assert body(client, bucket, "k") == b"first"


def test_this_server_ignores_the_condition_on_multipart_completion(
    client: Any, bucket: str
) -> None:
    """AWS answers 412; Ceph 16 overwrites. When this fails, Ceph has learned it: celebrate."""
    client.put_object(Bucket=bucket, Key="k", Body=b"first")
    parts = upload_parts(client, bucket, "k", b"second")
    client.complete_multipart_upload(**parts, IfNoneMatch="*")
    assert body(client, bucket, "k") == b"second"


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
