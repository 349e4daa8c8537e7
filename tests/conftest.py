"""Fixtures for every test: the real S3 server, and a store of each kind."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from wdsprep.store import Store
from wdsprep.store.local import LocalStore
from wdsprep.store.s3 import S3Store

pytest_plugins = ["tests.kit.s3"]


@pytest.fixture
def s3_store(bucket: str) -> Iterator[S3Store]:
    with contextlib.closing(S3Store(f"s3://{bucket}/data", first_pause_s=0.01)) as store:
        yield store


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Each kind of store, empty."""
    if request.param == "local":
        return LocalStore(tmp_path / "data")
    made: S3Store = request.getfixturevalue("s3_store")
    return made
