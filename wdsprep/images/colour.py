"""Pixels as a trainer expects them: upright, 8 bits a channel, sRGB, with the alpha apart.

The pixel rule lays what is transparent on white (`pixel_rule`).

A profile counts as sRGB by what it does: a cube of colours sent through it may move by two levels
of 255, which no eye and no encoder sees. Names do not matter (there are dozens of "sRGB"s, and some
of them are not). A broken profile, or one for other channels than the image has, counts as none,
which is what browsers do.
"""

from functools import lru_cache
from io import BytesIO

from PIL import Image, ImageChops, ImageCms, TiffImagePlugin

from wdsprep.images.headers import TURNS, Header

_SPACES = {b"RGB ": "RGB", b"GRAY": "L", b"CMYK": "CMYK"}


_TOLERANCE = 2  # levels of 255
_MAX_NBYTES = 4 << 20  # the largest real ones, of presses, have 3 MB
_BROKEN = (ImageCms.PyCMSError, OSError, ValueError)


def make_plain(
    image: Image.Image, header: Header, done: set[str]
) -> tuple[Image.Image, Image.Image | None]:
    """Return an image upright, in 8 bits of sRGB, as L or RGB; and its alpha, if it has any.

    The names of the changes that are made are added to `done`.
    """
    clear = _transparent_colour(image, header)
    if header.orientation != 1:
        done.add("orientation")
        image = image.transpose(Image.Transpose[TURNS[header.orientation]])
    if image.mode == "1" or image.mode.startswith("I"):
        done.add("depth")
        opaque = _opaque_mask(image, clear) if image.mode == "I;16" else None
        image = _to_eight_bits(image, header)
        if opaque is not None:
            image.putalpha(opaque)
            clear = None
    image.info = {} if clear is None else {"transparency": clear}
    if image.mode in ("P", "PA"):
        done.add("palette")
        image = image.convert("RGB" if clear is None and image.mode == "P" else "RGBA")
    elif clear is not None and image.mode in ("L", "RGB"):
        image = image.convert("LA" if image.mode == "L" else "RGBA")
    alpha = None
    if image.mode in ("La", "RGBa"):  # premultiplied, in some TIFFs
        image = image.convert(image.mode.upper())
    if image.mode in ("LA", "RGBA"):
        done.add("alpha")
        alpha = image.getchannel("A")
        image = image.convert("L" if "L" in (image.mode[0], header.mode) else "RGB")
    if image.mode == "CMYK":
        done.add("cmyk")
        # Adobe writes CMYK inverted and says so; Pillow takes every CMYK JPEG for such a one.
        image = ImageChops.invert(image) if header.format == "JPEG" and not header.adobe else image
    elif image.mode not in ("L", "RGB"):
        image = image.convert("RGB")
    transform = _transform(header.profile, image.mode)
    if transform is not None:
        done.add("icc")
        moved = transform.apply(image.convert("RGB") if transform.input_mode == "RGB" else image)
        return moved.convert("L") if image.mode == "L" else moved, alpha
    return image.convert("RGB") if image.mode == "CMYK" else image, alpha


def _transparent_colour(image: Image.Image, header: Header) -> bytes | int | tuple[int, ...] | None:
    """Return the transparent colour of an image, in the levels of its pixels, or None.

    Pillow scales the pixels of a PNG to 8 bits, but not its transparent colour, so this does.
    Pillow leaves grey of 16 bits as it is, and so does this.
    """
    clear: bytes | int | tuple[int, ...] | None = image.info.get("transparency")
    if header.depth == 16 and isinstance(clear, tuple):
        return tuple(level >> 8 for level in clear)
    if header.depth in (2, 4) and isinstance(clear, int):
        return clear * 255 // ((1 << header.depth) - 1)
    return clear


def _opaque_mask(image: Image.Image, clear: object) -> Image.Image | None:
    """Return the alpha of a picture in grey of 16 bits: 0 where a pixel has the level `clear`.

    Elsewhere it is 255. All 16 bits of a level are compared. Return None if `clear` is no level.
    """
    if not isinstance(clear, int):
        return None
    raw = image.tobytes()
    differ = [
        Image.frombytes("L", image.size, raw[byte::2]).point(
            [255 * (value != clear >> 8 * byte & 255) for value in range(256)]
        )
        for byte in (0, 1)
    ]
    return ImageChops.lighter(*differ)


def needs_transform(profile: bytes | None, mode: str) -> bool:
    return _transform(profile, mode) is not None


def _transform(profile: bytes | None, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return the conversion from a profile to sRGB, or None if there is nothing to convert.

    That is so without a profile, or if it is sRGB, broken, for other channels or over 4 MB.
    """
    if not profile or len(profile) > _MAX_NBYTES:
        return None
    return _build_transform(profile, mode)


# The cache keeps profiles alive: its size times theirs is what a hostile source can fill.
@lru_cache(maxsize=32)
def _build_transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    space = _SPACES.get(profile[16:20], "")
    if space != mode and (space, mode) != ("RGB", "L"):
        return None
    try:
        transform = ImageCms.buildTransform(
            ImageCms.ImageCmsProfile(BytesIO(profile)),
            ImageCms.createProfile("sRGB"),
            space,
            "RGB",
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
            ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
    except _BROKEN:
        return None
    if space == "CMYK":
        return transform
    steps = [*range(0, 256, 32), 255]
    cube = bytes(level for r in steps for g in steps for b in steps for level in (r, g, b))
    colours = Image.frombytes("RGB", (len(cube) // 3, 1), cube)
    if mode == "L":  # of an RGB profile on a grey image only the curve matters
        colours = Image.frombytes("L", (256, 1), bytes(range(256))).convert(transform.input_mode)
    moved = transform.apply(colours)
    most = max(ImageChops.difference(moved, colours.convert("RGB")).tobytes())
    return transform if most > _TOLERANCE else None


def _to_eight_bits(image: Image.Image, header: Header) -> Image.Image:
    """Convert grey of 16, 12 or 1 bit to 8 bits.

    Levels of 12 or 16 bits are inverted if 0 is white, as in some TIFFs. Pillow's own conversion of
    16 bits clips at 255.
    """
    if image.mode == "1":
        return image.convert("L")
    raw = image.tobytes()
    if image.mode == "I":  # 32-bit little-endian words that hold 16 bits
        raw = raw[1::4]
    elif header.depth == 12:
        levels = Image.frombytes("I;16", image.size, raw).point(lambda level: level * 16)
        raw = levels.tobytes()[1::2]
    else:
        raw = raw[0::2] if image.mode == "I;16B" else raw[1::2]
    grey = Image.frombytes("L", image.size, raw)
    photometric = getattr(image, "tag_v2", {}).get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION)
    return ImageChops.invert(grey) if photometric == 0 else grey
