"""The crop of an image that the VAE sees: from bytes to uint8 pixels.

The pixel rule comes first, so an image of a foreign tar ends as `pack` would have stored it. Then
it is scaled to cover its shape, and the centre is cut out: `nearest_shape` says which. It is made
larger only if that is asked for, by the same bicubic filter. Pillow decodes and torch scales, for
these reasons:

- Pillow is as fast as torchvision once its pixels are taken where they lie, as four bytes each
  (through Arrow, without a copy); torch scales four channels as fast as three. Its own scaling is
  three to five times slower than torch's. The two round differently: of 126 images (like photos,
  noise, text, ramps; torch 2.14, Pillow 13.0) 0 to 0.8 % of the levels are others, 0.25 % in the
  median, by 1 and seldom by 2. Of fine regular patterns, whose mean lies halfway between two
  levels, it is up to half of them, by 1.
- libjpeg decodes a JPEG at 1/2, 1/4 or 1/8 (Pillow's `draft`), where shapes allow it, by a smaller
  inverse transform of each block: of what an image costs the Huffman code stays. Pillow can reduce
  no WebP, nor a PNG.
- torchvision 0.29 crashes the process on a PNG with a wrong checksum, and its libjpeg prints a line
  for every slightly damaged JPEG. With Pillow a file is damaged here when it is damaged to `pack`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow
import torch
from torch.nn.functional import interpolate
from torch.utils.dlpack import from_dlpack

from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.samples import STORED_FORMATS
from wdsprep.dataset.shapes import Size
from wdsprep.images import formats, headers
from wdsprep.images.nearest_shape import Fit, SameCut, Shapes
from wdsprep.images.options import Limits
from wdsprep.images.pixel_rule import Picture, prepare
from wdsprep.limits import MAX_AREA

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image


T = TypeVar("T")
WHOLE = 1
REDUCTIONS = (8, 4, 2)
"""The factors by which libjpeg makes the sides of an image smaller as it decodes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Crop:
    """A part of an image, uint8 (3, H, W), with the width and height of the whole upright image."""

    pixels: torch.Tensor
    width: int
    height: int
    fit: Fit

    @property
    def scale(self) -> float:
        """Return how many times larger the image was made; it is below 1 if it was made smaller."""
        return max(self.fit.width / self.width, self.fit.height / self.height)

    @property
    def size(self) -> Size:
        return self.fit.width, self.fit.height

    @property
    def is_for_batch(self) -> bool:
        """Return whether the crop waits for a batch, which takes its pixels."""
        return self.pixels.numel() > 0

    def without_pixels(self) -> "Crop":
        return Crop(pixels=NO_PIXELS, width=self.width, height=self.height, fit=self.fit)


NO_PIXELS = torch.empty((3, 0, 0), dtype=torch.uint8)
CropResult = Crop | RejectedError
"""The crop of an image, or why it cannot be had."""


def crop(data: bytes, shapes: Shapes | SameCut | int, *, max_area: int = MAX_AREA) -> Crop:
    """Decode an image, scale it to cover the nearest of the shapes, and cut out its middle.

    A number stands for a square, and a SameCut for what another image was cut to. Raise
    RejectedError if the image is damaged, too small or too large.
    """
    shapes = Shapes.square(shapes) if isinstance(shapes, int) else shapes
    picture = _prepare(data, shapes.least_side, max_area)
    return _cut(picture, shapes, partial(_decode_pixels, picture))


def locate_crop(data: bytes, shapes: Shapes, *, max_area: int = MAX_AREA) -> CropResult:
    """Return the crop of an image without its pixels, which are not decoded, or why it has none."""

    def locate() -> Crop:
        picture = _prepare(data, shapes.least_side, max_area)
        size = picture.width, picture.height
        return Crop(pixels=NO_PIXELS, width=size[0], height=size[1], fit=shapes.fit(*size))

    return _catch_rejection(locate)


def crop_mask(data: bytes, target: Crop, cell: int, *, max_area: int = MAX_AREA) -> torch.Tensor:
    """Return the mean levels of a mask, uint8 (h, w), in squares of the part its target was cut to.

    Squares have `cell` pixels a side of the target's crop. Each level is the mean over the area of
    the mask, whatever its scale, and a half is rounded up. Raise RejectedError if the mask is
    damaged or has another size than its target.
    """
    size, fit = (target.width, target.height), target.fit
    limits = Limits(min_side=1, max_area=max_area, max_aspect_ratio=0.0, mask_size=size)
    levels = view_pixels(_decode(prepare(data, limits=limits, full=False)))[0].numpy()
    rows = np.arange(fit.top, fit.top + fit.height + 1, cell) * (size[1] / fit.scaled_height)
    columns = np.arange(fit.left, fit.left + fit.width + 1, cell) * (size[0] / fit.scaled_width)
    means = _means_between(_means_between(levels.astype(np.float64), rows).T, columns).T
    return torch.from_numpy(np.floor(means + 0.5).astype(np.uint8))


def _means_between(values: "NDArray[Any]", edges: "NDArray[Any]") -> Any:
    """Return the mean of the values between each two edges, along the first axis."""
    sums = np.concatenate([np.zeros_like(values[:1]), values.cumsum(0)])
    whole = np.minimum(edges.astype(int), len(values) - 1)
    sums_before = sums[whole] + (edges - whole)[:, None] * values[whole]
    return np.diff(sums_before, axis=0) / np.diff(edges)[:, None]


def crops(data: bytes, several: Sequence[Shapes], *, max_area: int = MAX_AREA) -> list[CropResult]:
    """Return the crop of an image for each of several lists of shapes, as `crop` makes it.

    A RejectedError is returned in place of a crop, not raised. The image is decoded once for each
    scale that is needed.
    """

    def alone(shapes: Shapes) -> CropResult:
        return _catch_rejection(lambda: crop(data, shapes, max_area=max_area))

    if len(several) == 1:
        return [alone(several[0])]
    least = min(shapes.least_side for shapes in several)
    picture = _catch_rejection(lambda: _prepare(data, least, max_area))
    if isinstance(picture, RejectedError):  # for some it may be too small before that
        return list(map(alone, several))
    decode = cache(partial(_decode_pixels, picture))

    def cut(shapes: Shapes) -> CropResult:
        try:
            return _cut(picture, shapes, decode)
        except RejectedError:  # alone, it would perhaps not have come so far
            return alone(shapes)

    return list(map(cut, several))


def decode_image(data: bytes, *, max_area: int = MAX_AREA) -> "Image.Image":
    """Return an image in RGB, as `pack` would have stored it.

    Raise RejectedError if the image is damaged, too large, or of a format that cannot be decoded.
    """
    image = _decode(_prepare(data, 1, max_area))
    return image if image.mode == "RGB" else image.convert("RGB")


def blank_image(size: Size) -> "Image.Image":
    from PIL import Image

    return Image.new("RGB", size)


def view_pixels(image: "Image.Image") -> torch.Tensor:
    """Return the pixels of an image, uint8 (channels, H, W), without a copy if that is possible.

    There are four channels, the last of which says nothing; a grey image has one. Channels are last
    in memory. Pixels that Pillow keeps in several pieces are copied.
    """
    try:
        stored = pyarrow.array(image)
        flat = from_dlpack(stored if image.mode == "L" else stored.values)
    except ValueError:  # over `formats.BLOCK_NBYTES` Pillow keeps an image in several pieces
        raw = bytearray(image.tobytes("raw", "L" if image.mode == "L" else "RGBX"))
        flat = torch.frombuffer(raw, dtype=torch.uint8)
    return flat.view(image.height, image.width, -1).permute(2, 0, 1)


def copy_planes(pixels: torch.Tensor) -> torch.Tensor:
    """Return a copy of the three colour planes of pixels that have one or four channels.

    The copy is uint8 (3, H, W). Of four channels each pixel is taken as one number: half the time
    of a copy byte by byte.
    """
    if len(pixels) == 1:
        return pixels.expand(3, -1, -1).contiguous()
    numbers = pixels.permute(1, 2, 0).numpy().view("<u4")[..., 0]
    planes = np.empty((3, *numbers.shape), np.uint8)
    for channel, plane in enumerate(planes):
        np.right_shift(numbers, 8 * channel, out=plane, casting="unsafe")
    return torch.from_numpy(planes)


def _catch_rejection(act: Callable[[], T]) -> "T | RejectedError":
    try:
        return act()
    except RejectedError as refused:
        return refused


def _prepare(data: bytes, least_side: int, max_area: int) -> Picture:
    limits = Limits(min_side=least_side, max_area=max_area, max_aspect_ratio=0.0)
    return prepare(data, limits=limits, full=False)


def reduction_factor(picture: Picture, fit: Fit, shapes: Shapes | SameCut) -> int:
    """Return the factor by which a JPEG may be decoded smaller, and still be large enough.

    It is 1 for other formats, and for shapes without `oversampling`.
    """
    if not shapes.oversampling or picture.extension != "jpg":
        return WHOLE
    times = min(picture.width / fit.scaled_width, picture.height / fit.scaled_height)
    return next((each for each in REDUCTIONS if times >= each * shapes.oversampling), WHOLE)


def _cut(picture: Picture, shapes: Shapes | SameCut, decode: Callable[[int], torch.Tensor]) -> Crop:
    """Cut a picture, whose pixels at a reduced scale `decode` returns.

    Those that were decoded smaller are scaled by the factors of the true width and height, as their
    sides were rounded up. torch rounds the scaled sides down, so these factors are a hair too
    large.
    """
    fit = shapes.fit(picture.width, picture.height)
    reduction = reduction_factor(picture, fit, shapes)
    scaled, size = decode(reduction), (fit.scaled_height, fit.scaled_width)
    if reduction != WHOLE or scaled.shape[1:] != size:
        how: dict[str, Any] = {"size": size}
        if reduction != WHOLE:
            sides = zip(size, (picture.height, picture.width), strict=True)
            factors = tuple(side * reduction / true * (1 + 1e-9) for side, true in sides)
            how = {"scale_factor": factors, "recompute_scale_factor": False}
        # After `scaled[None]` torch would not recognise that the channels are last in memory.
        batch = scaled.permute(1, 2, 0)[None].permute(0, 3, 1, 2)
        scaled = interpolate(batch, mode="bicubic", antialias=True, **how)[0]
    middle = scaled[:, fit.top : fit.top + fit.height, fit.left : fit.left + fit.width]
    return Crop(pixels=copy_planes(middle), width=picture.width, height=picture.height, fit=fit)


def _decode_pixels(picture: Picture, reduction: int) -> torch.Tensor:
    return view_pixels(_decode(picture, reduction))


def _decode(picture: Picture, reduction: int = WHOLE) -> "Image.Image":
    """Decode an image to L or RGB, or raise RejectedError if it is damaged.

    This finds the damage that `pack --check full` finds. The sides of a JPEG are divided by
    `reduction`, and rounded up.
    """
    kind = STORED_FORMATS[picture.extension]
    if kind == "PNG":
        headers.check_png(picture.data)
    width, height = picture.width, picture.height
    with formats.quiet:
        image = formats.open_image(picture.data, kind, (width, height))
        if reduction != WHOLE:
            image.draft(None, (width // reduction, height // reduction))
        loaded = formats.load(image, kind)
        return loaded if loaded.mode in ("L", "RGB") else loaded.convert("RGB")
