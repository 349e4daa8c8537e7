"""The options that say which images are taken, and what they become.

A limit is a number for the target, the image that is trained on. Images in roles have limits of
their own, as in `300,source=256`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.samples import ROLE, ROLE_IMAGE, TARGET, role_of
from wdsprep.errors import UsageError
from wdsprep.limits import MAX_AREA, MAX_NBYTES
from wdsprep.options import MOST, Options, about, option_field
from wdsprep.text import brief, parse_size, real_number, whole_number

HEADING = "Images"
AREA = about(
    "Reject images of more pixels than this.",
    HEADING,
    least=1,
    code=Code.TOO_LARGE,
    remedy="--overwrite with a larger --max-area takes larger images",
)
"""The declaration of `max_area`, wherever images are looked at."""


NBYTES = about(
    "Reject images of more bytes than this.",
    HEADING,
    read=lambda size: parse_size(size) or MAX_NBYTES,
    metavar="SIZE",
    usual="250MB",
    example="250MB",
)
"""The declaration of `max_bytes`, wherever images of shards are looked at."""


def role_image(given: Any) -> str:
    """Return the name of an image in a role, or "" for that of the target."""
    if not isinstance(given, str) or not re.fullmatch(ROLE_IMAGE, given or TARGET):
        raise UsageError(f"{brief(given)}: give the name of an image, as source or source_1")
    return "" if given == TARGET else given


def check_has_image(images: str, roles: Sequence[str], name: str) -> None:
    """Raise UsageError if images with these roles have no image of this name."""
    if name and role_of(name)[0] not in roles:
        there = f"it has {', '.join(roles)}" if roles else "it has targets alone"
        raise UsageError(f"--role {name}: {images} has no such images, {there}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The bounds on an upright image, and what is made of it.

    A ratio of 0 is no bound. With a `quality` every image is written as JPEG of it, its longer side
    shrunk to `max_side` (0: any length). The shorter side never falls under `min_side`, so
    shrinking cannot cost a sample its bucket: of a long thin picture the longer side stays over
    `max_side` instead.
    """

    min_side: int
    max_area: int
    max_aspect_ratio: float
    max_alpha: float = 1.0
    mask_size: tuple[int, int] | None = None
    """The size that an image must have as a mask; None if it is not one."""
    quality: int = 0
    max_side: int = 0


def _read_limit(given: Any, *, kind: type, least: float, most: float = inf) -> Any:
    """Return a limit as a number, or by role if it is not for the target alone.

    The role of the target is "". Raise UsageError if it is no limit.
    """
    pairs: Any = given.items() if isinstance(given, Mapping) else [("", given)]
    if isinstance(given, str):
        parts = (part.rpartition("=") for part in given.split(","))
        pairs = [(role.strip(), number) for role, _, number in parts]
    numbers: dict[str, Any] = {}
    for role, number in pairs:
        if role in numbers or not re.fullmatch(f"({ROLE})?", str(role)):
            raise UsageError(f"{brief(given)}: write N,ROLE=N, each role once")
        if isinstance(number, str):
            try:
                number = kind(number)
            except ValueError:
                raise UsageError(f"{brief(given)}: give a number, or ROLE=N for a role") from None
        number = whole_number("", number) if kind is int else real_number("", number)
        most = min(most, MOST) if kind is int else most
        if not least <= number <= most or number == inf:
            bound = f"{least} or more" if number < least else f"{most} or less"
            raise UsageError(f"{brief(number)}: give {bound}")
        numbers[role] = number
    return numbers[""] if [*numbers] == [""] else numbers


def limit_of(limit: Any, role: str, default: float) -> Any:
    """Return the number in a limit for a role, or for the target if that is ""."""
    if isinstance(limit, Mapping):
        return limit.get(role, default)
    return default if role else limit


LIMITS = ("max_alpha", "max_area", "max_aspect_ratio", "min_size")
"""The options that are limits."""


@dataclass(frozen=True, kw_only=True)
class ImageOptions(Options):
    """Options that say which images are taken."""

    min_size: int | Mapping[str, int] = option_field(
        "Reject images whose shorter side has fewer pixels, where it is above the smallest bucket. "
        "300,source=256 has a limit for images [in the role](#several-images-a-sample) source too, "
        "and so have the next three.",
        HEADING,
        default=0,
        read=partial(_read_limit, kind=int, least=0),
        metavar="N",
        usual="the smallest bucket",
        code=Code.TOO_SMALL,
        remedy="--overwrite with smaller --buckets and --min-size takes smaller images",
    )
    max_area: int | Mapping[str, int] = field(
        default=MAX_AREA,
        metadata={
            "about": replace(
                AREA["about"], least=None, read=partial(_read_limit, kind=int, least=1), metavar="N"
            )
        },
    )
    max_aspect_ratio: float | Mapping[str, float] = option_field(
        "Reject images whose longer side is more than so many times the shorter.",
        HEADING,
        default=0.0,
        read=partial(_read_limit, kind=float, least=0),
        metavar="N",
        code=Code.ASPECT_RATIO,
        remedy="--overwrite with a larger --max-aspect-ratio takes longer images",
    )
    max_alpha: float | Mapping[str, float] = option_field(
        "Reject images of which a larger part is transparent; what is kept is laid onto white.",
        HEADING,
        default=1.0,
        read=partial(_read_limit, kind=float, least=0, most=1),
        metavar="N",
        code=Code.TRANSPARENT,
        remedy="--overwrite with a larger --max-alpha takes images that show less",
        example="0.5",
    )

    def limits_from(self, smallest: int, role: str = "") -> Limits:
        """Return the limits that the options set, for images of the bucket `smallest` and larger.

        The shorter side has at least `smallest` pixels, or `min_size` if that is more. They are
        those of images in a role, if one is given.
        """
        return Limits(
            min_side=max(smallest, limit_of(self.min_size, role, 0)),
            max_area=limit_of(self.max_area, role, MAX_AREA),
            max_aspect_ratio=limit_of(self.max_aspect_ratio, role, 0.0),
            max_alpha=limit_of(self.max_alpha, role, 1.0),
        )

    def role_limits(self) -> dict[str, dict[str, float]]:
        """Return the limits of images in roles by role, and each by the name of its option."""
        found: dict[str, dict[str, float]] = {}
        for name in LIMITS:
            limit = getattr(self, name)
            for role, number in limit.items() if isinstance(limit, Mapping) else ():
                if role:
                    found.setdefault(role, {})[name] = number
        return found


def jpeg_quality(given: object) -> int:
    """Return the quality in a text such as `jpg:95` or `95`, or raise UsageError."""
    match = re.fullmatch(r"(?:jpe?g:)?(\d{1,3})", str(given))
    if match is None or not 1 <= int(match[1]) <= 100:
        raise UsageError(f"{brief(given)}: write jpg:95, with a quality from 1 to 100")
    return int(match[1])
