"""Fixtures that give a test Azure Blob Storage and Google Cloud Storage on loopback.

Azurite is Microsoft's own server of Azure's protocol; `tools/azurite` says which, and `tools/venv`
installs it. No server of GCS's XML protocol that can be had as a package has its conditions,
listings and uploads in parts. That protocol is S3's with other names of headers, and other
credentials: so the Ceph gateway answers, behind a proxy that translates those.
"""

import base64
import contextlib
import email.utils
import hashlib
import hmac
import http.client
import json
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.kit.faultproxy import Answer, FaultProxy, Rule
from tests.kit.paths import ROOT
from tests.kit.s3 import s3_client
from tests.kit.webserver import Request

AZURITE = ROOT / ".venv/azurite/node_modules/azurite/dist/src/blob/main.js"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's, which its documentation gives."""
START_S, LONGEST_S = 30, 3000
OTHERS = ("AZURE_", "GOOGLE_", "MSI_", "IDENTITY_")


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of its account; it ends with the session, or after an hour."""
    node = shutil.which("node")
    if node is None or not AZURITE.exists():
        if os.environ.get("CI") == "true":
            pytest.fail(f"{AZURITE} or node is missing: tools/venv installs it", pytrace=False)
        pytest.skip("Azurite is not installed: install node and npm, then run tools/venv")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["timeout", str(LONGEST_S), node, AZURITE, "--inMemoryPersistence", "--silent"]
    words += ["--blobPort", str(port), "--skipApiVersionCheck", "--disableTelemetry"]
    log = tmp_path_factory.mktemp("azurite") / "log"
    with log.open("w") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, cwd=log.parent)
    try:
        _wait_for(port, process, log)
        yield f"http://127.0.0.1:{port}/{ACCOUNT}"
    finally:
        process.terminate()
        process.wait(10)


def _wait_for(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    for _ in range(START_S * 20):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    pytest.fail(f"Azurite has not begun: {log.read_text()}", pytrace=False)


def _nobodys_settings(patch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(OTHERS):
            patch.delenv(name)


@pytest.fixture
def container(azurite: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a fresh container, whose server the environment names."""
    _nobodys_settings(monkeypatch)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", azurite)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    name = f"wdsprep-test-{secrets.token_hex(6)}"
    _make_container(azurite, name)
    return name


def _make_container(url: str, name: str) -> None:
    """Which the library cannot."""
    date, version = email.utils.formatdate(usegmt=True), "2021-08-06"
    signed = f"PUT{12 * chr(10)}x-ms-date:{date}\nx-ms-version:{version}\n"
    signed += f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    digest = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
    }
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    with contextlib.closing(connection):
        connection.request("PUT", f"/{ACCOUNT}/{name}?restype=container", headers=headers)
        assert connection.getresponse().status == 201


class GcsProxy(FaultProxy):
    """Requests of GCS's XML protocol as ones of S3's, and answers the other way."""

    def ask(
        self, upstream: http.client.HTTPConnection, request: Request
    ) -> http.client.HTTPResponse:
        headers = request.headers
        del headers["Authorization"]  # anybody may read and write the bucket
        if headers.get("x-goog-if-generation-match") == "0":
            headers["If-None-Match"] = "*"
        for name, value in headers.items():
            if name.lower().startswith("x-goog-"):
                del headers[name]
                if name.lower().startswith("x-goog-meta-"):
                    headers[f"x-amz-meta-{name[12:]}"] = value
        return super().ask(upstream, request)

    def passed(self, _request: Request, answer: Answer) -> Answer:
        said = [(name.lower().replace("x-amz-", "x-goog-"), v) for name, v in answer.headers]
        if answer.status in (200, 206):
            said.append(("x-goog-generation", "1"))
        return answer._replace(headers=said)


@contextlib.contextmanager
def gcs_before(s3_url: str, folder: Path, patch: pytest.MonkeyPatch, rule: Rule) -> Iterator[Any]:
    """A server of GCS, and an environment that names it."""
    with GcsProxy(s3_url, rule) as proxy:
        account = {"gcs_base_url": proxy.url, "disable_oauth": True}
        account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        (folder / "gcs.json").write_text(json.dumps(account))
        _nobodys_settings(patch)
        patch.setenv("GOOGLE_SERVICE_ACCOUNT", str(folder / "gcs.json"))
        yield proxy


def open_to_all(bucket: str) -> None:
    places = [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]
    rule = {"Effect": "Allow", "Principal": "*", "Action": "s3:*", "Resource": places}
    policy = {"Version": "2012-10-17", "Statement": [rule]}
    with s3_client() as client:
        client.put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))


@pytest.fixture
def gcs_bucket(
    bucket: str, s3_env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The name of a fresh bucket, whose server the environment names."""
    open_to_all(bucket)
    with gcs_before(s3_env["AWS_ENDPOINT_URL"], tmp_path, monkeypatch, lambda *_: None):
        yield bucket
