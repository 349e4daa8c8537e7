"""Which formats there are: told by their first bytes, opened by one plugin each, damage named.

The plugins are called by name, not through `Image.open`: no other format can slip in, their reasons
are not swallowed, and an MPO is opened as what its first frame is, a JPEG.

Pixels in no format, as MDS keeps images of Pillow, become a PNG, which loses none.
"""

import ctypes
import logging
import re
import struct
import threading
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from typing import Any

from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    Jpeg2KImagePlugin,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
    features,
)
from PIL.ImageFile import ImageFile

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError

_AVIF, _HEIF = {b"avif", b"avis"}, {b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1"}

_MAGIC = {
    "JPEG": (b"\xff\xd8\xff",),
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "TIFF": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    "JPEG2000": (b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51"),
}
# "BM" and "P5" begin many a text, so more than the magic is asked of these two.
_BMP = re.compile(rb"BM.{12}[\x0c\x10\x28\x34\x38\x40\x6c\x7c]\0\0\0", re.DOTALL)
_PPM = re.compile(rb"P[1-6f]\s+(?:#[^\n]*\n\s*)*\d")
_UNSUPPORTED = {
    b"8BPS": "a Photoshop file",
    b"\xff\x0a": "JPEG XL",
    b"\0\0\0\x0cJXL \r\n\x87\n": "JPEG XL",
    b"II\xbc": "JPEG XR",
    b"qoif": "QOI",
    b"\0\0\1\0": "an icon",
    b"DDS ": "DDS",
    b"v/1\1": "OpenEXR",
    b"#?RADIANCE": "Radiance HDR",
    b"%!PS": "PostScript",
}
_HTML = re.compile(rb"<(!doctype html|html|head|body|script|meta|title|div)\b", re.IGNORECASE)

_PLUGINS: dict[str, Callable[[BytesIO, str], ImageFile]] = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
    "AVIF": AvifImagePlugin.AvifImageFile,
    "JPEG2000": Jpeg2KImagePlugin.Jpeg2KImageFile,
    "PPM": PpmImagePlugin.PpmImageFile,
}

# What those plugins raise on damaged input; only opening and loading stand inside such a `try`.
DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    RuntimeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
LIBTIFF = ("TIFFSetErrorHandler", "TIFFSetWarningHandler")
_SAYS_TRUNCATED = re.compile(
    r"truncat|not processed|unpack|end of|EOF|Not enough|only got", re.IGNORECASE
)
_SAYS_UNSUPPORTED = re.compile(
    r"unsupported|not (yet )?supported|unknown|not installed|unable", re.IGNORECASE
)


def identify(data: bytes) -> str:
    """Return the format of an image by its first bytes.

    If they are of no format that can be decoded, raise RejectedError, which says what they look
    like.
    """
    for name, starts in _MAGIC.items():
        if data.startswith(starts):
            return name
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    if _BMP.match(data):
        return "BMP"
    if _PPM.match(data):
        return "PPM"
    if data[4:8] == b"ftyp":
        end = min(int.from_bytes(data[:4], "big"), len(data), 256)
        brands = {data[8:12], *(data[at : at + 4] for at in range(16, end, 4))}
        if brands & _AVIF:
            return "AVIF"
        if brands & _HEIF:
            return "HEIF"
        raise RejectedError(Code.NOT_AN_IMAGE, f"looks like a video ({_text(data[8:12])})")
    for magic, name in _UNSUPPORTED.items():
        if data.startswith(magic):
            raise RejectedError(Code.UNSUPPORTED, f"{name} cannot be decoded here")
    start = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n")
    if _HTML.search(start):
        raise RejectedError(Code.NOT_AN_IMAGE, "looks like HTML")
    if b"<svg" in start:
        raise RejectedError(Code.UNSUPPORTED, "SVG cannot be decoded here")
    if not data.strip(b"\0"):
        raise RejectedError(Code.NOT_AN_IMAGE, "only zero bytes")
    raise RejectedError(Code.NOT_AN_IMAGE, f"starts with {_text(data[:24])}")


def _text(start: bytes) -> str:
    return ascii(start.decode("latin-1"))


# Pillow logs an error where it also raises one; without a handler Python would print it.
logging.getLogger("PIL").addHandler(logging.NullHandler())


_core: Any = Image.core  # type: ignore[attr-defined]


BLOCK_NBYTES = 1 << 30


class _Quiet:
    """A block in which Pillow and libtiff are silent, and Pillow's size limit is off.

    An image has one piece of memory there, which can be used in place; Pillow would cut it at
    16 MB.

    Our size limit was checked before, and may be higher. libtiff's lines on stderr name no
    file: what is damaged is a reject.

    All of these are global to the process. The first thread to come sets them and the last to
    go puts them back, so that threads do not restore each other's values.
    """

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._setters: list[Any] = []
        if features.check("libtiff"):
            with suppress(AttributeError):  # a Pillow that hides them: then libtiff is heard
                self._setters = [getattr(ctypes.CDLL(_core.__file__), name) for name in LIBTIFF]
            for set_handler in self._setters:  # it returns the handler of messages before
                set_handler.argtypes, set_handler.restype = [ctypes.c_void_p], ctypes.c_void_p

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._filters = warnings.catch_warnings()
                self._filters.__enter__()
                warnings.simplefilter("ignore")
                self._limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
                self._block = _core.get_block_size()
                _core.set_block_size(BLOCK_NBYTES)
                self._handlers = [set_handler(None) for set_handler in self._setters]
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                Image.MAX_IMAGE_PIXELS = self._limit
                _core.set_block_size(self._block)
                for set_handler, handler in zip(self._setters, self._handlers, strict=True):
                    set_handler(handler)
                self._filters.__exit__(None, None, None)


quiet = _Quiet()


def open_image(data: bytes, kind: str, size: tuple[int, int] | None = None) -> ImageFile:
    """Open an image of this format, and of this width and height if they are known.

    Raise RejectedError if it is damaged, or if its plugin reads another size from it: the limits
    would have been checked in vain.
    """
    plugin = _PLUGINS.get(kind)
    if kind == "HEIF" and kind in Image.OPEN:  # pillow-heif, where the user registered it
        plugin = Image.OPEN[kind][0]
    if plugin is None:
        raise RejectedError(Code.UNSUPPORTED, "HEIC cannot be decoded here")
    try:
        image = plugin(BytesIO(data), "")
    except DAMAGE as error:
        raise rejection(error, kind) from error
    if size is not None and image.size != size:
        raise RejectedError(Code.CORRUPT, "two sizes in one file")
    return image


def load(image: ImageFile, kind: str) -> Image.Image:
    try:
        image.load()
    except DAMAGE as error:
        raise rejection(error, kind) from error
    return image


def rejection(error: Exception, kind: str) -> RejectedError:
    detail = f"{kind}: {error}"[:200]
    if isinstance(error, Image.DecompressionBombError):
        return RejectedError(Code.TOO_LARGE, detail)
    if _SAYS_TRUNCATED.search(detail):
        return RejectedError(Code.TRUNCATED, detail)
    if _SAYS_UNSUPPORTED.search(detail):
        return RejectedError(Code.UNSUPPORTED, detail)
    return RejectedError(Code.CORRUPT, detail)


HEAD = struct.Struct("<3I")  # width, height, and how long the name of the mode is
NBYTES = {"1": 0, "L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4, "I;16": 2}
"""Modes that are taken, and the bytes of a pixel; of mode 1 eight share one."""
AS_RGB = ("CMYK",)  # which PNG has not


def png_of_pixels(data: bytes) -> bytes:
    """Return a PNG of an image in the raw form of MDS: width, height, mode and pixels.

    It is hardly compressed: that would take longer than reading the rest of the sample. Raise
    RejectedError if the mode is not supported, or if the number of bytes does not fit.
    """
    try:
        width, height, length = HEAD.unpack_from(data)
        start = HEAD.size + length
        mode = data[HEAD.size : start].decode()
        row = -(-width // 8) if mode == "1" else width * NBYTES[mode]
        if not row or not height or len(data) - start != row * height:
            raise ValueError(f"{len(data) - start:,} bytes are not {width} x {height} of {mode}")
    except (struct.error, ValueError, KeyError) as error:
        what = f"mode {error}" if isinstance(error, KeyError) else str(error)
        raise RejectedError(Code.CORRUPT, f"no pixels of Pillow: {what}") from None
    image = Image.frombytes(mode, (width, height), data[start:])
    out = BytesIO()
    image = image.convert("RGB") if mode in AS_RGB else image
    image.save(out, "PNG", compress_level=1)
    return out.getvalue()
