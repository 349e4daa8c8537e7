"""The shapes that a user names: SDXL's, all near the area of a resolution, or those of a file.

The name becomes a list of widths and heights before anything else is done, and the settings store
that list. Each shape has between `LEAST_AREA` and `MOST_AREA` of the pixels of the resolution's
square, so that training steps of all shapes take about equally long.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from wdsprep.dataset.shapes import Size, shape_name
from wdsprep.errors import UsageError
from wdsprep.images.nearest_shape import Shapes
from wdsprep.store.base import expand_home
from wdsprep.text import brief, real_number, shortened

ShapesGiven = str | os.PathLike[str] | Iterable[Size]
"""`sdxl`, `nearest:STEP,MAX`, a file with a shape in each line, or widths and heights."""
SDXL_RESOLUTION = 1024
# Those that SDXL was trained with: the longer sides that go with a shorter one. Its paper has all
# both ways round but 1344 x 704, which is there as the wide one alone.
SDXL_SIDES = {
    512: (1856, 1920, 1984, 2048),
    576: (1664, 1728, 1792),
    640: (1536, 1600),
    704: (1344, 1408, 1472),
    768: (1280, 1344),
    832: (1152, 1216),
    896: (1088, 1152),
    960: (1024, 1088),
}
SDXL_LACKS = (704, 1344)
LEAST_AREA, MOST_AREA = Fraction(1, 2), Fraction(13, 10)
MOST_RATIO = 16
SHOWN = 4
MOST_SHAPES = 512
"""The most shapes of a list. Each receipt has all of them, which take 6 kB."""
LINE = re.compile(r"([1-9]\d{0,5})\s*[xX]\s*([1-9]\d{0,5})")
NEAREST = re.compile(r"nearest:(\d{1,6}),(\d{1,6}(?:\.\d{1,6})?)")
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
    if not isinstance(given, str | os.PathLike):
        given = tuple(given)
        return _check_shapes(given, resolution, what or "--shapes") if given else ()
    if not (text := os.fspath(given)):
        return ()
    what = what or f"--shapes {shortened(text)}"
    if text == "sdxl":
        sizes = list(_sdxl_shapes(resolution, what))
    elif text.startswith("nearest:"):
        sizes = list(_nearest_shapes(text, resolution, what))
    else:
        sizes = list(_read_shapes(Path(text), what))
    return _check_shapes(sizes, resolution, what)


def check_one_resolution(given: ShapesGiven, resolutions: Sequence[int]) -> None:
    """Raise UsageError if one list of shapes is given for several resolutions.

    `nearest` makes a list for each resolution.
    """
    is_rule = isinstance(given, str) and (not given or given.startswith("nearest:"))
    if len(resolutions) > 1 and not is_rule and given != ():
        raise UsageError(
            f"--shapes {given} is a list for one resolution, and there are {len(resolutions)}: "
            "give nearest:STEP,MAX, which makes a list for each"
        )


def check_max_crop(given: Any) -> float:
    """Check that a value of --max-crop is a part of an area, and return it."""
    if not 0 < real_number("--max-crop", given) <= 1:
        raise UsageError(f"--max-crop {brief(given)}: give a part of the area, above 0 and up to 1")
    return float(given)


def _sdxl_shapes(resolution: int, what: str) -> Iterator[Size]:
    if resolution != SDXL_RESOLUTION:
        raise UsageError(
            f"{what} is for --resolution {SDXL_RESOLUTION}: for {resolution} give "
            "nearest:STEP,MAX, which makes such a list"
        )
    yield resolution, resolution
    for short, longs in SDXL_SIDES.items():
        for long in longs:
            yield from (size for size in ((short, long), (long, short)) if size != SDXL_LACKS)


def _nearest_shapes(text: str, resolution: int, what: str) -> Iterator[Size]:
    """Yield the shapes of `nearest:STEP,MAX`: multiples of STEP with about the square's area.

    For each longer side, the shorter one is as long as it can be with no more pixels than the
    square. If two shapes have one ratio, only the larger is yielded.
    """
    match = NEAREST.fullmatch(text)
    if match is None:
        raise UsageError(f"{what}: write nearest:STEP,MAX, such as nearest:64,4")
    step, most = int(match[1]), Fraction(match[2])
    if not step or resolution % step:
        raise UsageError(
            f"{what} would lack the square, as --resolution {resolution} is not a "
            f"multiple of {step}: give another STEP"
        )
    if not 1 <= most <= MOST_RATIO:
        raise UsageError(f"{what}: give ratios from 1 to {MOST_RATIO}")
    found: dict[Fraction, Size] = {}
    for long in range(resolution, resolution**2 // step + 1, step):
        short = resolution**2 // long // step * step
        if long > most * short:
            break
        for size in ((short, long), (long, short)):
            ratio = Fraction(*size)
            found[ratio] = max(found.get(ratio, size), size)
    yield from found.values()


def _read_shapes(path: Path, what: str) -> Iterator[Size]:
    try:
        lines = expand_home(path).read_text("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"{what} cannot be read ({reason}): give {KINDS}") from None
    for number, line in enumerate(lines, 1):
        if not (text := line.partition("#")[0].strip()):
            continue
        match = LINE.fullmatch(text)
        if match is None:
            raise UsageError(
                f"{what}: line {number}, {text[:40]!r}, is not a shape such as 832x1216"
            )
        yield int(match[1]), int(match[2])


def _check_shapes(sizes: Iterable[Any], resolution: int, what: str) -> tuple[Size, ...]:
    """Return the shapes from the tallest to the widest, or raise UsageError if they cannot be used.

    The square of the resolution must be among them, each must have about the square's area, and no
    ratio may come twice. `what` names the shapes in messages.
    """
    shapes: list[Size] = []
    for size in sizes:
        try:
            width, height = size
        except (TypeError, ValueError):
            width = height = 0
        if not all(type(side) is int and side > 0 for side in (width, height)):
            raise UsageError(f"{what}: {brief(size)} is not a width and a height")
        shapes.append((width, height))
    if not shapes:
        raise UsageError(f"{what} lists no shape: write one in each line, such as 832x1216")
    if len(shapes) > MOST_SHAPES:
        raise UsageError(f"{what} has {len(shapes):,} shapes: give {MOST_SHAPES} at most")
    if (resolution, resolution) not in shapes:
        square = shape_name((resolution, resolution))
        raise UsageError(f"{what} lacks {square}, the square of --resolution {resolution}: add it")
    by_ratio: dict[Fraction, str] = {}
    for width, height in shapes:
        name, ratio = shape_name((width, height)), Fraction(width, height)
        share = Fraction(width * height, resolution**2)
        if not LEAST_AREA <= share <= MOST_AREA:
            raise UsageError(
                f"{what} has {name}, with {float(share):.2f} of the pixels of --resolution "
                f"{resolution}: give shapes of {float(LEAST_AREA)} to {float(MOST_AREA)}"
            )
        if max(ratio, 1 / ratio) > MOST_RATIO:
            raise UsageError(
                f"{what} has {name}, which is more than {MOST_RATIO} to 1: leave it out"
            )
        if other := by_ratio.get(ratio):
            raise UsageError(f"{what} has one ratio twice, {other} and {name}: leave one out")
        by_ratio[ratio] = name
    return Shapes.from_sizes(shapes).sizes
