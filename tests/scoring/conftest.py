"""Images and models that the tests of scoring share."""

from pathlib import Path

import pytest

from tests.kit.encodes import packed, pictures
from tests.kit.scores import score_here
from tests.kit.scoring_models import KINDS, head, small


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 shards with 15 pictures in two buckets. Tests leave it as it is."""
    root = tmp_path_factory.mktemp("to-score")
    return packed(pictures(root / "downloads", range(15)), root / "images")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of each kind, and a head for the embeddings of clip."""
    root = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        small(kind, root / kind)
    head(root / "head.safetensors", 24)
    return root


@pytest.fixture(scope="session")
def scores(images: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all models give in one pass. Tests leave it as it is."""
    out = tmp_path_factory.mktemp("scored") / "scores"
    score_here(
        images,
        out,
        model=[f"{kind}={models / kind}" for kind in KINDS],
        head=f"clip.aesthetic={models / 'head.safetensors'}",
        embedding="fp32",
    )
    return out
