"""Where an image is cut: the nearest ratio, nothing enlarged, the middle."""

import math
import random

import pytest

from wdsprep.dataset.buckets import buckets_encoded, least_side_of
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.images.nearest_shape import Fit, Shapes, cut_of

LIST = [(64, 64), (48, 80), (80, 48), (32, 128), (128, 32), (56, 72), (72, 56)]


def test_the_shape_is_that_of_the_nearest_ratio() -> None:
    shapes = Shapes.from_sizes(LIST)
    chance = random.Random(1)
    for _ in range(2_000):
        width, height = chance.randint(128, 4_000), chance.randint(128, 4_000)

        def apart(size: tuple[int, int], ratio: float = width / height) -> float:
            return abs(math.log(size[0] / size[1] / ratio))

        assert apart(shapes.nearest(width, height)) <= min(map(apart, LIST)) + 1e-12


def test_half_way_between_two_ratios_it_is_the_one_nearer_to_the_square() -> None:
    shapes = Shapes.from_sizes([(64, 64), (32, 128), (128, 32)])
    assert shapes.nearest(200, 100) == shapes.nearest(100, 200) == (64, 64)
    assert shapes.nearest(201, 100) == (128, 32)
    assert shapes.nearest(100, 201) == (32, 128)


def test_the_image_just_covers_its_shape_and_the_middle_is_taken() -> None:
    shapes = Shapes.from_sizes(LIST)
    assert shapes.fit(300, 200) == Fit(80, 48, 80, 53)
    assert (shapes.fit(300, 200).left, shapes.fit(300, 200).top) == (0, 2)
    chance = random.Random(2)
    for _ in range(2_000):
        width, height = chance.randint(128, 4_000), chance.randint(128, 4_000)
        fit = shapes.fit(width, height)
        assert fit.scaled_width == fit.width or fit.scaled_height == fit.height
        assert fit.scaled_width >= fit.width
        assert fit.scaled_height >= fit.height
        assert abs(fit.scaled_width / width * height - fit.scaled_height) <= 0.5 * max(
            1, height / width, width / height
        )
        assert 0 <= fit.left <= fit.scaled_width - fit.width - fit.left <= fit.left + 1
        assert 0 <= fit.top <= fit.scaled_height - fit.height - fit.top <= fit.top + 1


def test_what_is_scaled_up_is_so_by_no_more_than_was_asked_for() -> None:
    shapes = Shapes.from_sizes(LIST, upscale=1.1)
    assert shapes.fit(64, 60) == Fit(64, 64, 68, 64)
    assert shapes.fit(59, 64) == Fit(64, 64, 64, 69)
    with pytest.raises(RejectedError) as caught:
        shapes.fit(58, 64)  # 64 / 58 is just over 1.1
    assert caught.value.code is Code.TOO_SMALL
    settings = {"resolution": 110, "upscale": 1.1}
    assert cut_of(settings).fit(100, 300) == Fit(110, 110, 110, 330)  # 1.1 times to the pixel
    assert least_side_of(settings) == cut_of(settings).least_side == 100
    assert buckets_encoded(settings, (64, 96, 110)) == (96, 110)
    assert buckets_encoded({"resolution": 110}, (64, 96, 110)) == (110,)


def test_what_would_lose_too_much_is_rejected() -> None:
    shapes = Shapes.from_sizes(LIST, max_crop=0.5)
    assert shapes.fit(128, 256) == Fit(48, 80, 48, 96)  # loses a sixth
    assert shapes.fit(1_000, 125) == Fit(128, 32, 256, 32)  # loses half
    with pytest.raises(RejectedError) as caught:
        shapes.fit(3_000, 100)
    assert caught.value.code is Code.ASPECT_RATIO
    assert caught.value.detail == "3000 x 100, 87% of it outside 128x32"
