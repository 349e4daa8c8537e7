"""The options that say which images are taken, and what they become."""

import re
from dataclasses import dataclass, field

from wdsprep.dataset.reject_codes import Code
from wdsprep.errors import UsageError
from wdsprep.limits import MAX_AREA, MAX_NBYTES
from wdsprep.options import Options, about
from wdsprep.text import brief, parse_size

HEADING = "Images"
AREA = about(
    "Reject images of more pixels than this.",
    HEADING,
    least=1,
    usual=True,
    code=Code.TOO_LARGE,
    remedy="--overwrite with a larger --max-area takes larger images",
)
"""The declaration of `max_area`, wherever images are looked at."""


def _max_bytes(given: object) -> int:
    return parse_size(given) or MAX_NBYTES


NBYTES = about(
    "Reject images of more bytes than this.",
    HEADING,
    read=_max_bytes,
    metavar="SIZE",
    usual="250MB",
    example="250MB",
    page="reject images of more bytes, whatever the dataset of images let pass",
)
"""The declaration of `max_bytes`, wherever images of shards are looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The bounds on the size of an upright image. 0 is no bound for the ratio of its sides."""

    min_side: int
    max_area: int
    max_aspect_ratio: float
    max_alpha: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ImageOptions(Options):
    """Options that say which images are taken."""

    min_size: int = field(
        default=0,
        metadata=about(
            "Reject images whose shorter side has fewer pixels.",
            HEADING,
            least=0,
            usual="the smallest bucket",
            code=Code.TOO_SMALL,
            remedy="--overwrite with smaller --buckets and --min-size takes smaller images",
            example="N",
            page="reject images whose shorter side has fewer pixels; it counts where it is above "
            "the smallest bucket",
        ),
    )
    max_area: int = field(default=MAX_AREA, metadata=AREA)
    max_aspect_ratio: float = field(
        default=0.0,
        metadata=about(
            "Reject images whose longer side is more than so many times the shorter.",
            HEADING,
            least=0,
            code=Code.ASPECT_RATIO,
            remedy="--overwrite with a larger --max-aspect-ratio takes longer images",
            example="N",
        ),
    )
    max_alpha: float = field(
        default=1.0,
        metadata=about(
            "Reject images of which a larger part is transparent.",
            HEADING,
            least=0,
            most=1,
            usual=True,
            decides=True,
            code=Code.TRANSPARENT,
            remedy="--overwrite with a larger --max-alpha takes images that show less",
            example="0.5",
            page="reject images of which a larger part is transparent; what is kept is laid onto "
            "white",
        ),
    )

    def limits_from(self, smallest: int) -> Limits:
        """Return the limits that the options set, for images of the bucket `smallest` and larger.

        The shorter side has at least `smallest` pixels, or `min_size` if that is more.
        """
        return Limits(
            min_side=max(smallest, self.min_size),
            max_area=self.max_area,
            max_aspect_ratio=self.max_aspect_ratio,
            max_alpha=self.max_alpha,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Recode:
    """A rule to write all images as JPEG of this quality, at most `max_side` long (0: any length).

    The shorter side never falls under `Limits.min_side`, so shrinking cannot cost a sample its
    bucket: of a long thin picture the longer side stays over `max_side` instead.
    """

    quality: int
    max_side: int = 0


def jpeg_quality(given: object) -> int:
    """Return the quality in a text such as `jpg:95` or `95`, or raise UsageError."""
    match = re.fullmatch(r"(?:jpe?g:)?(\d{1,3})", str(given))
    if match is None or not 1 <= int(match[1]) <= 100:
        raise UsageError(f"{brief(given)}: write jpg:95, with a quality from 1 to 100")
    return int(match[1])
