"""Images and latents that the tests of encoding share."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.kit.encode_work import Making
from tests.kit.encodes import encode_here, packed, pictures
from wdsprep.encoding.encode import make_encoder

MAKER = "wdsprep.encoding.encode.make_encoder"


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 shards of bucket 64 with 4 pictures each, 4 of 128 with 2. Tests leave it as it is."""
    root = tmp_path_factory.mktemp("packed")
    return packed(pictures(root / "downloads"), root / "images")


@pytest.fixture(scope="session")
def latents(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of it at 64 by the toy model, undisturbed. Tests leave it as it is."""
    out = tmp_path_factory.mktemp("encoded") / "latents"
    with patch(MAKER, make_encoder):
        encode_here(images, out)
    return out


@pytest.fixture(scope="session")
def stored(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same by the stand-in. Tests leave it as it is."""
    out = tmp_path_factory.mktemp("stored") / "latents"
    with patch(MAKER, Making()):
        encode_here(images, out)
    return out


@pytest.fixture
def own(images: Path, tmp_path: Path) -> Path:
    """A copy of the images, to damage."""
    shutil.copytree(images.parent, tmp_path / "own")
    return tmp_path / "own/images"


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks at all samples find is kept for one test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="module")
def stand_in() -> Iterator[None]:
    """Encode with a stand-in that costs nothing, in a file whose tests are of all else."""
    with patch(MAKER, Making()):
        yield


@pytest.fixture
def real_models() -> Iterator[None]:
    """Encode with real models in one test of such a file."""
    with patch(MAKER, make_encoder):
        yield
