"""Fixtures for every test, and which tests are marked `system`: `-m "not system"` is soon done."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from wdsprep.store.base import Store
from wdsprep.store.local import LocalStore
from wdsprep.store.s3 import S3Store

pytest_plugins = ["tests.kit.family_folders", "tests.kit.s3"]
SYSTEM_FIXTURES = {"s3_server", "browser", "cluster", "connected_ray", "endpoint", "ray_address"}
SYSTEM_PARAMETERS = {"store": "s3", "place": "s3", "kind": "ray"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark whoever asks for a server, a cluster or a browser; others say `system` themselves. Files
    with such tests come first: one that takes minutes would else end long after all others."""
    for item in items:
        if isinstance(item, pytest.Function) and _needs_a_system(item):
            item.add_marker("system")
    long = {item.path for item in items if item.get_closest_marker("system")}
    items.sort(key=lambda item: item.path not in long)


def _needs_a_system(item: pytest.Function) -> bool:
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return not SYSTEM_FIXTURES.isdisjoint(item.fixturenames) or any(
        given.get(name) == value for name, value in SYSTEM_PARAMETERS.items()
    )


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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MB; skipped where mounting is not allowed."""
    root = tmp_path / "disk"
    root.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(root)]
    if os.geteuid() or subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here")
    yield root
    subprocess.run(["umount", "-l", str(root)], check=True)
