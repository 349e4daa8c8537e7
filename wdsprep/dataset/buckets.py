"""Which bucket an image belongs to, and which buckets a training phase reads.

A bucket is named by the smallest shorter side it takes: of (256, 512), `256` holds [256, 512) and
`512` holds 512 and up. Phase 256 trains on both, phase 512 on the second alone, and phase 1024 on
those images of the second that are large enough.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import ceil
from typing import Any

from wdsprep.errors import UsageError
from wdsprep.text import shortened


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


def least_to_reach(side: int, most: float) -> int:
    """Return the least number of pixels that becomes `side` when it is scaled by at most `most`."""
    return ceil(side / _exact(most))


@lru_cache(64)
def _exact(number: float) -> Fraction:
    """Return the fraction that a decimal number stands for, such as 11/10 for 1.1."""
    return Fraction(str(number))


def buckets_encoded(settings: Mapping[str, Any], buckets: Sequence[int]) -> tuple[int, ...]:
    """Return the buckets of images from which latents with these settings are made.

    These are the buckets that may hold an image large enough for the square, or for one of the
    shapes, if need be after it was scaled up.
    """
    return tuple(buckets[max(0, bisect_right(buckets, least_side_of(settings)) - 1) :])
