"""The shapes of a dataset: its images' sizes in pixels, of which each sample has one.

Without a list of shapes all are squares of the resolution. Where there is one, the samples of a
shape stand together in each shard, shapes in the order of the list, and the shard's receipt counts
them by the shape's name. Shapes differ in their latents alone; the layout is the square's.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wdsprep.dataset.arrays import LATENT, Field, fields_of
from wdsprep.errors import FormatError

Size = tuple[int, int]
"""A width and a height."""


def shape_name(size: Size) -> str:
    """Such as 832x1216, the width first."""
    width, height = size
    return f"{width}x{height}"


def shapes_of(settings: Mapping[str, Any]) -> tuple[Size, ...]:
    """The list in the settings of a dataset; empty where all samples are squares."""
    return tuple((width, height) for width, height in settings.get("shapes", ()))


def fields_in_shape(settings: Mapping[str, Any], size: Size) -> tuple[Field, ...]:
    """The arrays of a sample of this shape. A side of its latent is to the square's as its pixels
    are to the resolution."""
    resolution: int = settings["resolution"]

    def cells(pixels: int, of_square: int) -> int:
        count, rest = divmod(pixels * of_square, resolution)
        if rest or not count:
            raise FormatError(f"latents of {shape_name(size)} have no whole number of cells a side")
        return count

    def shaped(field: Field) -> Field:
        if field.name != LATENT:
            return field
        channels, high, wide = field.shape
        width, height = size
        return replace(field, shape=(channels, cells(height, high), cells(width, wide)))

    return tuple(map(shaped, fields_of(settings["layout"])))
