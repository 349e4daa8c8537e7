"""Bytes of an image to the uint8 pixels that the VAE sees.

The pixel rule comes first, so an image of a foreign tar ends as `pack` would have stored it. Then
it is scaled to cover its shape, and the centre is cut out: `shapes` says which. Pillow decodes and
torch scales, for these reasons:

- Pillow is as fast as torchvision once its pixels are taken where they lie, as four bytes each
  (through Arrow, without a copy); torch scales four channels as fast as three. Its own scaling is
  three to five times slower than torch's. The two round differently: of 126 images (like photos,
  noise, text, ramps; torch 2.14, Pillow 13.0) 0 to 0.8 % of the levels are others, 0.25 % in the
  median, by 1 and seldom by 2. Of fine regular patterns, whose mean lies halfway between two
  levels, it is up to half of them, by 1.
- torchvision 0.29 crashes the process on a PNG with a wrong checksum, and its libjpeg prints a line
  for every slightly damaged JPEG. With Pillow a file is damaged here when it is damaged to `pack`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow
import torch
from torch.nn.functional import interpolate
from torch.utils.dlpack import from_dlpack

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.images import Limits, formats, headers
from wdsprep.images.rule import Picture, prepare
from wdsprep.images.shapes import Fit, Shapes
from wdsprep.limits import MAX_AREA

if TYPE_CHECKING:
    from PIL import Image


T = TypeVar("T")
_KINDS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Crop:
    """A part of an image, uint8 (3, H, W), with the width and height of the whole upright image."""

    pixels: torch.Tensor
    width: int
    height: int
    fit: Fit


NO_PIXELS = torch.empty((3, 0, 0), dtype=torch.uint8)
Cut = Crop | RejectedError
"""Of an image, or why it cannot be had."""


def crop(data: bytes, shapes: Shapes | int, *, max_area: int = MAX_AREA) -> Crop:
    """Decode an image, and cut out what its shape takes. A number stands for a square.

    Raise RejectedError where it is damaged, too small or too large.
    """
    shapes = Shapes.square(shapes) if isinstance(shapes, int) else shapes
    picture = _prepared(data, shapes.least_side, max_area)
    fit = shapes.fit(picture.width, picture.height)
    return _cut_out(_pixels(_decoded(picture)), fit)


def crops(data: bytes, several: Sequence[Shapes], *, max_area: int = MAX_AREA) -> list[Cut]:
    """Return what `crop` gives for each of several lists of shapes, with one decoding."""

    def alone(shapes: Shapes) -> Cut:
        return _or_refused(lambda: crop(data, shapes, max_area=max_area))

    if len(several) == 1:
        return [alone(several[0])]
    least = min(shapes.least_side for shapes in several)
    picture = _or_refused(lambda: _prepared(data, least, max_area))
    if isinstance(picture, RejectedError):  # for some it may be too small before that
        return list(map(alone, several))
    decoded = cache(partial(_or_refused, lambda: _pixels(_decoded(picture))))

    def cut(shapes: Shapes) -> Cut:
        try:
            fit = shapes.fit(picture.width, picture.height)
        except RejectedError:  # alone, it would perhaps not have come so far
            return alone(shapes)
        pixels = decoded()
        return pixels if isinstance(pixels, RejectedError) else _cut_out(pixels, fit)

    return list(map(cut, several))


def decode_image(data: bytes, *, max_area: int = MAX_AREA) -> "Image.Image":
    """Return an image as `pack` would have stored it, in RGB; a RejectedError for what is damaged
    or too large."""
    image = _decoded(_prepared(data, 1, max_area))
    return image if image.mode == "RGB" else image.convert("RGB")


def planes_of(image: "Image.Image") -> torch.Tensor:
    """Return the pixels of an image, uint8 (3, H, W)."""
    return _planes(_pixels(image))


def _or_refused(act: Callable[[], T]) -> "T | RejectedError":
    try:
        return act()
    except RejectedError as refused:
        return refused


def _prepared(data: bytes, least_side: int, max_area: int) -> Picture:
    limits = Limits(min_side=least_side, max_area=max_area, max_aspect_ratio=0.0)
    return prepare(data, limits=limits, full=False)


def _cut_out(pixels: torch.Tensor, fit: Fit) -> Crop:
    _, height, width = pixels.shape
    scaled = _scaled(pixels, fit.scaled_width, fit.scaled_height)
    middle = scaled[:, fit.top : fit.top + fit.height, fit.left : fit.left + fit.width]
    return Crop(pixels=_planes(middle), width=width, height=height, fit=fit)


def _planes(pixels: torch.Tensor) -> torch.Tensor:
    """Return the three colour planes.

    Of four channels each pixel is taken as one number: half the time of a copy byte by byte.
    """
    if len(pixels) == 1:
        return pixels.expand(3, -1, -1).contiguous()
    numbers = pixels.permute(1, 2, 0).numpy().view("<u4")[..., 0]
    planes = np.empty((3, *numbers.shape), np.uint8)
    for channel, plane in enumerate(planes):
        np.right_shift(numbers, 8 * channel, out=plane, casting="unsafe")
    return torch.from_numpy(planes)


def _decoded(picture: Picture) -> "Image.Image":
    """Decode an image. This finds the damage that `pack --check full` finds."""
    kind = _KINDS[picture.extension]
    if kind == "PNG":
        headers.check_png(picture.data)
    with formats.quiet:
        image = formats.opened(picture.data, kind)
        if image.size != (picture.width, picture.height):  # or the limits were checked in vain
            raise RejectedError(Code.CORRUPT, "two sizes in one file")
        loaded = formats.load(image, kind)
        return loaded if loaded.mode in ("L", "RGB") else loaded.convert("RGB")


def _pixels(image: "Image.Image") -> torch.Tensor:
    """(channels, height, width) with the channels last in memory; four of them unless grey."""
    try:
        stored = pyarrow.array(image)
        flat = from_dlpack(stored if image.mode == "L" else stored.values)
    except ValueError:  # over 16 MB Pillow keeps an image in several pieces
        raw = bytearray(image.tobytes("raw", "L" if image.mode == "L" else "RGBX"))
        flat = torch.frombuffer(raw, dtype=torch.uint8)
    return flat.view(image.height, image.width, -1).permute(2, 0, 1)


def _scaled(pixels: torch.Tensor, width: int, height: int) -> torch.Tensor:
    if pixels.shape[1:] == (height, width):
        return pixels
    batch = pixels.permute(1, 2, 0)[None].permute(
        0, 3, 1, 2
    )  # channels last to torch, as [None] not
    return interpolate(batch, size=(height, width), mode="bicubic", antialias=True)[0]
