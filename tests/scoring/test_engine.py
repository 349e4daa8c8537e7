"""Scores are computed by the engine of `encode`, and keep what it promises."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import ViTForImageClassification

from tests.kit.encodes import pictures
from tests.kit.packs import pack
from tests.kit.scores import columns_in, score_here
from tests.kit.scoring_models import small
from wdsprep.encoding.models.base import Part
from wdsprep.encoding.models.device import Device
from wdsprep.runners.base import BrokenWorkerError
from wdsprep.scoring.engine import ScoreEngine
from wdsprep.scoring.models import find_score_model
from wdsprep.scoring.networks import ScoreEncoder
from wdsprep.scoring.options import NamedModel

CHECKS = [2, 2]
"""The batches by which a model is tried before a run."""


class Batches:
    """The sizes of the batches that a ViT gets; one of more than `most` images raises an error."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.most, self.error = 1_000, RuntimeError("CUDA error: out of memory")

    def note(self, size: int) -> None:
        self.sizes.append(size)
        if size > self.most:
            raise self.error


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Batches:
    seen, forward = Batches(), ViTForImageClassification.forward

    def counted(network: Any, **inputs: Any) -> Any:
        seen.note(len(inputs["pixel_values"]))
        return forward(network, **inputs)

    monkeypatch.setattr(ViTForImageClassification, "forward", counted)
    return seen


def test_a_batch_size_that_was_too_large_is_not_tried_again(
    images: Path, models: Path, tmp_path: Path, batches: Batches
) -> None:
    batches.most = 2
    outcome = score_here(images, tmp_path / "scores", model=str(models / "vit"), batch_size=4)
    assert outcome.samples == 15
    assert batches.sizes.count(4) == 1
    assert max(batches.sizes[len(CHECKS) + 1 :]) == 2


def test_a_device_that_fails_breaks_its_worker(
    images: Path, models: Path, tmp_path: Path, batches: Batches
) -> None:
    batches.most, batches.error = 2, RuntimeError("CUDA error: an illegal memory access")
    with pytest.raises(BrokenWorkerError, match="illegal memory access"):
        score_here(images, tmp_path / "scores", model=str(models / "vit"))


def test_several_batches_are_launched_before_the_first_is_finished(
    images: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: Batches
) -> None:
    finish, waits = Device.finish, [len(CHECKS) + 2]

    def late(device: Device, launched: Any) -> Any:
        end_s = time.monotonic() + 60
        while waits and len(batches.sizes) < waits[0]:
            assert time.monotonic() < end_s, "the second batch waits for the first"
            time.sleep(0.01)
        waits.clear()
        return finish(device, launched)

    monkeypatch.setattr(Device, "finish", late)
    score_here(images, tmp_path / "scores", model=str(models / "vit"), batch_size=1)
    assert not waits


def test_on_a_gpu_a_batch_is_padded_in_pinned_memory_that_is_used_again(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is none here: memory is asked for as on one, and comes from the CPU."""
    model = find_score_model(NamedModel("", str(models / "clip")))
    encoder, empty, asked = ScoreEncoder([model], "cpu", "fp32"), torch.empty, list[Any]()
    made = ScoreEngine(
        encoder, seed=0, batch_size=4, max_area=1, decoders=1, threads=1, parts=[Part.IMAGE]
    )

    def unpinned(shape: Any, **how: Any) -> Any:
        asked.append((how["dtype"], how.pop("pin_memory")))
        return empty(shape, **how)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(encoder, "device", torch.device("cuda"))
    inputs = encoder.inputs_of([encoder.blank] * 3, ["a", "b", "c"])
    batches = []
    for _ in range(2):
        batch = made.fill(inputs, 4)
        assert (batch.count, batch.size) == (3, 4)
        assert all(torch.equal(own[3], own[0]) for own in batch.inputs)
        batches.append([own.data_ptr() for own in batch.inputs])
        made.keep_memory(batch)
    assert asked == [(torch.float32, True), (torch.int64, True), (torch.int64, True)]
    assert batches[0] == batches[1]
    made.close()


def test_fewer_images_of_a_large_side_share_a_batch(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = ScoreEncoder([find_score_model(NamedModel("", str(models / "vit")))], "cpu", "fp32")
    given: dict[str, Any] = {"seed": 0, "max_area": 1, "decoders": 1, "threads": 1}
    monkeypatch.setattr("wdsprep.scoring.engine.BATCH_NBYTES", 5 * 4 * 3 * 32 * 32)
    for wanted, size in ((4, 4), (16, 5)):
        made = ScoreEngine(encoder, batch_size=wanted, **given)
        assert made.stats.batch_size == size
        made.close()


def test_what_overflows_in_half_precision_is_computed_with_the_weights_of_fp32(
    images: Path, tmp_path: Path
) -> None:
    model = small("vit", tmp_path / "vit")
    tensors = load_file(model / "model.safetensors")
    tensors["classifier.bias"] += 1e5  # more than fp16 holds, for both labels
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    for dtype in ("fp16", "fp32"):
        outcome = score_here(images, tmp_path / dtype, model=str(model), dtype=dtype)
        assert (outcome.samples, outcome.manifest.rejects) == (15, {})
    half, whole = columns_in(tmp_path / "fp16"), columns_in(tmp_path / "fp32")
    assert all(abs(half[key]["nsfw"] - whole[key]["nsfw"]) < 1e-5 for key in whole)


def test_many_damaged_images_after_a_good_one_hold_up_nothing(models: Path, tmp_path: Path) -> None:
    source = pictures(tmp_path / "in", range(80))
    for photo in sorted(source.glob("*.jpg"))[1:-1]:
        photo.write_bytes(photo.read_bytes()[:-400])
    images = pack(source, tmp_path / "images", "--buckets", "64", "--check", "header")
    given: dict[str, Any] = {"model": str(models / "vit"), "batch_size": 4}
    outcome = score_here(images, tmp_path / "scores", **given)
    assert outcome.samples + sum(outcome.manifest.rejects.values()) == 80
    assert outcome.samples < 10
