"""Shapes: choose from a list the one whose ratio is nearest to that of an image.

The image is scaled so that it just covers the shape, and the middle is cut out. All of it follows
from the image's size alone, in whole numbers.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.shapes import Size, least_to_reach, shape_name, shapes_of

DECODE = "decode"
"""The setting of latents that says how JPEGs are decoded."""
DECODES = FAST, FULL = "fast", "full"
"""Ways to decode JPEGs: large ones at a reduced scale, or all in full."""
OVERSAMPLING = 1.9
"""The least factor by which an image that is decoded at a reduced scale is larger than what it is
scaled to. With two, JPEGs of 1,000 pixels to
256, or of 2,000 to 512, would be left out by a hair."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A shape, and the size to which an image is scaled so that it covers the shape."""

    width: int
    height: int
    scaled_width: int
    scaled_height: int

    @property
    def left(self) -> int:
        return (self.scaled_width - self.width) // 2

    @property
    def top(self) -> int:
        return (self.scaled_height - self.height) // 2

    @property
    def lost(self) -> Fraction:
        """Return the part of the scaled image that is cut off."""
        return 1 - Fraction(self.width * self.height, self.scaled_width * self.scaled_height)


@dataclass(frozen=True, slots=True)
class Shapes:
    """A list of shapes, which are sorted from the tallest to the widest; no ratio twice.

    An image that would lose more than `max_crop` of its area is rejected, and so is one that would
    have to be scaled up by more than `upscale`. A JPEG is decoded at a
    reduced scale if `oversampling` times the pixels of the scaled image remain on each side; with
    0 it is decoded in full.
    """

    sizes: tuple[Size, ...]
    max_crop: float = 1.0
    upscale: float = 1.0
    oversampling: float = field(default=0.0, repr=False)  # by the rest loaders keep which fit where

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(sorted(self.sizes, key=_ratio)))

    @classmethod
    def square(cls, side: int, oversampling: float = 0.0) -> "Shapes":
        return cls(((side, side),), oversampling=oversampling)

    @property
    def least_side(self) -> int:
        """Return the shortest side of an image that can fit one of the shapes."""
        return least_to_reach(min(map(min, self.sizes)), self.upscale)

    def nearest(self, width: int, height: int) -> Size:
        """Return the shape whose ratio is nearest to that of an image.

        Half way, the one nearer to the square is chosen.
        """
        ratio = Fraction(width, height)
        at = bisect_left(self.sizes, ratio, key=_ratio)

        def distance(size: Size) -> tuple[Fraction, Fraction]:
            return _distance(_ratio(size), ratio), _distance(_ratio(size), Fraction(1))

        return min(self.sizes[max(0, at - 1) : at + 1], key=distance)

    @lru_cache(1 << 14)  # noqa: B019  no more than so many are kept
    def fit(self, width: int, height: int) -> Fit:
        """Return where an upright image of this size is cut.

        Raise RejectedError if it would have to be scaled up too much, or would lose too much.
        """
        size = self.nearest(width, height)
        wide, high = covering_size(width, height, size)
        found = Fit(*size, wide, high)
        where = "" if len(self.sizes) == 1 else f", for {shape_name(size)}"
        _check_scale(width, height, size, self.upscale, where)
        if found.lost > self.max_crop:
            part = f"{float(found.lost):.0%} of it outside {shape_name(size)}"
            raise RejectedError(Code.ASPECT_RATIO, f"{width} x {height}, {part}")
        return found


@dataclass(frozen=True, slots=True)
class SameCut:
    """The part of an image that another image of the same ratio was cut to, at the same size.

    `width` and `height` are those of the other image, and `cut` is its part.
    """

    width: int
    height: int
    cut: Fit
    upscale: float = 1.0
    oversampling: float = 0.0

    @property
    def least_side(self) -> int:
        """Return the shortest side of an image that can be cut so."""
        return least_to_reach(min(self.cut.width, self.cut.height), self.upscale)

    def fit(self, width: int, height: int) -> Fit:
        """Return where an upright image of this size is cut.

        Raise RejectedError if its ratio differs by more than a side that was rounded to a whole
        pixel, or if it would have to be scaled up too much.
        """
        sides = (width, height, self.width, self.height)
        if abs(width * self.height - height * self.width) > max(sides):
            other = f"{self.width} x {self.height}"
            raise RejectedError(Code.ASPECT_RATIO, f"{width} x {height}, and its target {other}")
        _check_scale(width, height, (self.cut.width, self.cut.height), self.upscale)
        return self.cut


def _check_scale(width: int, height: int, size: Size, upscale: float, where: str = "") -> None:
    """Raise RejectedError if an image would have to be scaled up too much to cover a shape."""
    least_width, least_height = (least_to_reach(side, upscale) for side in size)
    if width < least_width or height < least_height:
        raise RejectedError(Code.TOO_SMALL, f"{width} x {height}{where}")


def cut_of(settings: Mapping[str, Any]) -> Shapes:
    """Return the shapes to which a dataset cuts images, by its settings."""
    side = settings["resolution"]
    oversampling = OVERSAMPLING if settings.get(DECODE) == FAST else 0.0
    sizes = shapes_of(settings) or [(side, side)]
    max_crop, upscale = settings.get("max_crop", 1.0), settings.get("upscale", 1.0)
    return Shapes(tuple(sizes), max_crop, upscale, oversampling)


def covering_size(width: int, height: int, size: Size) -> Size:
    """Return the size to which an image is scaled so that it just covers a shape.

    One side is the shape's. The other is in proportion, a half rounded up, and no shorter than the
    shape's.
    """
    wide, high = size
    if width * high >= height * wide:
        return (2 * width * high + height) // (2 * height), high
    return wide, (2 * height * wide + width) // (2 * width)


def _ratio(size: Size) -> Fraction:
    return Fraction(*size)


def _distance(one: Fraction, other: Fraction) -> Fraction:
    """Return the ratio of the greater to the smaller."""
    return max(one / other, other / one)
