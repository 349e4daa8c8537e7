"""How an image is turned upright, by its EXIF alone.

Pillow also believes XMP's `tiff:Orientation`, which neither browsers nor torchvision do: a picture
kept must mean the same to whoever reads it later.
"""

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

TURNS = {  # what Pillow calls the way back
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


def turn_upright(image: "Image.Image", orientation: int) -> "Image.Image":
    """Return an upright copy of an image that is stored with this EXIF orientation, from 2 to 8."""
    from PIL import Image

    return image.transpose(Image.Transpose[TURNS[orientation]])


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
