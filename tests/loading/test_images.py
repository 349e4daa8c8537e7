"""Packed image datasets in the loader: bytes and crops, with their own captions and keys."""

from pathlib import Path
from typing import Any

import pytest
import torch

import wdsprep
from tests.kit.packs import jpeg, pack, photos, samples_of, tar_bytes, write_files
from wdsprep.dataset.reindex import index
from wdsprep.errors import FingerprintError, UsageError
from wdsprep.images.crop import crop

COUNT = 48  # the 32 bucket gets half of them, the 64 bucket the others


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    return pack(photos(root / "photos", COUNT), root / "packed", "--samples-per-shard", "10")


@pytest.fixture(scope="module")
def stored(images: Path) -> dict[str, dict[str, Any]]:
    return {sample["__key__"]: sample for sample in samples_of(images)}


def load(what: Any, **options: Any) -> Any:
    return wdsprep.load(what, **({"global_batch": 12, "rank": 0, "world_size": 1} | options))


def test_images_come_as_they_were_packed(images: Path, stored: dict[str, Any]) -> None:
    seen = []
    for batch in load(str(images), fields=("image", "txt", "json", "key")):
        for image, text, facts, key in zip(
            *(batch[name] for name in ("image", "txt", "json", "key")), strict=True
        ):
            assert image == stored[key]["jpg"]
            assert (text, facts) == (stored[key]["txt"], stored[key]["json"])
            seen.append(key)
    assert sorted(seen) == sorted(stored)
    assert set(next(iter(load(str(images))))) == {"image", "txt", "key"}


def test_the_json_of_foreign_tars_holds_no_number_that_json_cannot(tmp_path: Path) -> None:
    facts = b'{"a": 1.5, "b": %s.0, "c": -Infinity, "d": [NaN, 2e999]}' % (b"9" * 400)
    tar = tar_bytes(
        part for n in range(12) for part in ((f"{n}.jpg", jpeg(n)), (f"{n}.json", facts))
    )
    dict(index(str(write_files(tmp_path, {"0.tar": tar}))))
    (batch,) = load(str(tmp_path), pixels=32, fields=("json",))
    assert batch["json"] == [{"a": 1.5, "b": None, "c": None, "d": [None, None]}] * 12


def test_crops_are_those_of_the_packed_images(images: Path, stored: dict[str, Any]) -> None:
    for batch in load(str(images), pixels=32):
        assert batch["pixels"].shape == (12, 3, 32, 32)
        assert batch["pixels"].dtype == torch.uint8
        for pixels, text, key in zip(batch["pixels"], batch["txt"], batch["key"], strict=True):
            assert torch.equal(pixels, crop(stored[key]["jpg"], 32).pixels)
            assert text == stored[key]["txt"]


def test_crops_are_of_images_that_are_large_enough(images: Path, stored: dict[str, Any]) -> None:
    """As encode takes them: those of the phase, each once a pass."""
    found = [key for batch in load(str(images), pixels=64) for key in batch["key"]]
    large = [
        key
        for key, sample in stored.items()
        if min(sample["json"]["width"], sample["json"]["height"]) >= 64
    ]
    assert sorted(found) == sorted(large)
    assert len(found) == COUNT // 2
    with pytest.raises(UsageError, match=r"no bucket to load \(32, 64\) is for 128 pixels"):
        load(str(images), pixels=128)


def test_a_dataset_that_grows_yet_says_that_states_will_not_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    photos(tmp_path / "photos", COUNT)
    cut = ("--samples-per-shard", "10", "--limit", "30")
    for options, said in ((cut, 1), (cut[:2], 0)):
        caplog.clear()
        load(str(pack(tmp_path / "photos", tmp_path / "packed", *options)))
        assert caplog.text.count("is not complete: checkpoints made now will not resume") == said


def test_a_state_is_of_crops_of_one_size(images: Path) -> None:
    state = load(str(images), pixels=32).state_dict()
    with pytest.raises(FingerprintError, match="pixels: 32 -> 64"):
        load(str(images), pixels=64).load_state_dict(state)


def test_images_and_latents_are_told_apart(images: Path, tmp_path: Path) -> None:
    from tests.kit.latent_sets import write_latents

    latents = write_latents(str(tmp_path), [30])
    with pytest.raises(UsageError, match=r"holds images and .* holds latents: load"):
        load([latents, str(images)])
    with pytest.raises(UsageError, match="pixels= is for images"):
        load(latents, pixels=32)
