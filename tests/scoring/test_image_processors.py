"""Image processors: the input of a network is equal to what transformers alone prepares."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, ConvNextImageProcessor, ViTImageProcessor

from tests.kit.scoring_models import KINDS, SQUARE
from wdsprep.scoring.image_processors import DecodedImage, ImageProcessor
from wdsprep.scoring.models import find_score_model
from wdsprep.scoring.options import NamedModel

SIZES = ((300, 200), (20, 500), (31, 33), (32, 32))


def prepare_and_compare(
    folder: Path, images: Sequence[DecodedImage] = ()
) -> Sequence[DecodedImage]:
    """Prepare images of noise, check each bit against transformers, and return the images."""
    processor = ImageProcessor(find_score_model(NamedModel("", str(folder))))
    own = AutoImageProcessor.from_pretrained(folder)
    random = np.random.default_rng(1)
    noises = [random.integers(0, 256, (*size, 3), np.uint8) for size in SIZES]
    images = images or [DecodedImage(Image.fromarray(noise)) for noise in noises]
    for image, found in zip(images, processor.prepare(images), strict=True):
        (wanted,) = own(images=[image.image], return_tensors="pt")["pixel_values"]
        assert torch.equal(found["pixel_values"], wanted)
    return images


@pytest.mark.parametrize("kind", KINDS)
def test_four_channels_are_scaled_without_a_copy_to_the_values_of_three(
    kind: str, models: Path
) -> None:
    assert not any("planes" in vars(image) for image in prepare_and_compare(models / kind))


def test_a_processor_that_scales_in_another_way_is_given_planes(
    models: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(models / "vit", tmp_path / "convnext"))
    ConvNextImageProcessor(size={"shortest_edge": 32}, crop_pct=0.5).save_pretrained(folder)
    assert all("planes" in vars(image) for image in prepare_and_compare(folder))


@pytest.mark.parametrize(("resample", "times"), [(2, 1), (3, 2)])
def test_processors_that_scale_alike_share_the_scaled_image(
    resample: int, times: int, models: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(models / "vit", tmp_path / "other"))
    other = ViTImageProcessor(size=SQUARE, image_mean=[0.4, 0.5, 0.6], resample=resample)
    other.save_pretrained(folder)
    images = prepare_and_compare(folder, prepare_and_compare(models / "vit"))
    assert {len(image.scaled) for image in images} == {times}
