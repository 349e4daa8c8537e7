"""The pixel rule: what goes into a shard is an upright, opaque, 8-bit sRGB JPEG, PNG or WebP.

Files that are that already are kept to the byte; everything else is converted, a lossy source to a
JPEG that adds next to no loss, a lossless one to PNG. What cannot be trusted is rejected with a
code. Limits are checked on the header's word, before anything of the claimed size is allocated.

A mask is grey and lossless: a PNG of 8 bits of grey is kept to the byte, and anything else becomes
one. Its greys are weights and no colours, so no profile is applied to them.
"""

from dataclasses import replace
from io import BytesIO
from typing import NamedTuple

from PIL import Image, ImageChops, ImageStat, TiffImagePlugin
from PIL.ImageFile import ImageFile

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.samples import STORED_FORMATS
from wdsprep.images import colour, formats, headers
from wdsprep.images.headers import Header
from wdsprep.images.options import Limits

CHANGES = (
    *("format", "animation", "orientation", "depth", "palette", "grey", "cmyk", "icc", "alpha"),
    *("resize", "recode"),
)

_HEADERS = {"JPEG": headers.read_jpeg, "PNG": headers.read_png, "WEBP": headers.read_webp}
_EXTENSIONS = {kind: extension for extension, kind in STORED_FORMATS.items()}

_JPEG_MAX_SIDE = 65_500  # libjpeg's


class Picture(NamedTuple):
    """An image as it will be stored, upright; `changes` are those of CHANGES that were made."""

    data: bytes
    extension: str
    width: int
    height: int
    original_width: int
    original_height: int
    changes: tuple[str, ...]


def prepare_mask(data: bytes, target: Picture, *, limits: Limits, full: bool) -> Picture:
    """Return a mask as it will be stored, or raise RejectedError if it cannot be stored.

    It has the size of the image `target` as that came, and is made as small as that was made.
    """
    size = (target.original_width, target.original_height)
    limits = replace(limits, mask_size=size, quality=0)
    picture = prepare(data, limits=limits, full=full)
    size = target.width, target.height
    if size == limits.mask_size:
        return picture
    with formats.quiet:
        image = formats.load(formats.open_image(picture.data, "PNG"), "PNG")
        data = _encode(image.resize(size, Image.Resampling.BOX), False)[1]
    changes = tuple(change for change in CHANGES if change in {*picture.changes, "resize"})
    return picture._replace(data=data, width=target.width, height=target.height, changes=changes)


def prepare(data: bytes, *, limits: Limits, full: bool) -> Picture:
    """Return an image as it will be stored, or raise RejectedError if it cannot be stored.

    Its bytes are kept if they follow the pixel rule and the limits give no quality; else the image
    is converted. With `full`, an image whose bytes are kept is decoded too, to find damage. If the
    limits have the size of a mask, the image is a mask.
    """
    if not data:
        raise RejectedError(Code.EMPTY)
    kind = formats.identify(data)
    if kind not in _HEADERS:
        return _convert_other(data, kind, limits)
    header = _HEADERS[kind](data)
    width, height = header.width, header.height
    if header.orientation > 4:
        width, height = height, width
    _check_limits(width, height, limits)
    if header.damage:
        raise RejectedError(*header.damage)
    if full and kind == "PNG":
        headers.check_png(data)
    if limits.quality or header.needs or header.orientation != 1:
        stays = False
    elif limits.mask_size:
        stays = (kind, header.mode) == ("PNG", "L")
    else:
        stays = not colour.needs_transform(header.profile, header.mode)
    if full or not stays:
        with formats.quiet:
            opened = formats.open_image(data, kind, (header.width, header.height))
            if stays and kind == "JPEG":
                # Drafted at an eighth, in grey: libjpeg still decodes every entropy-coded byte and
                # skips most of the inverse transform, upsampling and colour conversion. Of 1,200
                # damaged files (cut, bytes changed, blocks blanked) it found the very same 610 as a
                # full load, in 55 to 87 % of the time. What neither finds is damage that still
                # decodes to something: libjpeg only warns there, and Pillow does not pass that on.
                opened.draft("L", (max(1, header.width // 8), max(1, header.height // 8)))
            image = formats.load(opened, kind)
            if not stays:
                return _convert(image, header, limits)
    return Picture(
        data=data,
        extension=_EXTENSIONS[kind],
        width=width,
        height=height,
        original_width=width,
        original_height=height,
        changes=(),
    )


def _check_limits(width: int, height: int, limits: Limits) -> None:
    shorter, longer = sorted((width, height))
    if width * height > limits.max_area:
        raise RejectedError(Code.TOO_LARGE, f"{width} x {height}")
    if limits.mask_size and (width, height) != limits.mask_size:
        size = "{} x {}".format(*limits.mask_size)
        raise RejectedError(Code.OTHER_SIZE, f"{width} x {height}, and its image {size}")
    if shorter < limits.min_side:
        raise RejectedError(Code.TOO_SMALL, f"{width} x {height}")
    if limits.max_aspect_ratio and longer > limits.max_aspect_ratio * shorter:
        raise RejectedError(Code.ASPECT_RATIO, f"{width} x {height}")


def _convert_other(data: bytes, kind: str, limits: Limits) -> Picture:
    """Convert an image of a format that is always converted, whose header Pillow reads.

    Raise RejectedError if the image is damaged, outside the limits, or has pixels of a kind that is
    not supported.
    """
    if kind == "GIF":
        _check_limits(*headers.gif_size(data), limits)
    with formats.quiet:
        image = formats.open_image(data, kind)
        _check_limits(*image.size, limits)
        # Tiles of a TIFF may be larger than the image, and libtiff allocates one in full.
        tags = getattr(image, "tag_v2", {})
        wide, high = tags.get(TiffImagePlugin.TILEWIDTH, 0), tags.get(TiffImagePlugin.TILELENGTH, 0)
        if isinstance(wide, int) and isinstance(high, int) and wide * high > limits.max_area:
            raise RejectedError(Code.TOO_LARGE, f"tiles of {wide} x {high}")
        header = _other_header(image, kind)
        return _convert(formats.load(image, kind), header, limits)


def _other_header(image: ImageFile, kind: str) -> Header:
    if image.mode in ("F", "LAB") or (image.mode == "I" and kind != "PPM"):
        raise RejectedError(Code.UNSUPPORTED, f"{kind}: pixels of kind {image.mode}")
    needs, depth, turned = ["format"], 8, 1
    profile = image.info.get("icc_profile")
    lossy = kind in ("AVIF", "HEIF", "JPEG2000")
    try:
        if getattr(image, "is_animated", False):
            needs.append("animation")
        if isinstance(image, TiffImagePlugin.TiffImageFile):
            depth = max(image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (1,)))
            lossy = image.info.get("compression") in ("jpeg", "tiff_jpeg", "webp")
            if image.tag_v2.get(0x0112, 1) in headers.TURNS:  # Pillow turns it on loading
                needs.append("orientation")
        else:
            turned = headers.orientation(image.info.get("exif") or b"")
    except formats.DAMAGE as error:
        raise formats.rejection(error, kind) from error
    return Header(
        format=kind,
        width=image.width,
        height=image.height,
        depth=depth,
        orientation=turned,
        profile=profile if isinstance(profile, bytes) else None,
        lossy=lossy,
        needs=(*needs, "depth") if depth > 8 else tuple(needs),
    )


def _convert(image: Image.Image, header: Header, limits: Limits) -> Picture:
    done = set(header.needs)
    if limits.mask_size:
        header = header._replace(profile=None, lossy=False)
    image, alpha = colour.make_plain(image, header, done)
    if limits.mask_size:
        if alpha is not None and alpha.getextrema() != (255, 255):
            raise RejectedError(Code.UNSUPPORTED, "a mask with transparent parts: store it as grey")
        if image.mode != "L":
            done.add("grey")
            image, *others = image.split()
            if any(ImageChops.difference(image, other).getbbox() for other in others):
                raise RejectedError(Code.UNSUPPORTED, "a mask with colours: store it as grey")
        done |= set() if header.format == "PNG" else {"format"}
    elif alpha is not None:
        share = 1 - ImageStat.Stat(alpha).mean[0] / 255  # half transparent is half a pixel
        if share > limits.max_alpha:
            raise RejectedError(Code.TRANSPARENT, f"{share:.0%} of it")
        image = Image.composite(image, Image.new(image.mode, image.size, "white"), alpha)
    original_width, original_height = image.size
    if limits.quality:
        done.add("recode")
        shorter, longer = sorted(image.size)
        scale = max(limits.max_side / longer, limits.min_side / shorter)
        if limits.max_side and scale < 1:
            done.add("resize")
            width, height = (
                max(1, limits.min_side if side == shorter else 1, round(side * scale))
                for side in image.size
            )
            # A box filter to three times the size, then Lanczos: as good to the eye, much faster.
            lanczos = Image.Resampling.LANCZOS
            image = image.resize((width, height), lanczos, reducing_gap=3.0)
    extension, data = _encode(image, header.lossy, limits.quality)
    return Picture(
        data=data,
        extension=extension,
        width=image.width,
        height=image.height,
        original_width=original_width,
        original_height=original_height,
        changes=tuple(change for change in CHANGES if change in done),
    )


def _encode(image: Image.Image, lossy: bool, quality: int = 0) -> tuple[str, bytes]:
    image.info = {}  # or Pillow would write the profile and comments of the source
    out = BytesIO()
    if (lossy or quality) and max(image.size) <= _JPEG_MAX_SIDE:
        image.save(out, "JPEG", quality=quality or 95, subsampling=0)
        return "jpg", out.getvalue()
    image.save(out, "PNG", compress_level=1)
    return "png", out.getvalue()
