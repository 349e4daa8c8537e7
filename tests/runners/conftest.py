"""A cluster for the tests of a file, and both runners in turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.clusters import ray_cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster(cpus=2) as cluster:
        yield cluster


@pytest.fixture(params=["local", "ray"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("cluster")
    return str(request.param)
