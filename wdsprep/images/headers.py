"""What an image file says about itself before a pixel is decoded: its name, its header, its EXIF.

Most of a download can be kept as it came, and its header tells so. Pillow's plugins need 30 to
80 µs for that, warn, inflate text chunks and may allocate the canvas; the walks here need 10 to
20 µs and allocate nothing, whatever size a header claims. They read the formats that can be kept
(JPEG, PNG, WebP) and GIF, whose plugin allocates when it opens. The others are left to theirs.

An image is turned upright by its EXIF alone. Pillow also believes XMP's `tiff:Orientation`, which
neither browsers nor torchvision do: a picture kept must mean the same to whoever reads it later.
"""

import struct
import zlib
from typing import Any, NamedTuple

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError

MAX_PROFILE_NBYTES = 1 << 20  # inflated; Pillow's bound too, so that the two agree

_PNG_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_SEGMENT = struct.Struct(">HH")
_TABLES = frozenset({0xFFDB, 0xFFC4, 0xFFE0, 0xFFFE})  # for decoding, of JFIF, and comments
_JPEG_MODES = {1: "L", 3: "RGB", 4: "CMYK"}


class Header(NamedTuple):
    """An image as its file declares it; width and height are as coded, before orientation."""

    format: str
    width: int
    height: int
    mode: str = "RGB"  # of the colour, without alpha: L, RGB or CMYK
    depth: int = 8  # bits a sample
    orientation: int = 1
    profile: bytes | None = None
    lossy: bool = False
    adobe: bool = False  # JPEG: the Adobe marker is there
    needs: tuple[str, ...] = ()  # why the bytes cannot be kept, orientation and profile aside
    damage: tuple[Code, str] | None = None  # found on the way; reported after the limits


def read_jpeg(data: bytes) -> Header:
    """Read the header of a JPEG, which ends at the first scan.

    Bytes between segments are skipped, as libjpeg does. Raise RejectedError if there is no usable
    frame header. Other damage is not raised: it is in the field `damage`.
    """
    frame: tuple[int, bytes] | None = None
    exif, chunks, adobe = b"", [], False
    damage: tuple[Code, str] | None = None
    at, end = 2, len(data)
    while True:
        at = data.find(b"\xff", _past_tables(data, at))
        if at < 0 or at + 4 > end:
            damage = Code.TRUNCATED, "ends before the first scan"
            break
        marker = data[at + 1]
        if marker in (0xFF, 0, 1) or 0xD0 <= marker <= 0xD7:
            at += 1 if marker == 0xFF else 2
            continue
        nbytes = data[at + 2] << 8 | data[at + 3]
        start, at = at + 4, at + 2 + nbytes
        if nbytes < 2 or marker in (0xD8, 0xD9):
            damage = Code.CORRUPT, f"marker {marker:02x} out of place"
            break
        if at > end:
            damage = Code.TRUNCATED, "ends before the first scan"
            break
        if marker == 0xDA:
            break
        if marker == 0xE1 and not exif and data.startswith(b"Exif\0\0", start):
            exif = data[start:at]
        elif marker == 0xE2 and data.startswith(b"ICC_PROFILE\0", start):
            chunks.append(data[start + 12 : at])
        elif marker == 0xEE and data.startswith(b"Adobe", start):
            adobe = True
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            if frame:
                damage = Code.CORRUPT, "two frame headers"
                break
            frame = marker, data[start:at]
    if frame is None:
        raise RejectedError(*(damage or (Code.CORRUPT, "a scan without a frame header")))
    profile = None
    if chunks:
        chunks.sort(key=lambda chunk: chunk[:1])
        if len(chunks[0]) > 1 and chunks[0][1] == len(chunks):  # as they are numbered
            profile = b"".join(chunk[2:] for chunk in chunks)
    return _read_frame(
        *frame,
        orientation=orientation(exif) if exif else 1,
        profile=profile,
        adobe=adobe,
        damage=damage,
    )


def _past_tables(data: bytes, at: int) -> int:
    """Return the offset behind the segments from `at` on that say nothing about the whole image.

    These are tables, the JFIF header and comments. The first segment of another kind ends the run.
    """
    end = len(data) - _SEGMENT.size
    while at <= end:
        marker, nbytes = _SEGMENT.unpack_from(data, at)
        if marker not in _TABLES or nbytes < 2:
            break
        at += 2 + nbytes
    return at


def _read_frame(marker: int, frame: bytes, **facts: Any) -> Header:
    """Return the header of a JPEG, given its frame header and the facts in other segments."""
    if len(frame) < 6 or len(frame) < 6 + 3 * frame[5]:
        raise RejectedError(Code.CORRUPT, "the frame header is too short")
    bits, height, width, layers = struct.unpack_from(">BHHB", frame)
    if not width or not height:
        raise RejectedError(Code.CORRUPT, f"the header says {width} x {height}")
    if bits != 8 or layers not in _JPEG_MODES:
        raise RejectedError(Code.UNSUPPORTED, f"a JPEG of {layers} layers of {bits} bits")
    mode = _JPEG_MODES[layers]
    # Arithmetic coding and lossless JPEG: decoders vary, so what can be decoded here is converted.
    common = marker <= 0xC2
    return Header(
        format="JPEG",
        width=width,
        height=height,
        mode=mode,
        lossy=True,
        needs=(() if common else ("format",)) + (("cmyk",) if mode == "CMYK" else ()),
        **facts,
    )


def read_png(data: bytes) -> Header:
    """Read the header of a PNG, and check all checksums but those of its pixels (`check_png`).

    Raise RejectedError if the first chunk is damaged or the colour profile is too large. Damage of
    later chunks is not raised: it is in the field `damage`.
    """
    if len(data) < 33:
        raise RejectedError(Code.TRUNCATED, "ends before its header")
    width, height, depth, kind, _, _, _ = struct.unpack_from(">IIBBBBB", data, 16)
    if data[12:16] != b"IHDR" or not _crc_holds(data, 8, 13):
        raise RejectedError(Code.CORRUPT, "bad header checksum")
    has_size = 0 < min(width, height) <= max(width, height) < 1 << 31
    if depth not in _PNG_DEPTHS.get(kind, ()) or not has_size:
        raise RejectedError(Code.CORRUPT, f"{width} x {height} of depth {depth} and type {kind}")
    found, damage = _png_chunks(data)
    if damage is None and (b"IDAT" not in found or (kind == 3 and b"PLTE" not in found)):
        damage = Code.CORRUPT, "no pixels or no palette"
    checks = {
        "animation": b"acTL" in found,
        "depth": depth == 16 or (kind == 0 and depth < 8),
        "alpha": kind in (4, 6) or b"tRNS" in found,
    }
    return Header(
        format="PNG",
        width=width,
        height=height,
        mode="L" if kind in (0, 4) else "RGB",
        depth=8 if kind == 3 else depth,
        orientation=orientation(found.get(b"eXIf", b"")),
        profile=_inflate_profile(found.get(b"iCCP", b"")),
        needs=tuple(name for name, needed in checks.items() if needed),
        damage=damage,
    )


def _png_chunks(data: bytes) -> tuple[dict[bytes, bytes], tuple[Code, str] | None]:
    found: dict[bytes, bytes] = {}
    at = 33
    while at + 12 <= len(data):
        nbytes, name = struct.unpack_from(">I4s", data, at)
        if at + 12 + nbytes > len(data):
            break
        if name == b"IEND":
            return found, None
        if name == b"IDAT":
            found[name] = b""
        elif not _crc_holds(data, at, nbytes):
            return found, (Code.CORRUPT, f"bad checksum in {name.decode('latin-1')!a}")
        elif name in (b"PLTE", b"tRNS", b"iCCP", b"eXIf", b"acTL"):
            found.setdefault(name, data[at + 8 : at + 8 + nbytes])
        at += 12 + nbytes
    return found, (Code.TRUNCATED, "ends before its last chunk")


def check_png(data: bytes) -> None:
    """Check the checksums of a PNG's pixels, which Pillow ignores when it decodes.

    Raise RejectedError if one is wrong. The PNG must have all its chunks, as `read_png` finds out.
    """
    at = 33
    while True:
        nbytes, name = struct.unpack_from(">I4s", data, at)
        if name == b"IEND":
            return
        if name == b"IDAT" and not _crc_holds(data, at, nbytes):
            raise RejectedError(Code.CORRUPT, "bad checksum in 'IDAT'")
        at += 12 + nbytes


def _crc_holds(data: bytes, at: int, nbytes: int) -> bool:
    end = at + 8 + nbytes
    return zlib.crc32(memoryview(data)[at + 4 : end]) == int.from_bytes(data[end : end + 4], "big")


def _inflate_profile(chunk: bytes) -> bytes | None:
    """Decompress the profile in an iCCP chunk, or return None if there is none or it is broken.

    Raise RejectedError if the profile is larger than `MAX_PROFILE_NBYTES`; no more than that is
    decompressed.
    """
    packed = chunk.partition(b"\0")[2][1:]
    if not packed:
        return None
    inflate = zlib.decompressobj()
    try:
        profile = inflate.decompress(packed, MAX_PROFILE_NBYTES)
    except zlib.error:
        return None
    if inflate.unconsumed_tail:
        raise RejectedError(Code.CORRUPT, "a colour profile of over 1 MB")
    return profile


def read_webp(data: bytes) -> Header:
    found: dict[bytes, bytes] = {}
    end = 8 + int.from_bytes(data[4:8], "little")
    at = 12
    while at + 8 <= min(end, len(data)):
        name, nbytes = struct.unpack_from("<4sI", data, at)
        # What decides is at the front of the pixels; an EXIF chunk or a profile is taken whole.
        kept = nbytes if name in (b"EXIF", b"ICCP") else 32
        found.setdefault(name, data[at + 8 : at + 8 + min(kept, nbytes)])
        at += 8 + nbytes + (nbytes & 1)
    width, height = _webp_size(found)
    flags = (found.get(b"VP8X") or b"\0")[0]
    lossless = found.get(b"VP8L", b"")
    if b"ANMF" in found:
        lossless = found[b"ANMF"][24:] if found[b"ANMF"][16:20] == b"VP8L" else b""
    checks = {
        "animation": bool(flags & 0x02) or b"ANMF" in found,
        "alpha": bool(flags & 0x10) or bool(len(lossless) > 4 and lossless[4] & 0x10),
    }
    return Header(
        format="WEBP",
        width=width,
        height=height,
        orientation=orientation(found.get(b"EXIF", b"")),
        profile=found.get(b"ICCP"),
        lossy=not lossless,
        needs=tuple(name for name, needed in checks.items() if needed),
        damage=(Code.TRUNCATED, "shorter than its header says") if end > len(data) else None,
    )


def _webp_size(found: dict[bytes, bytes]) -> tuple[int, int]:
    extended, lossy, lossless = (found.get(name, b"") for name in (b"VP8X", b"VP8 ", b"VP8L"))
    if len(extended) >= 10:
        sides = extended[4:7], extended[7:10]
        width, height = (1 + int.from_bytes(side, "little") for side in sides)
        return width, height
    if len(lossy) >= 10 and lossy[3:6] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", lossy, 6)
        if width & 0x3FFF and height & 0x3FFF:
            return width & 0x3FFF, height & 0x3FFF
    if len(lossless) >= 5 and lossless[0] == 0x2F:
        bits = int.from_bytes(lossless[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    raise RejectedError(Code.CORRUPT, "no WebP frame header")


def gif_size(data: bytes) -> tuple[int, int]:
    """Return the size of a GIF: that of its screen, widened to its first frame.

    Pillow widens it so when it opens a GIF.
    """
    try:
        width, height, flags = struct.unpack_from("<HHB", data, 6)
        at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
        while data[at] == 0x21:
            at += 2
            while data[at]:
                at += 1 + data[at]
            at += 1
        mark, left, top, wide, high = struct.unpack_from("<BHHHH", data, at)
    except (IndexError, struct.error):
        raise RejectedError(Code.TRUNCATED, "ends before its first frame") from None
    if mark != 0x2C:
        raise RejectedError(Code.CORRUPT, "no frame where one should be")
    return max(width, left + wide), max(height, top + high)


TURNS = {  # what Pillow calls the way back
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


def orientation(exif: bytes) -> int:
    """Return the orientation in EXIF, 1 (upright) if there is none that makes sense."""
    tiff = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return 1
    try:
        (ifd,) = struct.unpack_from(order + "I", tiff, 4)
        (count,) = struct.unpack_from(order + "H", tiff, ifd)
        for at in range(ifd + 2, ifd + 2 + 12 * count, 12):
            tag, kind = struct.unpack_from(order + "HH", tiff, at)
            if tag == 0x0112:
                (value,) = struct.unpack_from(order + ("I" if kind == 4 else "H"), tiff, at + 8)
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


IMAGES = frozenset(
    {"jpg", "jpeg", "jpe", "jfif", "png", "apng", "webp", "gif", "bmp", "dib", "tif", "tiff"}
    | {"avif", "heic", "heif", "jp2", "j2k", "jpf", "jpx", "mpo", "pbm", "ppm", "pgm", "pnm"}
)
OTHER_IMAGES = frozenset(
    {"jxl", "jxr", "fli", "flc", "svg", "svgz", "ico", "cur", "icns", "psd", "psb", "tga", "pcx"}
    | {"dds", "exr", "hdr", "qoi", "eps", "sgi", "xbm", "xpm", "xcf", "wmf", "emf", "dcm", "fits"}
    | {"djvu", "bpg", "hif", "dng", "cr2", "cr3", "crw", "nef", "arw", "orf", "raf", "rw2", "pef"}
)
"""Extensions of images that nobody decodes here. A file may be another kind by its first bytes; if
not, it is a reject."""
