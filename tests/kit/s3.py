"""Fixtures that give a test a real S3 server (tools/s3-server), its environment and a bucket."""

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kit.paths import TOOLS

TOOL = TOOLS / "s3-server"
MISSING_PACKAGES = 2
OTHER_SETTINGS = ("PROFILE", "DEFAULT_PROFILE", "SESSION_TOKEN", "REGION", "ENDPOINT_URL_S3")
OTHER_SETTINGS += ("REQUEST_CHECKSUM_CALCULATION", "RESPONSE_CHECKSUM_VALIDATION")


@dataclass(frozen=True, slots=True)
class S3Server:
    home: Path
    env: dict[str, str]

    @property
    def url(self) -> str:
        return self.env["AWS_ENDPOINT_URL"]

    def restart_gateway(self) -> None:
        """Kill the gateway and start it again: same port, same data."""
        done = run_tool("restart-gateway", "--dir", self.home)
        assert done.returncode == 0, done.stderr


def run_tool(*args: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, TOOL, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def start_server(home: Path) -> S3Server:
    """Start a server in that directory; skip the test, but fail in CI, where Ceph is missing."""
    done = run_tool("start", "--dir", home, "--ttl", "3000")
    if done.returncode == MISSING_PACKAGES and os.environ.get("CI") != "true":
        pytest.skip(done.stderr.strip())
    if done.returncode != 0:
        pytest.fail(done.stderr.strip(), pytrace=False)
    exports = (line.removeprefix("export ") for line in done.stdout.splitlines())
    return S3Server(home, dict(line.split("=", 1) for line in exports if "=" in line))


@contextlib.contextmanager
def s3_client(**config: Any) -> Iterator[Any]:
    """A boto3 client of AWS_ENDPOINT_URL, closed at the end.

    It retries nothing unless told to, so that a test sees each fault itself.
    """
    import boto3
    from botocore.config import Config

    defaults = {
        "retries": {"total_max_attempts": 1},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    client = boto3.client("s3", config=Config(**{**defaults, **config}))
    with contextlib.closing(client):
        yield client


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One server for all the tests of the session."""
    home = tmp_path_factory.mktemp("s3") / "server"
    try:
        yield start_server(home)
    finally:
        run_tool("stop", "--dir", home)


@pytest.fixture
def s3_env(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """The AWS_* variables of the server, and none of the settings of who runs the tests."""
    set_s3_env(monkeypatch, s3_server, tmp_path)
    return s3_server.env


def set_s3_env(patch: pytest.MonkeyPatch, server: S3Server, empty: Path) -> None:
    for name in OTHER_SETTINGS:
        patch.delenv(f"AWS_{name}", raising=False)
    files = ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")
    none = {name: str(empty / "no-such-file") for name in files}
    for name, value in {**server.env, **none, "AWS_EC2_METADATA_DISABLED": "true"}.items():
        patch.setenv(name, value)


@pytest.fixture
def bucket(s3_env: dict[str, str]) -> str:  # noqa: ARG001
    """The name of a fresh bucket; it goes when the server does."""
    return create_bucket()


@pytest.fixture
def out_url(place: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A place to write to, in a test of several kinds of `place`: "local" or "s3"."""
    if place == "s3":
        return f"s3://{request.getfixturevalue('bucket')}/out"
    return str(tmp_path / "out")


def create_bucket() -> str:
    name = f"wdsprep-test-{secrets.token_hex(6)}"
    with s3_client() as client:
        client.create_bucket(Bucket=name)
    return name
