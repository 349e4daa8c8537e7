"""Scores are computed by the engine of `encode` from what transformers alone prepares."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, ConvNextImageProcessor, ViTImageProcessor

import wdsprep
from tests.kit.encodes import pictures
from tests.kit.packs import pack
from tests.kit.scores import columns_in, score_here
from tests.kit.scoring_models import KINDS, SQUARE, small
from wdsprep.dataset.samples import Sample
from wdsprep.encoding.models.base import Part
from wdsprep.encoding.sample_chain import EncodingSample, Row
from wdsprep.images.crop import NO_PIXELS
from wdsprep.images.nearest_shape import Fit
from wdsprep.scoring.models import find_score_model
from wdsprep.scoring.networks import ImageProcessor, ScoreEncoder
from wdsprep.scoring.worker import PreparedImage, ScoreBatcher, ScoreEngine


def test_on_a_gpu_a_batch_is_padded_in_pinned_memory_that_is_used_again(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is none here: memory is asked for as on one, and comes from the CPU."""
    model = find_score_model("", str(models / "clip"))
    encoder, empty, asked = ScoreEncoder([model], "cpu", "fp32"), torch.empty, list[Any]()
    made = ScoreBatcher(encoder, devices=None)  # type: ignore[arg-type]
    image = PreparedImage(
        pixels=NO_PIXELS, width=9, height=9, fit=Fit(0, 0, 0, 0), inputs=encoder.blank
    )
    rows = []
    for caption in ("a", "b", "c"):
        sample = Sample(source="", image=b"", captions=(caption,))
        rows.append(Row(EncodingSample("", sample, {0: Part.IMAGE}, crops={0: image}), 0))

    def unpinned(shape: Any, **how: Any) -> Any:
        asked.append((how["dtype"], how.pop("pin_memory")))
        return empty(shape, **how)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(encoder, "device", torch.device("cuda"))
    batches = []
    for _ in range(2):
        batch = made.image_batch(rows, 0, 4)
        assert (batch.count, batch.size) == (3, 4)
        assert all(torch.equal(own[3], own[0]) for own in batch.inputs)
        batches.append([own.data_ptr() for own in batch.inputs])
        made.keep_memory(batch)
    assert asked == [(torch.float32, True), (torch.int64, True), (torch.int64, True)]
    assert batches[0] == batches[1]


def test_fewer_images_of_a_large_side_share_a_batch(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = ScoreEncoder([find_score_model("", str(models / "vit"))], "cpu", "fp32")
    given: dict[str, Any] = {"seed": 0, "max_area": 1, "decoders": 1, "threads": 1, "cuts": ()}
    monkeypatch.setattr("wdsprep.scoring.worker.BATCH_NBYTES", 5 * 4 * 3 * 32 * 32)
    for wanted, size in ((4, 4), (16, 5)):
        made = ScoreEngine(encoder, batch_size=wanted, **given)
        assert made.batches.stats.batch_size == size
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
    assert outcome.manifest.rejects == {"truncated": 80 - outcome.samples}
    assert 2 <= outcome.samples < 10
    assert not wdsprep.verify(images, tmp_path / "scores").findings


SIZES = ((300, 200), (20, 500), (31, 33), (32, 32))


def prepare_and_compare(folder: Path, shared: Sequence[dict[str, torch.Tensor]]) -> ImageProcessor:
    """Prepare images of noise, check each bit against transformers, and return the processor."""
    processor = ImageProcessor(find_score_model("", str(folder)))
    own = AutoImageProcessor.from_pretrained(folder)
    random = np.random.default_rng(1)
    noises = [random.integers(0, 256, (*size, 3), np.uint8) for size in SIZES]
    images = [*map(Image.fromarray, noises)]
    made = processor.finish([*map(processor.scale, images, shared)])
    for image, found in zip(images, made, strict=True):
        (wanted,) = own(images=[image], return_tensors="pt")["pixel_values"]
        assert torch.equal(found["pixel_values"], wanted)
    return processor


@pytest.mark.parametrize("kind", [*KINDS, "convnext"])
def test_four_channels_are_scaled_to_the_values_of_three_or_an_image_is_prepared_as_a_whole(
    kind: str, models: Path, tmp_path: Path
) -> None:
    folder = models / kind
    if kind == "convnext":  # which scales by a rule of its own
        folder = Path(shutil.copytree(models / "vit", tmp_path / kind))
        ConvNextImageProcessor(size={"shortest_edge": 32}, crop_pct=0.5).save_pretrained(folder)
    processor = prepare_and_compare(folder, [{} for _ in SIZES])
    assert processor.scales_channels == (kind != "convnext")


@pytest.mark.parametrize(("resample", "times"), [(2, 1), (3, 2)])
def test_processors_that_scale_alike_share_the_scaled_image(
    resample: int, times: int, models: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(models / "vit", tmp_path / "other"))
    other = ViTImageProcessor(size=SQUARE, image_mean=[0.4, 0.5, 0.6], resample=resample)
    other.save_pretrained(folder)
    shared: list[dict[str, torch.Tensor]] = [{} for _ in SIZES]
    for model in (folder, models / "vit"):
        prepare_and_compare(model, shared)
    assert {len(scaled) for scaled in shared} == {1 + times}  # with the pixels
