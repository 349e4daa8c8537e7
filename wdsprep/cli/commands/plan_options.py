"""The options of `plan`."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from wdsprep.encoding import LATENTS, MODELS, TEXTS
from wdsprep.encoding.models.presets import TOKENS
from wdsprep.encoding.options import parse_resolutions, resolutions_of
from wdsprep.errors import UsageError
from wdsprep.options import Options, about

IMAGES, SPEED, MODEL = "Images", "Speed", "Model"


def parse_counts(given: Any) -> Mapping[int, float]:
    """Parse a number of images for each of some sizes: `256=490M,512=300M`, or a mapping."""
    if isinstance(given, Mapping):
        return given
    powers = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9}
    counts = {}
    for part in str(given).split(","):
        match = re.fullmatch(r"\s*(\d+)\s*=\s*(\d+(?:\.\d+)?)([kMB]?)\s*", part)
        if match is None:
            raise UsageError(f"{part!r}: write 256=490M,512=300M")
        counts[int(match[1])] = float(match[2]) * powers[match[3]]
    return counts


@dataclass(frozen=True)
class PlanOptions(Options):
    """The options of `wdsprep plan`."""

    images: "str | os.PathLike[str]" = field(
        default="", metadata=about("The images to be encoded.", is_place=True)
    )
    _: KW_ONLY
    counts: Mapping[int, float] | str | None = field(
        default=None,
        metadata=about(
            "Plan for this many images of each size, by the shorter side: 256=490M,512=300M.",
            IMAGES,
            read=parse_counts,
            metavar="SIZE=N,...",
        ),
    )
    samples_per_shard: int = field(
        default=10_000,
        metadata=about("Plan --counts with so many samples in a shard.", IMAGES, least=1),
    )
    resolution: int | Sequence[int] | None = field(
        default=None,
        metadata=about(
            "Plan for these resolutions; by default those of the trials, or 256 and 512.",
            IMAGES,
            read=lambda given: None if given is None else resolutions_of(given),
            parse=parse_resolutions,
            metavar="PIXELS[,...]",
        ),
    )
    trials: Sequence[str] = field(
        default=(),
        metadata=about(
            'Use the speed and the sizes of a dataset that "encode --limit" made.',
            SPEED,
            spelling="--trial",
            is_place=True,
            is_many=True,
        ),
    )
    gpus: int = field(
        default=1, metadata=about("Plan with this many GPUs.", SPEED, least=1, usual=True)
    )
    price: float = field(
        default=0.0,
        metadata=about("Plan with this price in dollars for an hour of a GPU.", SPEED, least=0),
    )
    model: str = field(
        default="sd2",
        metadata=about(
            "Without a trial, plan for a model that wdsprep models lists, except tiny.",
            MODEL,
            choices=[name for name in MODELS if name != "tiny"],
            metavar="NAME",
            usual=True,
        ),
    )
    latents: str = field(
        default="sample",
        metadata=about("Plan with this kept of each image.", MODEL, choices=LATENTS, usual=True),
    )
    flip: bool = field(
        default=False, metadata=about("Plan with latents of mirror images too.", MODEL)
    )
    text: str = field(
        default="emb",
        metadata=about("Plan with this kept of each caption.", MODEL, choices=TEXTS, usual=True),
    )
    tokens: int = field(
        default=TOKENS,
        metadata=about(
            "Plan with captions of this many tokens, if the model stores no more than they have.",
            MODEL,
            least=1,
            usual=True,
        ),
    )
    as_json: bool = False

    def check_together(self) -> None:
        super().check_together()
        if bool(self.images) is bool(self.counts):
            raise UsageError("nothing to plan: give a dataset of images, or --counts 256=N,512=N")
        if self.latents == "none" and self.flip:
            raise UsageError(
                "--flip is for images, of which --latents none encodes none: leave one of them out"
            )
