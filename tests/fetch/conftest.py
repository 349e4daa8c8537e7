"""A patient fetcher, servers that answer in every way, and attempts without pauses."""

from collections.abc import Iterator

import pytest

from tests.kit.fetches import ANSWERS, fetcher
from tests.kit.webserver import Authority, WebServer
from wdsprep.fetch.client import Fetcher


@pytest.fixture(scope="module")
def patient() -> Iterator[Fetcher]:
    """One for the tests that do not care."""
    with fetcher(max_nbytes=100_000) as one:
        yield one


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def answering() -> Iterator[WebServer]:
    with WebServer({f"/{name}": answer[0] for name, answer in ANSWERS.items()}) as server:
        yield server


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wdsprep.fetch.client.pause_s", lambda _attempt: 0.0)
