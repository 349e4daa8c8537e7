"""Pixels in no format, as MDS keeps images of Pillow: they become a PNG, which loses none."""

import io
import struct

from PIL import Image

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError

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
    out = io.BytesIO()
    found = image.convert("RGB") if mode in AS_RGB else image
    found.save(out, "PNG", compress_level=1)
    return out.getvalue()
