"""Real image files for every kind the pixel rule treats, all made from one test picture.

The picture is four flat quarters (red, green / blue, yellow), a black square in the upper left, so
that any turn, flip or change of colour shows. `CASES` names each file with what `images.prepare`
must make of it under `LIMITS`; other tests write the same bytes into folders and tars.
"""

import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, TiffImagePlugin

from wdsprep.dataset.reject_codes import Code
from wdsprep.images.options import Limits

LIMITS = Limits(min_side=32, max_area=50_000_000, max_aspect_ratio=10.0)
SIZE = (96, 64)
RED, GREEN, BLUE, YELLOW = (200, 40, 40), (40, 160, 60), (40, 60, 180), (230, 210, 60)
PIECES = {(0, 0): RED, (1, 0): GREEN, (0, 1): BLUE, (1, 1): YELLOW}
CLEAR = (1, 0)  # the quarter that is transparent in the files that have transparency


@dataclass(frozen=True, kw_only=True)
class Case:
    """A file, and its code as a reject, or what it is stored as."""

    data: bytes
    code: Code | None = None
    extension: str = "jpg"
    changes: tuple[str, ...] = ()
    size: tuple[int, int] = SIZE
    grey: bool = False
    clear: bool = False  # the CLEAR quarter is stored white
    tolerance: int = 6  # of a quarter's mean, in levels of 255


def picture(size: tuple[int, int] = SIZE) -> Image.Image:
    width, height = size
    image = Image.new("RGB", size)
    draw = ImageDraw.Draw(image)
    for (x, y), colour in PIECES.items():
        left, top = x * width // 2, y * height // 2
        draw.rectangle((left, top, left + width // 2, top + height // 2), fill=colour)
    draw.rectangle((0, 0, width // 8, height // 8), fill=(0, 0, 0))
    return image


def with_alpha(image: Image.Image) -> Image.Image:
    """The picture with a fully transparent quarter, of the quarter's own colour underneath."""
    alpha = Image.new("L", image.size, 255)
    width, height = image.size
    alpha.paste(0, (width // 2, 0, width, height // 2))
    image = image.copy()
    image.putalpha(alpha)
    return image


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    out = BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def jpeg(*, size: tuple[int, int] = SIZE, quality: int = 95, **options: object) -> bytes:
    options = {"subsampling": 0, **options}
    return saved(picture(size), "JPEG", quality=quality, **options)


def png(*, size: tuple[int, int] = SIZE, **options: object) -> bytes:
    return saved(picture(size), "PNG", **options)


def turned(orientation: int, kind: str = "JPEG") -> bytes:
    """The picture as a camera held that way stores it."""
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    image = picture()
    if orientation > 1:
        image = image.transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {} if kind in ("PNG", "TIFF") else {"quality": 95}
    return saved(image, kind, exif=exif, **options)


# --- colour profiles, by hand: ICC v2, a matrix and one curve -----------------------------------

Curve = Callable[[Any], Any]
"""From levels of 0 to 1 to light, of a number or an array of them."""
P3 = ((0.5151, 0.2412, -0.0011), (0.2919, 0.6922, 0.0419), (0.1572, 0.0666, 0.7841))
ADOBE = ((0.6097, 0.3111, 0.0195), (0.2053, 0.6257, 0.0609), (0.1492, 0.0632, 0.7446))
SRGB = ((0.4361, 0.2225, 0.0139), (0.3851, 0.7169, 0.0971), (0.1431, 0.0606, 0.7141))
WHITE = (0.9642, 1.0, 0.8249)


def srgb_curve(level: Any) -> Any:
    return np.where(level <= 0.04045, level / 12.92, ((level + 0.055) / 1.055) ** 2.4)


def adobe_curve(level: Any) -> Any:
    return level ** (563 / 256)


def profile(space: bytes, tags: dict[bytes, bytes], pcs: bytes = b"XYZ ") -> bytes:
    tags = {b"desc": _desc(b"made for a test"), b"cprt": b"text\0\0\0\0none\0", **tags}
    body, table, at = b"", struct.pack(">I", len(tags)), 128 + 4 + 12 * len(tags)
    for name, data in tags.items():
        data += bytes(-len(data) % 4)
        table += struct.pack(">4sII", name, at + len(body), len(data))
        body += data
    nbytes = at + len(body)
    device = b"prtr" if space == b"CMYK" else b"mntr"
    head = struct.pack(">I4sI4s4s4s", nbytes, b"\0" * 4, 0x02200000, device, space, pcs)
    head += struct.pack(">6H4s", 2026, 1, 1, 0, 0, 0, b"acsp") + bytes(28) + _s15(*WHITE)
    return head.ljust(128, b"\0") + table + body


def _desc(name: bytes) -> bytes:
    return b"desc\0\0\0\0" + struct.pack(">I", len(name) + 1) + name + bytes(1 + 4 + 4 + 2 + 1 + 67)


def _s15(*values: float) -> bytes:
    return (np.array(values) * 65536).round().astype(">i4").tobytes()


def _curve(function: Curve) -> bytes:
    levels = (65535 * function(np.linspace(0, 1, 1024))).round().astype(">u2")
    return b"curv\0\0\0\0" + struct.pack(">I", 1024) + levels.tobytes()


@cache
def rgb_profile(primaries: tuple[tuple[float, ...], ...], function: Curve) -> bytes:
    tags = {b"wtpt": b"XYZ \0\0\0\0" + _s15(*WHITE)}
    for letter, column in zip((b"r", b"g", b"b"), primaries, strict=True):
        tags[letter + b"XYZ"] = b"XYZ \0\0\0\0" + _s15(*column)
        tags[letter + b"TRC"] = _curve(function)
    return profile(b"RGB ", tags)


def grey_profile(gamma: float) -> bytes:
    tags = {b"wtpt": b"XYZ \0\0\0\0" + _s15(*WHITE), b"kTRC": _curve(lambda level: level**gamma)}
    return profile(b"GRAY", tags)


@cache
def cmyk_profile() -> bytes:
    """A printer whose inks are ideal sRGB filters: a lut16 of 5 steps a channel into Lab."""
    inks = np.stack(np.meshgrid(*[np.linspace(0, 1, 5)] * 4, indexing="ij"), axis=-1)
    clut = _lab16((1 - inks[..., :3]) * (1 - inks[..., 3:]))
    line = struct.pack(">2H", 0, 65535)
    head = b"mft2\0\0\0\0" + bytes([4, 3, 5, 0]) + _s15(1, 0, 0, 0, 1, 0, 0, 0, 1)
    lut = head + struct.pack(">2H", 2, 2) + line * 4 + clut + line * 3
    tags = {b"wtpt": b"XYZ \0\0\0\0" + _s15(*WHITE)}
    return profile(b"CMYK", {**tags, b"A2B0": lut, b"A2B1": lut}, b"Lab ")


def _lab16(colours: Any) -> bytes:
    xyz = srgb_curve(colours) @ np.array(SRGB) / WHITE
    x, y, z = np.moveaxis(np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116), -1, 0)
    lab = (116 * y - 16) * 652.8, (500 * (x - y) + 128) * 256, (200 * (y - z) + 128) * 256
    return np.stack(lab, axis=-1).round().clip(0, 65535).astype(">u2").tobytes()


def in_space(primaries: tuple[tuple[float, ...], ...], function: Curve) -> Image.Image:
    """The picture's colours, written in another RGB space, without littlecms."""
    xyz = srgb_curve(np.asarray(picture()) / 255) @ np.array(SRGB)
    light = xyz @ np.linalg.inv(np.array(primaries))
    levels = function(np.arange(256) / 255)
    return Image.fromarray(np.abs(light[..., None] - levels).argmin(axis=-1).astype(np.uint8))


# --- PNG and JPEG, piece by piece ---------------------------------------------------------------


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def raw_png(
    rows: list[bytes], *, size: tuple[int, int] = SIZE, depth: int, kind: int, extra: bytes = b""
) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, depth, kind, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    return b"\x89PNG\r\n\x1a\n" + head + extra + pixels + chunk(b"IEND", b"")


def deep(image: Image.Image) -> Any:
    """16-bit samples, the picture's own times 257."""
    return np.asarray(image).astype(np.uint16) * 257


def deep_rows(image: Image.Image) -> list[bytes]:
    """Rows of big-endian samples."""
    return [row.tobytes() for row in deep(image).astype(">u2")]


def with_chunk(data: bytes, extra: bytes) -> bytes:
    """A PNG with a chunk after its header."""
    return data[:33] + extra + data[33:]


def without_adobe(data: bytes) -> bytes:
    at = data.index(b"\xff\xee")
    return data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4], "big") :]


def png_bomb(side: int = 20_000) -> bytes:
    """Whole and valid: side x side black pixels in about a thousandth of the bytes."""
    deflate = zlib.compressobj(9, wbits=-15)  # raw, so that one block can stand for a hundred
    block = deflate.compress(bytes((1 + 3 * side) * side // 100)) + deflate.flush(zlib.Z_FULL_FLUSH)
    adler = (1 + 3 * side) * side % 65521 << 16 | 1
    packed = b"\x78\xda" + block * 100 + b"\x03\0" + adler.to_bytes(4, "big")
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def gif_bomb() -> bytes:
    """A 1 x 1 screen with a 65,535 x 65,535 frame whose disposal Pillow fills on opening."""
    head = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0, 0, 0)
    control = b"\x21\xf9\x04\x08\0\0\0\0"
    return head + control + b"\x2c" + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0) + b"\x02\0;"


def webp_bomb() -> bytes:
    data = bytearray(saved(with_alpha(picture()), "WEBP", quality=90))
    assert data[12:16] == b"VP8X"
    data[24:30] = (16_382).to_bytes(3, "little") * 2
    return bytes(data)


def tiff(image: Image.Image, **options: object) -> bytes:
    return saved(image, "TIFF", **options)


def damaged_strip() -> bytes:
    """A TIFF of which libtiff has something to say."""
    noise = Image.frombytes("L", (64, 64), random.Random(1).randbytes(64 * 64))
    data = bytearray(tiff(noise, compression="tiff_deflate"))
    middle = len(data) // 2
    data[middle : middle + 100] = bytes(byte ^ 0x5A for byte in data[middle : middle + 100])
    return bytes(data)


def tiff_bomb() -> bytes:
    data = bytearray(tiff(Image.new("L", (64, 64))))
    for tag in (b"\x00\x01", b"\x01\x01"):
        at = data.index(tag, 8)
        data[at + 2 : at + 12] = struct.pack("<HII", 4, 1, 30_000)
    return bytes(data)


def tiled_tiff_bomb() -> bytes:
    """A small picture that says its one tile is huge."""
    data = bytearray(tiff(Image.new("L", (64, 64)), compression="tiff_deflate"))
    for old, new, value in ((278, 322, 60_000), (279, 323, 60_000)):
        at = max(data.rfind(struct.pack("<HHI", old, kind, 1)) for kind in (3, 4))
        data[at : at + 12] = struct.pack("<HHII", new, 4, 1, value)
    return bytes(data)


def deep_tiff(image: Image.Image) -> bytes:
    """16-bit RGB or RGBA, uncompressed, little-endian: Pillow writes none."""
    pixels, bands, out = deep(image).tobytes(), len(image.getbands()), BytesIO()
    tags = TiffImagePlugin.ImageFileDirectory_v2(b"II*\0\0\0\0\0")
    tags[256], tags[257], tags[278] = image.width, image.height, image.height
    tags[258], tags[259], tags[262], tags[277] = (16,) * bands, 1, 2, bands
    tags[273], tags[279] = 0, len(pixels)  # they stand behind the tags
    if bands == 4:
        tags[338] = 2
    tags.save(out)
    return out.getvalue() + pixels


def mpo() -> bytes:
    other = Image.new("RGB", SIZE)
    return saved(picture(), "MPO", save_all=True, append_images=[other], quality=95, subsampling=0)


def animated(kind: str) -> bytes:
    frames = [Image.new("RGB", SIZE, "black")]
    options = {"lossless": True} if kind == "WEBP" else {}
    return saved(picture(), kind, save_all=True, append_images=frames, duration=90, **options)


def palette(*, clear: bool = False) -> bytes:
    image = picture().quantize(8)
    if not clear:
        return saved(image, "PNG")
    index = image.getpixel((SIZE[0] * 3 // 4, SIZE[1] // 4))
    alphas = bytes(0 if i == index else 254 if i == 7 else 255 for i in range(8))
    return saved(image, "PNG", transparency=alphas)


def cut(data: bytes, share: float = 0.6) -> bytes:
    return data[: int(len(data) * share)]


def with_byte(data: bytes, at: int, value: int) -> bytes:
    return data[:at] + bytes([value]) + data[at + 1 :]


def flipped(data: bytes, at: int) -> bytes:
    return with_byte(data, at, data[at] ^ 0xFF)


HTML = b"<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head><body></body></html>\n"


def damaged(data: bytes, turn: int, chance: random.Random) -> bytes:
    """A file that is cut, has other bytes or is blanked in part, by its turn; not at its start."""
    found, at = bytearray(data), chance.randrange(len(data) // 20, len(data))
    if turn % 3 == 0:
        del found[at:]
    elif turn % 3 == 1:
        for _ in range(chance.choice([1, 20])):
            found[chance.randrange(at // 2, len(data))] = chance.randrange(256)
    else:
        found[at : at + 400] = bytes(min(400, len(data) - at))
    return bytes(found)


def _stored(
    data: bytes, changes: str = "", extension: str = "png", tolerance: int = 6, *, flags: str = ""
) -> Case:
    """Return what becomes of a file, if it is not a reject: `flags` may say grey and clear."""
    return Case(
        data=data,
        changes=tuple(changes.split()),
        extension=extension,
        tolerance=tolerance,
        grey="grey" in flags,
        clear="clear" in flags,
    )


def _kept() -> dict[str, Case]:
    p, srgb = picture(), rgb_profile(SRGB, srgb_curve)
    return {
        "jpeg": _stored(jpeg(), "", "jpg"),
        "jpeg-420": _stored(jpeg(subsampling=2), "", "jpg", 12),
        "jpeg-progressive": _stored(jpeg(progressive=True), "", "jpg"),
        "jpeg-grey": _stored(saved(p.convert("L"), "JPEG", quality=95), "", "jpg", flags="grey"),
        "jpeg-mpo": _stored(mpo(), "", "jpg"),
        "jpeg-srgb-profile": _stored(jpeg(icc_profile=srgb), "", "jpg"),
        "jpeg-broken-profile": _stored(jpeg(icc_profile=b"RGB " * 200), "", "jpg"),
        "jpeg-cmyk-profile-on-rgb": _stored(jpeg(icc_profile=cmyk_profile()), "", "jpg"),
        "jpeg-upright": _stored(turned(1), "", "jpg", 12),
        "png": _stored(png()),
        "png-grey": _stored(saved(p.convert("L"), "PNG"), flags="grey"),
        "png-palette": _stored(palette()),
        "png-srgb-profile": _stored(png(icc_profile=srgb)),
        "webp": _stored(saved(p, "WEBP", quality=95), "", "webp", 12),
        "webp-lossless": _stored(saved(p, "WEBP", lossless=True), "", "webp"),
    }


def _turned() -> dict[str, Case]:
    both = "format orientation"
    return {
        **{
            f"jpeg-orientation-{number}": _stored(turned(number), "orientation", "jpg", 12)
            for number in range(2, 9)
        },
        "png-orientation-6": _stored(turned(6, "PNG"), "orientation", "png", 3),
        "webp-orientation-6": _stored(turned(6, "WEBP"), "orientation", "jpg", 12),
        "tiff-orientation-6": _stored(turned(6, "TIFF"), both, "png", 12),
        "avif-orientation-6": _stored(turned(6, "AVIF"), both, "jpg", 12),
    }


def _coloured() -> dict[str, Case]:
    p, ink = picture(), picture().convert("CMYK")
    sharp: dict[str, Any] = {"quality": 95, "subsampling": 0}
    plain = saved(Image.eval(ink, lambda v: 255 - v), "JPEG", quality=95)
    p3, adobe = in_space(P3, srgb_curve), in_space(ADOBE, adobe_curve)
    of_p3 = {"icc_profile": rgb_profile(P3, srgb_curve)}
    of_adobe = {"icc_profile": rgb_profile(ADOBE, adobe_curve)}
    levels = (255 * srgb_curve(np.asarray(p.convert("L")) / 255) ** (1 / 1.8)).round()
    grey = Image.fromarray(levels.astype(np.uint8))
    gamma = saved(grey, "JPEG", quality=95, icc_profile=grey_profile(1.8))
    tagged = saved(ink, "JPEG", quality=95, icc_profile=cmyk_profile())
    return {
        "jpeg-cmyk-adobe": _stored(saved(ink, "JPEG", **sharp), "cmyk", "jpg"),
        "jpeg-cmyk": _stored(without_adobe(plain), "cmyk", "jpg"),
        "jpeg-cmyk-profile": _stored(tagged, "cmyk icc", "jpg", 14),
        "tiff-cmyk": _stored(tiff(ink), "format cmyk"),
        "jpeg-p3": _stored(saved(p3, "JPEG", **sharp, **of_p3), "icc", "jpg"),
        "jpeg-adobe-rgb": _stored(saved(adobe, "JPEG", **sharp, **of_adobe), "icc", "jpg"),
        "png-p3": _stored(saved(p3, "PNG", **of_p3), "icc"),
        "webp-p3": _stored(saved(p3, "WEBP", lossless=True, **of_p3), "icc"),
        "png-p3-alpha": _stored(saved(with_alpha(p3), "PNG", **of_p3), "icc alpha", flags="clear"),
        "jpeg-grey-gamma-1.8": _stored(gamma, "icc", "jpg", flags="grey"),
    }


def _deep() -> dict[str, Case]:
    p, grey = picture(), picture().convert("L")
    wider, alpha, both = "depth", "depth alpha", "format depth"
    fours = (np.asarray(grey) / 17).round().astype(np.uint8)
    low = [row.tobytes() for row in fours[:, ::2] << 4 | fours[:, 1::2]]
    rgb, la = with_alpha(p), with_alpha(p).convert("LA")
    level = grey.getpixel((SIZE[0] * 3 // 4, SIZE[1] // 4))
    assert isinstance(level, int)
    one = chunk(b"tRNS", struct.pack(">H", level * 257))
    four = chunk(b"tRNS", struct.pack(">H", round(level / 17)))
    three = chunk(b"tRNS", struct.pack(">3H", *(v * 257 for v in GREEN)))

    def wide(image: Image.Image, kind: int, extra: bytes = b"") -> bytes:
        return raw_png(deep_rows(image), depth=16, kind=kind, extra=extra)

    plain, clear = raw_png(low, depth=4, kind=0), raw_png(low, depth=4, kind=0, extra=four)
    pgm = b"P5 96 64 65535\n" + b"".join(deep_rows(grey))
    return {
        "png-4-grey": _stored(plain, wider, tolerance=9, flags="grey"),
        "png-4-grey-trns": _stored(clear, alpha, tolerance=9, flags="grey clear"),
        "png-16-rgb": _stored(wide(p, 2), wider),
        "png-16-grey": _stored(wide(grey, 0), wider, flags="grey"),
        "png-16-rgba": _stored(wide(rgb, 6), alpha, flags="clear"),
        "png-16-grey-alpha": _stored(wide(la, 4), alpha, flags="grey clear"),
        "png-16-grey-trns": _stored(wide(grey, 0, one), alpha, flags="grey clear"),
        "png-16-rgb-trns": _stored(wide(p, 2, three), alpha, flags="clear"),
        "tiff-16-grey": _stored(tiff(Image.fromarray(deep(grey))), both, flags="grey"),
        "tiff-16-rgb": _stored(deep_tiff(p), both),
        "tiff-16-rgba": _stored(deep_tiff(rgb), f"{both} alpha", flags="clear"),
        "ppm-16-grey": _stored(pgm, both, flags="grey"),
    }


def _clear() -> dict[str, Case]:
    rgba = with_alpha(picture())
    key = chunk(b"tRNS", struct.pack(">3H", *GREEN))
    grey = saved(rgba.convert("LA"), "PNG")
    return {
        "png-alpha": _stored(saved(rgba, "PNG"), "alpha", flags="clear"),
        "png-grey-alpha": _stored(grey, "alpha", flags="grey clear"),
        "png-palette-trns": _stored(palette(clear=True), "palette alpha", flags="clear"),
        "png-rgb-trns": _stored(with_chunk(png(), key), "alpha", flags="clear"),
        "webp-alpha-lossless": _stored(saved(rgba, "WEBP", lossless=True), "alpha", flags="clear"),
        "webp-alpha": _stored(saved(rgba, "WEBP", quality=95), "alpha", "jpg", 12, flags="clear"),
        "tiff-alpha": _stored(tiff(rgba), "format alpha", flags="clear"),
    }


def _foreign() -> dict[str, Case]:
    p, made = picture(), "format"
    return {
        "gif": _stored(saved(p, "GIF"), "format palette", tolerance=8),
        "gif-animated": _stored(animated("GIF"), "format animation palette", tolerance=8),
        "webp-animated": _stored(animated("WEBP"), "animation alpha"),
        "apng": _stored(animated("PNG"), "animation"),
        "bmp": _stored(saved(p, "BMP"), made),
        "tiff": _stored(tiff(p), made),
        "tiff-lzw": _stored(tiff(p, compression="tiff_lzw"), made),
        "tiff-jpeg": _stored(tiff(p, compression="jpeg", quality=95), made, "jpg", 12),
        "ppm": _stored(saved(p, "PPM"), made),
        "avif": _stored(saved(p, "AVIF", quality=95), made, "jpg", 12),
        "jpeg2000": _stored(saved(p, "JPEG2000"), made, "jpg"),
    }


def _rejected() -> dict[str, Case]:
    idat = png().index(b"IDAT") + 12
    flat = Image.new("RGB", (1, 5000))
    zeros = zlib.compress(bytes(50_000_000))
    bmp, flat_tiff = saved(picture(), "BMP"), tiff(picture())
    colours = flat_tiff.index(struct.pack("<HHI", 262, 3, 1))
    huge_text = chunk(b"zTXt", b"note\0\0" + zeros)
    huge_icc = chunk(b"iCCP", b"icc\0\0" + zeros)
    named = {
        Code.EMPTY: {"empty": b""},
        Code.NOT_AN_IMAGE: {
            "html": HTML,
            "text": b"BM is how this text begins, and P5 is not in it",
            "pdf": b"%PDF-1.7\n%",
            "zeros": bytes(5000),
            "mp4": struct.pack(">I", 24) + b"ftypisom\0\0\0\0isommp41" + bytes(500),
        },
        Code.UNSUPPORTED: {
            "heic": struct.pack(">I", 24) + b"ftypheic\0\0\0\0mif1heic" + bytes(2000),
            "svg": b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>',
            "tiff-float": tiff(Image.new("F", (64, 64))),
            "jpeg-12-bit": with_byte(jpeg(), jpeg().index(b"\xff\xc0") + 4, 12),
            "bmp-13-bit": with_byte(bmp, 28, 13),
            "bmp-of-a-compression": with_byte(bmp, 30, 7),
            "tiff-of-colours": with_byte(flat_tiff, colours + 8, 77),
        },
        Code.TRUNCATED: {
            "jpeg-truncated": cut(jpeg(size=(512, 384), quality=90)),
            "jpeg-truncated-progressive": cut(jpeg(size=(512, 384), progressive=True)),
            "jpeg-truncated-in-header": jpeg()[:100],
            "jpeg-cmyk-truncated": cut(saved(picture((300, 300)).convert("CMYK"), "JPEG")),
            "png-truncated": cut(png()),
            "webp-truncated": cut(saved(picture(), "WEBP")),
            "gif-truncated": cut(animated("GIF"), 0.2),
            "avif-truncated": cut(saved(picture(), "AVIF")),
            "tiff-truncated": cut(tiff(picture())),
            "bmp-truncated": cut(bmp),
            "ppm-truncated": cut(saved(picture(), "PPM")),
        },
        Code.CORRUPT: {
            "png-bad-crc": flipped(png(), 30),
            "png-bad-crc-in-pixels": flipped(png(), png().index(b"IEND") - 5),
            "png-bad-pixels": flipped(png(), idat),
            "png-text-bomb": with_chunk(png(), huge_text),
            "png-icc-bomb": with_chunk(png(), huge_icc),
        },
        Code.TOO_SMALL: {
            "one-by-5000": saved(flat, "PNG"),
            "small": jpeg(size=(31, 100)),
            "small-turned": saved(Image.new("RGB", (200, 16)), "TIFF"),
        },
        Code.ASPECT_RATIO: {"aspect": jpeg(size=(500, 40))},
        Code.TOO_LARGE: {
            "png-bomb": png_bomb(),
            "gif-bomb": gif_bomb(),
            "webp-bomb": webp_bomb(),
            "tiff-bomb": tiff_bomb(),
            "tiff-tile-bomb": tiled_tiff_bomb(),
        },
    }
    return {n: Case(data=d, code=code) for code, files in named.items() for n, d in files.items()}


# Rejects found only by reading the pixels; the header check keeps these files.
DEEP = {
    "jpeg-truncated",
    "jpeg-truncated-progressive",
    "png-bad-crc-in-pixels",
    "png-bad-pixels",
    "png-text-bomb",
}

CASES: dict[str, Case] = {
    **_kept(),
    **_turned(),
    **_coloured(),
    **_deep(),
    **_clear(),
    **_foreign(),
    **_rejected(),
}
