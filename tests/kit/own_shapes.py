"""Which shape an image goes to, as the page of the format says it: nothing of wdsprep is used."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

Size = tuple[int, int]


def half_up(number: Fraction) -> int:
    return math.floor(number + Fraction(1, 2))


def shape_of(size: Size, shapes: Sequence[Size]) -> Size:
    """Of equally near ratios the one that is nearer to the square."""

    def distances(shape: Size) -> tuple[float, float]:
        own, other = math.log2(size[0] / size[1]), math.log2(shape[0] / shape[1])
        return round(abs(own - other), 12), round(abs(other), 12)

    return min(shapes, key=distances)


def placed(size: Size, shapes: Sequence[Size], max_crop: float) -> dict[str, Any]:
    """`max_crop` is the part of the scaled image that may be lost."""
    width, height = shape_of(size, shapes)
    if size[0] < width or size[1] < height:
        return {"rejected": "too_small"}
    times = max(Fraction(width, size[0]), Fraction(height, size[1]))
    wide, high = (half_up(side * times) for side in size)
    if 1 - Fraction(width * height, wide * high) > max_crop:
        return {"rejected": "aspect_ratio"}
    left, top = (wide - width) // 2, (high - height) // 2
    crop = [left, top, left + width, top + height]
    return {"crop": crop, "scaled_width": wide, "scaled_height": high}
