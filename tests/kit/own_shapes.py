"""Which shape an image goes to, as the page of the format says it: nothing of wdsprep is used.

    python own_shapes.py IMAGES 64x64,48x80,... MAX_CROP

prints a line of JSON for each image sample: its key, and where it is cut or why it is not.
"""

import json
import math
import sys
import tarfile
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
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


def image_sizes(images: Path) -> Iterator[tuple[str, Size]]:
    """By key, in the order of each shard."""
    for path in sorted(images.glob("*/*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith(".json"):
                    file = tar.extractfile(member)
                    assert file is not None
                    facts = json.load(file)
                    yield facts["key"], (facts["width"], facts["height"])


def main(images: str, listed: str, max_crop: str) -> None:
    shapes = [(int(w), int(h)) for w, _, h in (text.partition("x") for text in listed.split(","))]
    for key, size in image_sizes(Path(images)):
        line = json.dumps({"key": key, **placed(size, shapes, float(max_crop))})
        sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
