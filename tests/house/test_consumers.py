"""Trainers that were not written for these shards feed from them, by the recipes of our page."""

import gc
import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.latent_sets import field, write_latents
from tests.kit.packs import jpeg, manifest_of, pack, write_files
from tests.kit.paths import LOADING_PAGE, blocks

pytestmark = pytest.mark.system

SIZES = (20, 12)
RECIPES = blocks(LOADING_PAGE, "py", section="Train with something else")
TRAINER, BEHIND, AUGMENTED, WEBDATASET, DATASETS, ENERGON = (code for _kind, code in RECIPES)
HAS_ENERGON = all(importlib.util.find_spec(name) for name in ("megatron", "multistorageclient"))


@pytest.fixture
def latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shards where the recipes look for them: latents and embeddings of `tiny`'s shapes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    fields = (field("latent", (4, 8, 8)), field("emb", (77, 64)))
    return Path(write_latents("shards/latents-256", SIZES, fields=fields))


def train(recipe: str) -> tuple[list[tuple[Any, Any]], list[float]]:
    """Run a recipe; what its trainer was fed, and the losses."""
    scope: dict[str, Any] = {}
    fed: list[tuple[Any, Any]] = []
    losses: list[float] = []
    torch.manual_seed(0)
    exec(TRAINER, scope)
    step: Callable[[Any, Any], float] = scope["train_step"]

    def observed(latent: Any, emb: Any) -> None:
        fed.append((latent, emb))
        losses.append(step(latent, emb))

    scope["train_step"] = observed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries: files left open, tensors copied
        exec(recipe, scope)
        scope.clear()
        gc.collect()
    return fed, losses


def stored(latents: Path) -> set[bytes]:
    import wdsprep

    batches = wdsprep.load(str(latents), global_batch=1)
    return {batch["latent"].float().numpy().tobytes() for batch in batches}


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(BEHIND, id="webdataset-behind-load"),
        pytest.param(WEBDATASET, id="webdataset"),
        pytest.param(DATASETS, id="datasets"),
    ],
)
def test_a_recipe_of_the_page_trains_on_every_sample_once(recipe: str, latents: Path) -> None:
    fed, losses = train(recipe)
    rows = [row.numpy().tobytes() for latent, _emb in fed for row in latent]
    assert len(rows) == sum(SIZES)
    assert set(rows) == stored(latents)
    assert fed[0][1].shape == (8, 77, 64)
    assert min(losses[1:]) < losses[0]


def test_torchvision_brings_images_of_any_size_into_one_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kinds = {0: ("jpg", "JPEG"), 1: ("png", "PNG"), 2: ("webp", "WEBP")}
    files: dict[str, bytes | str] = {}
    for number in range(16):
        name, kind = kinds[number % 3]
        files[f"{number}.{name}"] = jpeg(number, (64 + number, 90), kind)
        files[f"{number}.txt"] = f"photo {number}"
    pack(write_files(tmp_path / "in", files), "shards/images")
    capsys.readouterr()
    scope: dict[str, Any] = {}
    exec(TRAINER, scope)
    exec(AUGMENTED, scope)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("torch.Size([8, 3, 64, 64]) photo ") for line in lines)


@pytest.mark.skipif(not HAS_ENERGON, reason="needs pip install megatron-energon, dependencies too")
def test_energon_trains_with_our_indexes_as_they_are(latents: Path) -> None:
    from click.testing import CliRunner
    from megatron.energon.cli.main import main

    indexes = {path: path.read_bytes() for path in latents.rglob("*.idx")}
    latents.rename("energon-latents")
    words = "energon-latents --non-interactive --split-parts train:256/.*\\.tar --sample-type"
    done = CliRunner().invoke(main, ["prepare", *words.split(), "CrudeWebdataset"])
    assert done.exit_code == 0, done.output
    fed, _losses = train(ENERGON)
    assert all(
        Path("energon-latents", *path.parts[-2:]).read_bytes() == indexes[path] for path in indexes
    )
    assert [latent.shape for latent, _emb in fed] == [(8, 4, 8, 8)] * 4


def test_images_of_several_formats_reach_datasets_as_jpegs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the page says."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    kinds = {"a.jpg": "JPEG", "b.png": "PNG", "c.webp": "WEBP"}
    files: dict[str, bytes | str] = {n: jpeg(1, (80, 70), kind) for n, kind in kinds.items()}
    source = write_files(tmp_path / "in", files)
    as_they_came = pack(source, tmp_path / "mixed")
    with pytest.raises(ValueError, match="same types"):
        streamed(as_they_came)
    anew = pack(source, tmp_path / "jpeg", "--reencode", "jpg:95")
    assert len(streamed(anew)) == 3


def streamed(images: Path) -> list[Any]:
    import datasets

    tars = [str(images / shard.name) for shard in manifest_of(images).shards]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries: files left open
        found = datasets.load_dataset("webdataset", data_files=tars, split="train", streaming=True)
        samples = list(found)
        gc.collect()
    return samples
