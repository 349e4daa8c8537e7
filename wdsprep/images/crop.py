"""Bytes of an image to the uint8 square that the VAE sees.

The pixel rule comes first, so an image of a foreign tar ends as `pack` would have stored it. Then
the shorter side is scaled to the resolution, the longer one in proportion, and the centre is cut
out. Pillow decodes and torch scales, for these reasons:

- Pillow is as fast as torchvision once its pixels are taken where they lie, as four bytes each
  (through Arrow, without a copy); torch scales four channels as fast as three. Its own scaling is
  three to five times slower than torch's, which gives the same levels but for rare ones, seldom
  more than a thousandth, that are off by one.
- torchvision 0.29 crashes the process on a PNG with a wrong checksum, and its libjpeg prints a line
  for every slightly damaged JPEG. With Pillow a file is damaged here when it is damaged to `pack`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow
import torch
from torch.nn.functional import interpolate
from torch.utils.dlpack import from_dlpack

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.images import Limits, formats, headers
from wdsprep.images.rule import Picture, prepare
from wdsprep.limits import MAX_AREA

if TYPE_CHECKING:
    from PIL import Image


_KINDS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Crop:
    """The square, uint8 (3, R, R), and where it lies in the image scaled so that it fits."""

    pixels: torch.Tensor
    width: int
    height: int
    scaled_width: int
    scaled_height: int
    left: int
    top: int


def crop(data: bytes, resolution: int, *, max_area: int = MAX_AREA) -> Crop:
    """The centre square of an image; a RejectedError for what is damaged, too small or too large.

    The width and height are those of the upright image.
    """
    limits = Limits(min_side=resolution, max_area=max_area, max_aspect_ratio=0.0)
    image = _decoded(prepare(data, limits=limits, full=False))
    width, height = image.size
    scaled_width, scaled_height = scaled_size(width, height, resolution)
    left, top = (scaled_width - resolution) // 2, (scaled_height - resolution) // 2
    pixels = _scaled(_pixels(image), scaled_width, scaled_height)
    square = pixels[:3, top : top + resolution, left : left + resolution]
    return Crop(
        pixels=square.expand(3, -1, -1).contiguous(),
        width=width,
        height=height,
        scaled_width=scaled_width,
        scaled_height=scaled_height,
        left=left,
        top=top,
    )


def scaled_size(width: int, height: int, resolution: int) -> tuple[int, int]:
    """The shorter side is the resolution, the longer one rounded, a half up."""
    shorter = min(width, height)
    wide, high = ((2 * side * resolution + shorter) // (2 * shorter) for side in (width, height))
    return wide, high


def _decoded(picture: Picture) -> "Image.Image":
    """Decoding finds what `pack --check full` finds."""
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
    return interpolate(pixels[None], size=(height, width), mode="bicubic", antialias=True)[0]
