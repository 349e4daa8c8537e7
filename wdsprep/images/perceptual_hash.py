"""A number of 64 bits that says what a picture looks like: copies of it have nearly the same.

1. The picture in grey, drawn into 32 x 32 cells, each the mean of what it covers.
2. Its cosine transform. Of the waves, the 64 longest count, without the mean of all.
3. A bit is set where a wave is stronger than the median of them.

A picture with next to no detail has no hash, which is 0: it would be that of any other one. From
the grey pixels on, all is integers and the same on any machine; how a JPEG becomes grey pixels at
an eighth of its size is libjpeg's, and moves a bit at times. So it does not depend on how Pillow
scales.

Tried on 476 pictures, cut out of 61 photographs and drawings, within 6 bits. Recompressed at
quality 30 it knows 97.1 % of them again, scaled to a half 99.2 %, cropped by 2 % all around 96.8 %,
at one corner 88.4 %; and takes none of 113,050 pairs of different pictures for a copy, nor within
10 bits. The best of `imagehash` 4.3, its `phash`, has 96.6, 98.5, 95.2 and 84.7 %, and one pair
within 10 bits. Signs of differences know as many again, and take 137 pairs for copies where there
are of rows and columns, 451 as `imagehash.dhash`; its `average_hash` 634. To be looked at again
when crops of more than 2 % matter: of 5 %, it knows 69.7 %.
"""

import math
from functools import cache

import numpy
from numpy.typing import NDArray

from wdsprep.images import formats

VERSION = 1
"""The version of the definition: hashes of another one cannot be compared with these."""
NBITS = 64
NO_HASH = 0
_CELLS, _WAVES = 32, 9
_LEAST_SIDE = 64  # pixels that a JPEG is decoded to, at least
_FINE = 16  # steps in a level of grey
_COSINE = 1 << 12  # what stands for 1
_LEAST_DETAIL = 2  # levels that cells differ by: their standard deviation

Cells = NDArray[numpy.int64]


def hash_image(data: bytes) -> tuple[int, int, int]:
    """Return the hash, the width and the height of an upright image.

    A cell is the mean grey of what it covers, in sixteenths of a level. The sums are whole numbers
    below 2^53: floats hold them exactly, in whatever order they are added. Raise RejectedError if
    the image is damaged.
    """
    kind = formats.identify(data)
    with formats.quiet:
        image = formats.open_image(data, kind)
        width, height = image.size
        if kind == "JPEG":
            shrink = max(1, min(width, height) // _LEAST_SIDE)
            image.draft("L", (width // shrink, height // shrink))
        grey = formats.load(image, kind).convert("L")
    scale = round(width / grey.width)
    if kind != "JPEG":
        scale = max(1, min(width, height) // (2 * _LEAST_SIDE))
        grey = grey.reduce(scale)
    # A pixel stands for `scale` pixels of the picture each way, the last one for those left.
    pixels = numpy.asarray(grey, dtype=numpy.float64)
    sums = _shares(height, scale) @ pixels @ _shares(width, scale).T
    cells: Cells = sums.astype(numpy.int64) * _FINE // (width * height)
    mean = int(cells.sum()) // cells.size
    if int(((cells - mean) ** 2).sum()) < cells.size * (_LEAST_DETAIL * _FINE) ** 2:
        return NO_HASH, width, height
    waves = _cosines() @ cells @ _cosines().T
    longest = [int(waves[row, column]) for row, column in _order()]
    middle = sorted(longest)[NBITS // 2 - 1]
    bits = sum((wave > middle) << bit for bit, wave in enumerate(longest))
    return bits, width, height


@cache
def _shares(length: int, scale: int) -> NDArray[numpy.float64]:
    """Return a matrix of cells by pixels: how much of each pixel of a line lies in each cell.

    It counts in parts of a pixel of the picture, of which a pixel has _CELLS. `length` is the side
    of the picture along the line. A pixel of the line stands for `scale` pixels of the picture.
    """
    pixels = numpy.minimum(numpy.arange(-(-length // scale) + 1) * scale, length) * _CELLS
    cells = numpy.arange(_CELLS + 1)[:, None] * length
    ends = numpy.minimum(pixels[1:], cells[1:])
    shares = numpy.maximum(ends - numpy.maximum(pixels[:-1], cells[:-1]), 0)
    as_floats: NDArray[numpy.float64] = shares.astype(numpy.float64)
    return as_floats


@cache
def _cosines() -> Cells:
    steps = [
        [math.cos(math.pi * (2 * at + 1) * wave / (2 * _CELLS)) for at in range(_CELLS)]
        for wave in range(_WAVES)
    ]
    return numpy.array([[round(_COSINE * step) for step in row] for row in steps])


@cache
def _order() -> list[tuple[int, int]]:
    """Return the rows and columns of the 64 longest waves of the transform, the longest first.

    The mean of all cells, which is no wave, is left out.
    """
    waves = [(row, column) for row in range(_WAVES) for column in range(_WAVES)]
    return sorted(waves, key=lambda wave: (sum(wave), wave))[1 : NBITS + 1]
