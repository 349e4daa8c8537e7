"""Fixtures for loading."""

from pathlib import Path

import pytest

from tests.kit.latent_sets import write_latents


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """300 samples: 9 steps of 32 and a rest. Only copies of it are changed."""
    return write_latents(str(tmp_path_factory.mktemp("latents")))


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What looks at all samples find is kept for one test alone."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home / "wdsprep" / "kept"
