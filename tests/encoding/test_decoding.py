"""`--decode`: large JPEGs at a reduced scale, or in full."""

from pathlib import Path
from typing import Any

import pytest
import torch

import wdsprep
from tests.kit.encodes import encode_here
from tests.kit.packs import jpeg, manifest_of, pack, tree, write_files
from wdsprep.errors import FingerprintError

COUNT = 6


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large ones, three shards of two."""
    root = tmp_path_factory.mktemp("large")
    files: dict[str, bytes | str] = {}
    for number in range(COUNT):
        files[f"{number}.jpg"] = jpeg(number, (301, 263))
        files[f"{number}.txt"] = f"photo {number}"
    source = write_files(root / "in", files)
    return pack(source, root / "images", "--buckets", "64,128", "--samples-per-shard", "2")


@pytest.fixture(scope="module")
def full(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("full") / "latents"
    encode_here(images, out, decode="full")
    return out


@pytest.fixture(scope="module")
def fast(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fast") / "latents"
    encode_here(images, out)
    return out


def decoding(latents: Path) -> Any:
    return manifest_of(latents).settings.get("decode")


def served(images: Path, **options: Any) -> Any:
    how = wdsprep.Encode(resolution=64, model="tiny", device="cpu", **options)
    return wdsprep.load(str(images), encode=how, global_batch=2)


def test_datasets_say_how_they_were_decoded_by_default_fast(full: Path, fast: Path) -> None:
    assert (decoding(full), decoding(fast)) == ("full", "fast")
    assert set(tree(full)) == set(tree(fast))
    assert tree(full)["128/000000.tar"] != tree(fast)["128/000000.tar"]


def test_another_decoding_is_refused_and_overwrite_takes_it(
    images: Path, fast: Path, tmp_path: Path
) -> None:
    out = tmp_path / "latents"
    encode_here(images, out, decode="full", limit=3)
    with pytest.raises(FingerprintError, match=r"--decode fast \(was full\)"):
        encode_here(images, out, decode="fast")
    encode_here(images, out, overwrite=True)
    assert tree(out)["128/000000.tar"] == tree(fast)["128/000000.tar"]
    with pytest.raises(FingerprintError, match=r"--decode full \(was fast\)"):
        encode_here(images, out, decode="full")


def test_one_pass_makes_what_a_run_for_each_makes(images: Path, fast: Path, tmp_path: Path) -> None:
    encode_here(images, tmp_path / "{resolution}", resolution=(64, 128))
    encode_here(images, tmp_path / "alone", resolution=128)
    assert tree(tmp_path / "64") == tree(fast)
    assert tree(tmp_path / "128") == tree(tmp_path / "alone")


@pytest.mark.parametrize("kind", ["full", "fast"])
def test_a_trainer_gets_what_is_stored(
    images: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    stored = wdsprep.load(str(request.getfixturevalue(kind)), global_batch=2)
    on_the_way = served(images, decode=kind)
    assert on_the_way.state_dict() == stored.state_dict()
    for mine, theirs in zip(on_the_way, stored, strict=True):
        assert torch.equal(mine["latent"], theirs["latent"])


@pytest.mark.parametrize("kind", ["full", "fast"])
def test_what_is_kept_on_the_way_is_decoded_as_what_is_there(
    images: Path, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    out = tmp_path / "kept"
    encode_here(images, out, decode=kind, limit=2)
    how = wdsprep.Encode(resolution=64, model="tiny", device="cpu", decode=kind)
    for _ in wdsprep.load(str(images), encode=how, tee=out, global_batch=2):
        pass
    encode_here(images, out, decode=kind)
    wanted = tree(request.getfixturevalue(kind))
    assert tree(out)["128/000002.tar"] == wanted["128/000002.tar"]
    assert tree(out)["128/000000.tar"] == wanted["128/000000.tar"]
