"""The shapes of a dataset and its buckets: which sizes its images have.

Shapes are sizes in pixels, of which each sample has one. Without a list of shapes all are squares
of the resolution. Where there is one, the samples of a shape stand together in each shard, shapes
in the order of the list, and the shard's receipt counts them by the shape's name. Shapes differ in
their latents alone; the layout is the square's.

A bucket is named by the smallest shorter side it takes: of (256, 512), `256` holds [256, 512) and
`512` holds 512 and up. Phase 256 trains on both, phase 512 on the second alone, and phase 1024 on
those images of the second that are large enough.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import groupby
from math import ceil
from typing import Any

from wdsprep.dataset.npy_arrays import FLIPPED, LATENT, Field, fields_of
from wdsprep.dataset.samples import role_of
from wdsprep.errors import FormatError, UsageError
from wdsprep.text import shortened

Size = tuple[int, int]
"""A width and a height."""


def shape_name(size: Size) -> str:
    """Return the name of a shape, such as 832x1216, the width first."""
    width, height = size
    return f"{width}x{height}"


def shapes_of(settings: Mapping[str, Any]) -> tuple[Size, ...]:
    """Return the shapes in the settings of a dataset, or none if all samples are squares."""
    return tuple((width, height) for width, height in settings.get("shapes", ()))


def fields_in_shape(
    settings: Mapping[str, Any],
    size: Size | None,
    role_sizes: Mapping[str, Size | None] | None = None,
) -> tuple[Field, ...]:
    """Return the arrays of a sample of this shape, or of the square without one.

    `role_sizes` has the sizes of its images in roles by their names, such as `source_1`, or None
    for the square. The sides of a latent are in the proportion of its pixels to the square's.
    """

    def shaped(field: Field, size: Size | None) -> Field:
        if size is None:
            return field
        *channels, high, wide = field.shape
        resolution = settings["resolution"]
        sides = [divmod(n * of, resolution) for n, of in zip(size[::-1], (high, wide), strict=True)]
        if any(rest or not cells for cells, rest in sides):
            raise FormatError(f"latents of {shape_name(size)} have no whole number of cells a side")
        return replace(field, shape=(*channels, *(cells for cells, _ in sides)))

    arrays: list[Field] = []
    for role, lines in groupby(fields_of(settings["layout"]), lambda field: field.role):
        fields = [*lines]
        if not role or role_sizes is None:
            arrays += [shaped(f, size if f.name in (LATENT, FLIPPED) else None) for f in fields]
            continue
        for name, size_in_role in role_sizes.items():
            if role_of(name)[0] == role:
                in_role = [shaped(field, size_in_role) for field in fields]
                arrays += [replace(f, name=f.name.replace(role, name, 1)) for f in in_role]
    return tuple(arrays)


def fields_by_shape(settings: Mapping[str, Any]) -> dict[str, tuple[Field, ...]]:
    """Return the arrays of a sample of each shape, by its name, in the order of the list."""
    return {shape_name(size): fields_in_shape(settings, size) for size in shapes_of(settings)}


def cut_size(facts: Mapping[str, Any]) -> Size:
    """Return the size of the crop in a sample's json; (0, 0) if it has none."""
    crop = facts.get("crop")
    if not isinstance(crop, list) or len(crop) != 4 or {*map(type, crop)} != {int}:
        return 0, 0
    left, top, right, bottom = crop
    return right - left, bottom - top


def shape_counts(settings: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, int]:
    """Return how many samples each shape has in `counts`, in the order of the list of shapes.

    Shapes without samples are left out.
    """
    names = map(shape_name, shapes_of(settings))
    return {name: counts[name] for name in names if counts.get(name)}


USUAL_BATCH = 64
"""The global batch that examples name, where a dataset is large enough."""


def batch_that_fits(settings: Mapping[str, Any], counts: Mapping[str, int], samples: int) -> int:
    """Return the global batch for an example command: `USUAL_BATCH`, or less if samples are few.

    It is a power of two of which an epoch has five batches or more, if there are samples enough.
    With shapes it is at most the number of samples in the largest one, so that no batch needs a
    sample twice.
    """
    of_one_shape = shape_counts(settings, counts).values()  # as a batch is
    most = min(USUAL_BATCH, max(of_one_shape, default=samples), samples // 5)
    return 1 << max(0, most.bit_length() - 1)


def shape_ranges(settings: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, range]:
    """Return which samples of a shard have each shape, by the counts of its receipt."""
    ranges, start = {}, 0
    for name, count in shape_counts(settings, counts).items():
        ranges[name] = range(start, start + count)
        start += count
    return ranges


def parse_buckets(given: str | int | Iterable[int]) -> tuple[int, ...]:
    """Return the buckets that a user names, such as "256,512" or (256, 512)."""
    is_one = isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable)
    text = ",".join(map(str, [given] if is_one else given))  # type: ignore[arg-type]
    try:
        buckets = tuple(int(part) for part in text.split(","))
    except ValueError:
        buckets = ()
    is_rising = list(buckets) == sorted(set(buckets))
    if not buckets or not is_rising or not 1 <= buckets[0] <= buckets[-1] < 1 << 31:
        raise UsageError(
            f"--buckets {shortened(text)}: give rising sizes with commas, such as 256,512"
        )
    return buckets


def bucket_of(width: int, height: int, buckets: Sequence[int]) -> int:
    """Return the bucket of an image: the largest that its shorter side reaches.

    Raise ValueError if the image is smaller than the smallest bucket.
    """
    place = bisect_right(buckets, min(width, height))
    if not place:
        raise ValueError(f"{width}x{height} is smaller than bucket {buckets[0]}")
    return buckets[place - 1]


def buckets_of_phase(resolution: int, buckets: Sequence[int]) -> tuple[int, ...]:
    """Return the buckets whose images are all at least `resolution` wide and high."""
    return tuple(bucket for bucket in buckets if bucket >= resolution)


def least_side_of(settings: Mapping[str, Any]) -> int:
    """Return the shortest side of the images from which latents with these settings are made."""
    side = min(map(min, settings.get("shapes", [[settings["resolution"]]])))
    return least_to_reach(side, settings.get("upscale", 1))


@lru_cache(1 << 10)
def least_to_reach(side: int, most: float) -> int:
    """Return the least number of pixels that becomes `side` when it is scaled by at most `most`."""
    return ceil(side / Fraction(str(most)))  # of 1.1 that is 11/10


def buckets_encoded(settings: Mapping[str, Any], buckets: Sequence[int]) -> tuple[int, ...]:
    """Return the buckets of images from which latents with these settings are made.

    These are the buckets that may hold an image large enough for the square, or for one of the
    shapes, if need be after it was scaled up.
    """
    return tuple(buckets[max(0, bisect_right(buckets, least_side_of(settings)) - 1) :])
