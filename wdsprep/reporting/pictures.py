"""Pictures for the page: thumbnails, the crop as it was encoded, latents in false colours, decoded.

Each picture is a small WebP or PNG inside the page. The crop is made with Pillow, so a report on
images needs no torch; the crop differs from what the VAE saw by rounding at most. The model that
decodes is loaded with the first latent, by the one module that needs torch, and only if it is on
this machine: a report fetches nothing.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.samples import STORED_FORMATS
from wdsprep.dataset.shapes import Size, cut_size
from wdsprep.encoding.models.find_model import Model, find_model
from wdsprep.errors import UsageError, WdsprepError
from wdsprep.images import formats
from wdsprep.images.options import Limits
from wdsprep.images.pixel_rule import prepare
from wdsprep.reporting.datasets import ReadSample, ReportDataset

if TYPE_CHECKING:
    from wdsprep.encoding.models.vae import Decoder

SIDE = 256
LONGEST = 384
# Four channels to red, green and blue: closest to the picture for latents of Stable Diffusion 1 and
# 2. For other models it gives false colours, always the same ones.
PROJECTION = (
    (0.298, 0.207, 0.208),
    (0.187, 0.286, 0.173),
    (-0.158, 0.189, 0.264),
    (-0.184, -0.271, -0.473),
)


SheetPicture = dict[str, Any]
"""A picture of a sample on the contact sheet: title, measure, alt, source, width, height and kind.

Of the kind `coarse` each pixel is shown as a square; `crop` is the first picture of a latent. A
picture that could not be made has a title and a `note` that says why.
"""


def format_sides(*sides: object) -> str:
    """Return sides as people write them: 640 times 480, with the sign for times."""
    return " \N{MULTIPLICATION SIGN} ".join(map(str, sides))


def open_picture(sample: ReadSample, max_area: int, *, name: str = "") -> tuple[Any, SheetPicture]:
    """Open an image, and return it with its thumbnail, or None with a note that says why.

    It is the target, or the image of this name in a role.
    """
    title, alt = name or "original", f"the {name or 'image'}"
    members = (f"{name}.{kind}".removeprefix(".") for kind in STORED_FORMATS)
    data = next((sample.members[member] for member in members if member in sample.members), b"")
    try:
        image = open_image(data, max_area)
    except RejectedError as error:
        return None, {"title": title, "note": f"{error.code} {error.detail}".strip()}
    return image, thumbnail(image, title, alt=alt, measure=format_sides(*image.size))


def open_image(data: bytes, max_area: int) -> Image.Image:
    """Return an upright image as RGB. Raise RejectedError if it cannot be shown."""
    limits = Limits(min_side=1, max_area=max_area, max_aspect_ratio=0.0)
    picture = prepare(data, limits=limits, full=False)
    kind = STORED_FORMATS[picture.extension]
    with formats.quiet:
        image = formats.open_image(picture.data, kind)
        if image.size != (picture.width, picture.height):
            raise RejectedError(Code.CORRUPT, "two sizes in one file")
        return formats.load(image, kind).convert("RGB")


def thumbnail(image: Image.Image, title: str, *, alt: str, measure: str) -> SheetPicture:
    """Return a picture of the image for the sheet, at most 256 pixels high and 384 wide."""
    scale = min(1.0, SIDE / image.height, LONGEST / image.width)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    small = image.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)
    source = _uri(small, "WEBP", quality=80, method=4)
    return _picture(title, measure, alt, source, size)


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


def draw_levels(levels: Any, title: str, alt: str) -> SheetPicture:
    """Draw a mask, or an image in pixels; a small one has a square for each pixel."""
    image = Image.fromarray(np.moveaxis(levels, 0, -1) if levels.ndim == 3 else levels)
    sides = format_sides(*levels.shape)
    if max(image.size) > SIDE:
        return thumbnail(image, title, alt=alt, measure=sides)
    return _picture(title, sides, alt, _uri(image, "PNG"), image.size, kind="coarse")


def draw_latent(latent: Any, title: str, alt: str) -> SheetPicture:
    """Draw a latent in false colours, one pixel for each of its cells."""
    if len(latent) == len(PROJECTION):
        rgb = np.tensordot(latent, np.array(PROJECTION, np.float32), (0, 0))
    else:
        rgb = np.moveaxis(latent[[0, min(1, len(latent) - 1), min(2, len(latent) - 1)]], 0, 2) / 3
    levels = ((rgb + 1) * 127.5).clip(0, 255).round().astype(np.uint8)
    image = Image.fromarray(levels)
    sides = format_sides(*latent.shape)
    return _picture(title, sides, alt, _uri(image, "PNG"), image.size, kind="coarse")


def _picture(
    title: str, measure: str, alt: str, source: str, size: Size, *, kind: str = ""
) -> SheetPicture:
    width, height = size
    about = {"title": title, "measure": measure, "alt": alt, "kind": kind}
    return {**about, "source": source, "width": width, "height": height}


def psnr(image: Image.Image, other: Image.Image) -> float:
    """Return the PSNR in dB of two pictures of the same size: at most 100, as for equal ones."""
    pixels = np.asarray(image, np.float64), np.asarray(other, np.float64)
    error = float(((pixels[0] - pixels[1]) ** 2).mean())
    return min(100.0, float(10 * np.log10(255**2 / error))) if error else 100.0


def _uri(image: Image.Image, kind: str, **options: int) -> str:
    out = BytesIO()
    image.save(out, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(out.getvalue()).decode('ascii')}"


NONE = "none"
PACKAGES = ("torch", "diffusers")  # needed to decode


Decoding = tuple[Model | None, str]
"""The model that decodes the latents of a dataset, or None with the reason why none does.

With a model the reason is a warning, or empty.
"""


def model_name(latents: ReportDataset, wanted: str) -> str:
    """Return the name of the model to decode with: `wanted` or the dataset's; empty for none."""
    return "" if wanted == NONE else wanted or str(latents.manifest.extra.get("model", ""))


def find_decoding(latents: ReportDataset, wanted: str) -> Decoding:
    """Find the model that is wanted, or else the one that the dataset was made with.

    The result has a reason and no model if decoding is not wanted, no model is named, a package is
    missing, or the dataset's own model is not on this machine or has other weights now. A wanted
    model raises an error if it is not on this machine or does not fit the latents. If only its
    weights differ from those of the dataset, the reason is a warning.
    """
    if wanted == NONE:
        return None, "--model none was given"
    settings = latents.manifest.settings
    name = model_name(latents, wanted)
    if not name:
        return None, "the dataset does not say which model made it: give it with --model"
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        return None, f"{missing[0]} is not installed here"
    try:
        model = find_model(name, text=settings["text"], is_offline=True)
    except WdsprepError as error:
        if wanted:
            raise
        return None, str(error)
    if model.weights == settings["weights"]:
        return model, ""
    if wanted:
        _check_channels(model, latents)
    reason = f"the latents were made with other weights of {name}"
    return model if wanted else None, reason


def _check_channels(model: Model, latents: ReportDataset) -> None:
    settings = latents.manifest.settings
    channels = settings["layout"][0]["shape"][0]
    if settings["latents"] == "moments":  # as the VAE gives them
        channels = channels // 2 * model.patch**2
    if channels != model.channels:
        raise UsageError(
            f"--model {model.name} has {model.channels} latent channels, and {latents.shown} has "
            f"{channels}: give the model that made its latents"
        )


LoadDecoder = Callable[[Model], "Decoder | WdsprepError"]


def decoder_loader(on_message: Callable[[str], None]) -> LoadDecoder:
    """Return a function that returns the decoder of a model, or the error that kept it from that.

    It loads each decoder once, and tells `on_message` of it first.
    """
    loaded: dict[str, Decoder | WdsprepError] = {}

    def load(model: Model) -> "Decoder | WdsprepError":
        if model.weights not in loaded:
            from wdsprep.encoding.models.vae import Decoder

            on_message(f"loading the decoder of {model.name}")
            try:
                loaded[model.weights] = Decoder(model)
            except WdsprepError as error:  # kept, so that it is not tried again
                loaded[model.weights] = error
        return loaded[model.weights]

    return load
