"""Pictures for the page: thumbnails, the crop as it was encoded, latents in false colours.

Each picture is a small WebP or PNG inside the page. The crop is made with Pillow, so a report on
images needs no torch; the crop differs from what the VAE saw by rounding at most.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.shapes import Size, cut_size
from wdsprep.images import formats
from wdsprep.images.options import Limits
from wdsprep.images.pixel_rule import prepare
from wdsprep.reporting.page.markup import format_sides

SIDE = 256
LONGEST = 384
KINDS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}
# Four channels to red, green and blue: closest to the picture for latents of Stable Diffusion 1 and
# 2. For other models it gives false colours, always the same ones.
PROJECTION = (
    (0.298, 0.207, 0.208),
    (0.187, 0.286, 0.173),
    (-0.158, 0.189, 0.264),
    (-0.184, -0.271, -0.473),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SheetPicture:
    """A picture of a sample on the contact sheet.

    If it could not be made, `source` is empty and `note` says why.
    """

    title: str
    measure: str = ""
    alt: str = ""
    source: str = ""
    width: int = 0
    height: int = 0
    note: str = ""
    kind: str = ""
    """`coarse` shows each pixel as a square; `crop` is the first picture of a latent."""


def open_image(members: Mapping[str, bytes], max_area: int) -> Image.Image:
    """Return the upright image of a sample as RGB. Raise RejectedError if it cannot be shown."""
    data = next((members[name] for name in KINDS if name in members), b"")
    limits = Limits(min_side=1, max_area=max_area, max_aspect_ratio=0.0)
    picture = prepare(data, limits=limits, full=False)
    kind = KINDS[picture.extension]
    with formats.quiet:
        image = formats.open_image(picture.data, kind)
        if image.size != (picture.width, picture.height):
            raise RejectedError(Code.CORRUPT, "two sizes in one file")
        return formats.load(image, kind).convert("RGB")


def thumbnail(image: Image.Image, title: str, alt: str) -> SheetPicture:
    """Return a picture of the image for the sheet, at most 256 pixels high and 384 wide."""
    scale = min(1.0, SIDE / image.height, LONGEST / image.width)
    width, height = (max(1, round(side * scale)) for side in image.size)
    small = image.resize((width, height), Image.Resampling.LANCZOS, reducing_gap=3.0)
    return SheetPicture(
        title=title,
        alt=alt,
        source=_uri(small, "WEBP"),
        width=width,
        height=height,
    )


def crop_of(image: Image.Image, facts: Mapping[str, Any], sizes: Sequence[Size]) -> Image.Image:
    """Cut the region that was encoded out of an image, scaled to the size it was encoded at.

    The json of the latent sample states the crop within the scaled image; `image` may have another
    scale. Raise ValueError if the crop has none of `sizes`. Bad numbers in the json raise KeyError,
    TypeError or ZeroDivisionError.
    """
    scaled, size = (facts["scaled_width"], facts["scaled_height"]), cut_size(facts)
    if size not in sizes:
        raise ValueError(f"a crop of {facts['crop']} has none of the sizes {sizes}")
    left, top, right, bottom = facts["crop"]
    ratio = image.width / scaled[0], image.height / scaled[1]
    box = left * ratio[0], top * ratio[1], right * ratio[0], bottom * ratio[1]
    return image.resize(size, Image.Resampling.BICUBIC, box=box)


def draw_latent(latent: Any, alt: str) -> SheetPicture:
    """Draw a latent in false colours, one pixel for each of its cells."""
    rows = latent.reshape(len(latent), -1).T
    if len(latent) == len(PROJECTION):
        rgb = rows @ np.array(PROJECTION, np.float32)
    else:
        rgb = rows[:, [0, min(1, len(latent) - 1), min(2, len(latent) - 1)]] / 3
    levels = ((rgb + 1) * 127.5).clip(0, 255).round().astype(np.uint8)
    height, width = latent.shape[1:]
    image = Image.fromarray(levels.reshape(height, width, 3))
    return SheetPicture(
        title="latent",
        measure=format_sides(*latent.shape),
        alt=alt,
        source=_uri(image, "PNG"),
        width=width,
        height=height,
        kind="coarse",
    )


def psnr(image: Image.Image, other: Image.Image) -> float:
    """Return the PSNR in dB of two pictures of the same size: at most 100, as for equal ones."""
    pixels = np.asarray(image, np.float64), np.asarray(other, np.float64)
    error = float(((pixels[0] - pixels[1]) ** 2).mean())
    return min(100.0, float(10 * np.log10(255**2 / error))) if error else 100.0


def image_from_levels(levels: Any) -> Image.Image:
    """Return the image with these uint8 values, of shape (height, width, 3)."""
    return Image.fromarray(levels)


def _uri(image: Image.Image, kind: str) -> str:
    out = BytesIO()
    image.save(out, kind, **({"quality": 80, "method": 4} if kind == "WEBP" else {}))
    data = base64.b64encode(out.getvalue()).decode("ascii")
    return f"data:image/{kind.lower()};base64,{data}"
