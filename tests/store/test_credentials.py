"""Credentials that end while something reads from S3, as those of STS, SSO and machine roles do."""

import re
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import boto3
import botocore.session
import pytest
from botocore.credentials import RefreshableCredentials

from tests.kit.latent_sets import write_latents
from tests.kit.s3 import OTHER_SETTINGS
from tests.kit.webserver import Connection, Request, WebServer, ranges_of, status
from wdsprep.store import open_store

LASTS_S = 3600
SIGNED_BY = re.compile(r"Credential=(key-\d+)")
REFUSAL = b"<Error><Code>ExpiredToken</Code><Message>The token has expired</Message></Error>"


class Clock:
    """The time of credentials and URLs, which tests move on. `last` is the newest key."""

    def __init__(self) -> None:
        self.now, self.last = 0.0, 0
        self.sleeps = False
        self.ends = {"key-0": float(LASTS_S)}

    def monotonic(self) -> float:
        """Return the time as a machine counts it, which may have slept."""
        return 0.0 if self.sleeps else self.now

    def date(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=self.now)

    def new_key(self) -> dict[str, str]:
        self.last += 1
        self.ends[f"key-{self.last}"] = self.now + LASTS_S
        return self.key()

    def key(self) -> dict[str, str]:
        ends = self.date() + timedelta(seconds=LASTS_S)
        name = f"key-{self.last}"
        pair = {"access_key": name, "secret_key": "secret", "token": f"token-{name}"}
        return pair | {"expiry_time": ends.isoformat()}


class Bucket:
    """A folder as a bucket, for whoever has signed with a key that has not ended."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder, self.clock = folder, clock
        self.signed: list[str] = []
        self.refused = 0

    def __call__(self, connection: Connection, request: Request) -> bool:
        path, _, query = request.path.partition("?")
        found = SIGNED_BY.search(query + request.headers.get("authorization", ""))
        assert found is not None, request.path
        if self.clock.ends[found[1]] <= self.clock.now:
            self.refused += 1
            return status(403, REFUSAL)(connection, request)
        self.signed.append(found[1])
        data = (self.folder / path.removeprefix("/bucket/")).read_bytes()
        return ranges_of(data)(connection, request)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Moves boto3's and our time; boto3 gets a new key from it when it asks."""
    clock, plain = Clock(), boto3.session.Session

    def session() -> Any:
        core = botocore.session.get_session()
        core._credentials = RefreshableCredentials.create_from_metadata(
            clock.key(), refresh_using=clock.new_key, method="test"
        )
        core._credentials._time_fetcher = clock.date
        return plain(botocore_session=core, region_name="us-east-1")

    for name in OTHER_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("boto3.session.Session", session)
    monkeypatch.setattr("wdsprep.store.s3.reads.time", clock)
    return clock


@pytest.fixture
def server(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    write_latents(str(tmp_path / "latents"))
    bucket = Bucket(tmp_path, clock)
    with WebServer(bucket) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield bucket


def read(store: Any, folder: Path, number: int) -> None:
    """Some range of some shard; one after another, so that no request is under way meanwhile."""
    name, start = f"256/{number % 5:06d}.tar", 100 * number
    data = (folder / "latents" / name).read_bytes()[start : start + 1000]
    assert store.read(name, start=start, nbytes=1000) == data


def test_new_credentials_are_taken_before_the_old_ones_end(
    server: Bucket, clock: Clock, tmp_path: Path
) -> None:
    """Four hours, in which no request is refused: each key signs for most of its hour."""
    with closing(open_store("s3://bucket/latents")) as store:
        for number in range(4 * 3600 // 150):
            read(store, tmp_path, number)
            clock.now += 150
    assert server.refused == 0
    assert clock.last >= 4
    assert set(server.signed) == set(clock.ends)


def test_credentials_that_ended_while_the_machine_slept_are_renewed(
    server: Bucket, clock: Clock, tmp_path: Path
) -> None:
    """The time by which URLs grow old stands still then, so one that is refused has to tell."""
    clock.sleeps = True
    with closing(open_store("s3://bucket/latents")) as store:
        for _ in range(4):
            for number in range(20):
                read(store, tmp_path, number)
            clock.now += 2 * LASTS_S
    assert server.refused == 3 * 5  # the URL of each shard, once after each sleep
    assert len(server.signed) == 4 * 20
    assert clock.last == 3
