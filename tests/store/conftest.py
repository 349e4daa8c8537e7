"""A store on S3 that writes in parts, and uploads that look old."""

from collections.abc import Iterator
from datetime import timedelta

import pytest

from tests.kit.stores import opened
from wdsprep.store.s3.s3_store import S3Store


@pytest.fixture
def parted(bucket: str) -> Iterator[S3Store]:
    with opened(f"s3://{bucket}/data") as store:
        yield store


@pytest.fixture
def aged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was begun, it was over a day ago."""
    monkeypatch.setattr("wdsprep.store.s3.s3_store.ABANDONED_UPLOAD", timedelta(hours=-1))
