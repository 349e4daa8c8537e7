"""A store on S3 that writes in parts, one behind a faulty network, and uploads that look old."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import pytest

from tests.kit.faultproxy import FaultProxy, Rule
from tests.kit.s3 import S3Server
from tests.kit.stores import opened
from wdsprep.store.s3.s3_store import S3Store

Through = Callable[..., AbstractContextManager[tuple[FaultProxy, S3Store]]]


@pytest.fixture
def through(s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Through:
    """Opens a store on S3 whose requests meet what a rule says."""

    @contextmanager
    def opened_through(
        rule: Rule, kind: type[FaultProxy] = FaultProxy, **options: Any
    ) -> Iterator[tuple[FaultProxy, S3Store]]:
        with kind(s3_server.url, rule, **options) as proxy, monkeypatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", proxy.url)
            with opened(f"s3://{bucket}/data") as store:
                yield proxy, store

    return opened_through


@pytest.fixture
def parted(bucket: str) -> Iterator[S3Store]:
    with opened(f"s3://{bucket}/data") as store:
        yield store


@pytest.fixture
def aged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was begun, it was over a day ago."""
    monkeypatch.setattr("wdsprep.store.s3.s3_store.ABANDONED_UPLOAD", timedelta(hours=-1))
