"""Fixtures for every test, and which tests are marked `system`: `-m "not system"` is soon done."""

import contextlib
import fcntl
import gc
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.kit.paths import ROOT
from wdsprep.store.base import Store
from wdsprep.store.gcs_azure import ObjectStore
from wdsprep.store.hub import HubStore
from wdsprep.store.local import LocalStore
from wdsprep.store.s3.s3_store import S3Store

# Two threads of torch that want the same core wait for each other most of the time: where tests run
# beside each other, those of small models take ten times as long with two as with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Most objects here are modules and tests, and live as long as the process. A full garbage
# collection goes through all of torch and diffusers and frees next to nothing: together these
# took a fifteenth of the time of all tests. So there is none while tests are imported, and later
# ones go through what the tests of one file have made.
gc.disable()
KIT = ("family_folders", "s3", "clouds", "hub", "sites", "command_lines")
pytest_plugins = [f"tests.kit.{name}" for name in KIT]
SYSTEM_FIXTURES = {
    "azurite",
    "s3_server",
    "browser",
    "cluster",
    "connected_ray",
    "endpoint",
    "foreign_sets",
    "ray_address",
}
SYSTEM_PARAMETERS = {"store": {"s3", "gs", "az"}, "place": {"s3", "gs", "az"}, "kind": {"ray"}}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark whoever asks for a server, a cluster or a browser; others say `system` themselves. Files
    with such tests come first: one that takes minutes would else end long after all others."""
    for item in items:
        if isinstance(item, pytest.Function) and _needs_a_system(item):
            item.add_marker("system")
    long = {item.path for item in items if item.get_closest_marker("system")}
    items.sort(key=lambda item: item.path not in long)


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but old garbage seldom, and never what is there by now."""
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 100)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After the tests of a file, free their garbage and leave alone what they have imported."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def _needs_a_system(item: pytest.Function) -> bool:
    given = item.callspec.params if hasattr(item, "callspec") else {}
    return not SYSTEM_FIXTURES.isdisjoint(item.fixturenames) or any(
        given.get(name) in values for name, values in SYSTEM_PARAMETERS.items()
    )


@pytest.fixture(scope="session")
def foreign_sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What other libraries have written: see `tests.kit.foreign_sets`, which writes it.

    Once for all processes of pytest-xdist, whose folders lie beside each other.
    """
    for package in ("streaming", "datasets"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: tools/venv installs it")
    own = tmp_path_factory.getbasetemp()
    place = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "foreign"
    with open(f"{place}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            begun = Path(f"{place}.begun")
            words = [sys.executable, "-W", "ignore", "-m", "tests.kit.foreign_sets", str(begun)]
            subprocess.run(words, check=True, capture_output=True, timeout=300, cwd=ROOT)
            begun.rename(place)
    return place


@pytest.fixture
def s3_store(bucket: str) -> Iterator[S3Store]:
    with contextlib.closing(S3Store(f"s3://{bucket}/data", first_pause_s=0.01)) as store:
        yield store


@pytest.fixture
def gs_store(gcs_bucket: str) -> ObjectStore:
    return ObjectStore(f"gs://{gcs_bucket}/data", first_pause_s=0.01)


@pytest.fixture
def az_store(container: str) -> ObjectStore:
    return ObjectStore(f"az://{container}/data", first_pause_s=0.01)


@pytest.fixture
def hf_store(hub_dataset: str) -> HubStore:
    return HubStore(f"hf://datasets/{hub_dataset}/data", first_pause_s=0.01)


@pytest.fixture(params=["local", "s3", "gs", "az"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Each kind of store that can be written to, empty."""
    if request.param == "local":
        return LocalStore(tmp_path / "data")
    made: Store = request.getfixturevalue(f"{request.param}_store")
    return made


@pytest.fixture(scope="module")
def no_models() -> Iterator[None]:
    """Encoders that need no model take the place of others."""
    from tests.kit.encode_work import Making  # loads torch

    with patch("wdsprep.encoding.encode.make_encoder", Making()):
        yield


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
