"""The shapes that a user names: SDXL's, all near the area of a resolution, or those of a file.

The name becomes a list of widths and heights before anything else is done, and the settings store
that list. Each shape has between `LEAST_AREA` and `MOST_AREA` of the pixels of the resolution's
square, so that training steps of all shapes take about equally long.
"""

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

from wdsprep.dataset.shapes import Size, shape_name
from wdsprep.errors import UsageError
from wdsprep.images.nearest_shape import Shapes
from wdsprep.store.base import expand_home
from wdsprep.text import brief, shortened

ShapesGiven = str | os.PathLike[str] | Iterable[Size]
"""`sdxl`, `nearest:STEP,MAX`, a file with a shape in each line, or widths and heights."""
SDXL_RESOLUTION = 1024
SDXL_SIDES, SDXL_LEAST_AREA = range(512, 2049, 64), 0.9
"""The sides of the shapes that SDXL was trained with, and the least share of the square's area."""
SDXL_LACKS = (704, 1344)
"""Its paper has all of them both ways round but this one, which is there as the wide one alone."""
LEAST_AREA, MOST_AREA = Fraction(1, 2), Fraction(13, 10)
MOST_RATIO = 16
MOST_SHAPES = 512
"""The most shapes of a list. Each receipt has all of them, which take 6 kB."""
LINE = re.compile(r"([1-9]\d{0,5})\s*[xX]\s*([1-9]\d{0,5})")
NEAREST = re.compile(r"nearest:([1-9]\d{0,5}),([1-9]\d?(?:\.\d{1,6})?)")
KINDS = "sdxl, nearest:STEP,MAX, or a file with lines such as 832x1216"


def check_shapes_option(given: Any) -> ShapesGiven:
    """Return a value of --shapes; raise UsageError if it is not a name, a path or an iterable.

    An iterable becomes a tuple. Names and sizes are checked later, by `sizes_of`.
    """
    if isinstance(given, str | os.PathLike):
        return given
    if not isinstance(given, Iterable) or isinstance(given, bytes | Mapping):
        raise UsageError(f"--shapes {brief(given)}: give {KINDS}")
    return tuple(tuple(size) if isinstance(size, list) else size for size in given)


def sizes_of(given: ShapesGiven, resolution: int, *, what: str = "") -> tuple[Size, ...]:
    """Return the shapes that a value of --shapes stands for, from the tallest to the widest.

    A file is read, and an empty value has no shapes. Raise UsageError if the file cannot be read,
    or if the shapes do not fit the resolution; messages call the value `what`.
    """
    if not given:
        return ()
    if not isinstance(given, str | os.PathLike):
        return _check_shapes(given, resolution, what or "--shapes")
    text = os.fspath(given)
    what = what or f"--shapes {shortened(text)}"
    sizes: Iterable[Any]
    if text == "sdxl":
        areas = range(math.ceil(SDXL_LEAST_AREA * SDXL_RESOLUTION**2), SDXL_RESOLUTION**2 + 1)
        every = product(SDXL_SIDES, SDXL_SIDES)
        sizes = [size for size in every if math.prod(size) in areas and size != SDXL_LACKS]
    elif text.startswith("nearest:"):
        sizes = _nearest_shapes(text, resolution, what)
    else:
        sizes = _read_shapes(Path(text), what)
    return _check_shapes(sizes, resolution, what)


def _nearest_shapes(text: str, resolution: int, what: str) -> Iterator[Size]:
    """Yield the shapes of `nearest:STEP,MAX`: multiples of STEP with about the square's area.

    For each longer side, the shorter one is as long as it can be with no more pixels than the
    square. If two shapes have one ratio, only the larger is yielded.
    """
    match = NEAREST.fullmatch(text)
    if match is None:
        raise UsageError(f"{what}: write nearest:STEP,MAX, such as nearest:64,4")
    step, most = int(match[1]), Fraction(match[2])
    by_ratio: dict[Fraction, Size] = {}
    for long in range(resolution, resolution**2 // step + 1, step):
        short = resolution**2 // long // step * step
        if long > most * short:
            break
        for size in ((short, long), (long, short)):
            ratio = Fraction(*size)
            by_ratio[ratio] = max(by_ratio.get(ratio, size), size)
    yield from by_ratio.values()


def _read_shapes(path: Path, what: str) -> Iterator[Size | str]:
    """Yield the shapes in the lines of a file, and each line that is none as it is."""
    try:
        lines = expand_home(path).read_text("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"{what} cannot be read ({reason}): give {KINDS}") from None
    for line in lines:
        if text := line.partition("#")[0].strip():
            match = LINE.fullmatch(text)
            yield (int(match[1]), int(match[2])) if match else text


def _check_shapes(sizes: Iterable[Any], resolution: int, what: str) -> tuple[Size, ...]:
    """Return the shapes from the tallest to the widest, or raise UsageError if they cannot be used.

    The square of the resolution must be among them, each must have about the square's area, and no
    ratio may come twice. `what` names the shapes in messages.
    """
    shapes = list(sizes)
    for size in shapes:
        is_pair = isinstance(size, tuple) and len(size) == 2
        if not is_pair or not all(type(side) is int and side > 0 for side in size):
            raise UsageError(f"{what}: {brief(size)} is not a width and a height, as 832x1216 is")
    if len(shapes) > MOST_SHAPES:
        raise UsageError(f"{what} has {len(shapes):,} shapes: give {MOST_SHAPES} at most")
    if (resolution, resolution) not in shapes:
        raise UsageError(
            f"{what} lacks {shape_name((resolution, resolution))}, the square of --resolution "
            f"{resolution}: add it, or give nearest:STEP,MAX with a STEP that divides {resolution}"
        )
    by_ratio: dict[Fraction, str] = {}
    for size in shapes:
        name, ratio = shape_name(size), Fraction(*size)
        share = Fraction(math.prod(size), resolution**2)
        if max(ratio, 1 / ratio) > MOST_RATIO or not LEAST_AREA <= share <= MOST_AREA:
            raise UsageError(
                f"{what} has {name}: give shapes of at most {MOST_RATIO} to 1, with "
                f"{float(LEAST_AREA)} to {float(MOST_AREA)} of the pixels of --resolution "
                f"{resolution}"
            )
        if other := by_ratio.get(ratio):
            raise UsageError(f"{what} has one ratio twice, {other} and {name}: leave one out")
        by_ratio[ratio] = name
    return Shapes(tuple(shapes)).sizes
