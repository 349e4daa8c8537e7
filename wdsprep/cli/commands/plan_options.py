"""The options of `plan`."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from wdsprep.encoding import LATENTS, MODELS, TEXTS
from wdsprep.encoding.models.presets import TOKENS
from wdsprep.encoding.shape_lists import ShapesGiven
from wdsprep.errors import UsageError
from wdsprep.images.nearest_shape import DECODES
from wdsprep.options import Options, about
from wdsprep.scoring.options import PRESETS

IMAGES, SPEED, MODEL = "Images", "Speed", "Model"


def sizes(given: Any) -> Mapping[int, float]:
    """Parse a number for each of some sizes: `256=490M,512=300M`, or a mapping."""
    if isinstance(given, Mapping):
        return given
    powers = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9}
    found = {}
    for part in str(given).split(","):
        match = re.fullmatch(r"\s*(\d+)\s*=\s*(\d+(?:\.\d+)?)([kMB]?)\s*", part)
        if match is None:
            raise UsageError(f"{part!r}: write 256=490M,512=300M")
        found[int(match[1])] = float(match[2]) * powers[match[3]]
    return found


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
            "Plan for this many images in each bucket: 256=490M,512=300M.",
            IMAGES,
            read=sizes,
            metavar="SIZE=N,...",
        ),
    )
    samples_per_shard: int = field(
        default=10_000,
        metadata=about("Plan with this many samples in a shard.", IMAGES, least=1, usual=True),
    )
    published: bool = field(
        default=False, metadata=about("Plan the published runs instead.", IMAGES)
    )
    gpu: str | None = field(
        default=None,
        metadata=about(
            "Use the speed of an A10G, A100, H100 or H200 from a table; it is not measured.",
            SPEED,
        ),
    )
    gpus: int = field(
        default=1, metadata=about("Plan with this many GPUs.", SPEED, least=1, usual=True)
    )
    price: float = field(
        default=0.0,
        metadata=about("Plan with this price in dollars for an hour of a GPU.", SPEED, least=0),
    )
    rates: Mapping[int, float] | str | None = field(
        default=None,
        metadata=about(
            "Use these speeds of a GPU, in images a second: 256=111,512=30.",
            SPEED,
            read=sizes,
            spelling="--rate",
            metavar="SIZE=N,...",
        ),
    )
    trials: Sequence[str] = field(
        default=(),
        metadata=about(
            'Use the speed that an "encode --limit" has measured, from its dataset.',
            SPEED,
            spelling="--trial",
            is_place=True,
            is_many=True,
        ),
    )
    model: str = field(
        default="sd2",
        metadata=about(
            "Plan for this model of those that wdsprep models lists.",
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
    decode: str = field(
        default=DECODES[0],
        metadata=about(
            "Plan with JPEGs decoded at a reduced scale, or in full.",
            MODEL,
            choices=DECODES,
            usual=True,
        ),
    )
    text: str = field(
        default="emb",
        metadata=about("Plan with this kept of each caption.", MODEL, choices=TEXTS, usual=True),
    )
    shapes: ShapesGiven = field(
        default="",
        metadata=about(
            "Show what the shapes of this list need, for the phases that it is for.",
            MODEL,
            metavar="FILE|sdxl|nearest:STEP,MAX",
        ),
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
    score: Sequence[str] = field(
        default=(),
        metadata=about(
            "Plan scoring by this model too: clip, siglip, dinov2 or nsfw; several in one pass.",
            MODEL,
            choices=tuple(PRESETS),
            is_many=True,
        ),
    )
    as_json: bool = False

    def check_together(self) -> None:
        super().check_together()
        if not self.published and bool(self.images) is bool(self.counts):
            raise UsageError("nothing to plan: give a dataset of images, or --counts 256=N,512=N")
        if self.latents == "none" and self.text != "emb" and not self.published:
            raise UsageError(
                f"--latents none --text {self.text} needs no GPU, so there is nothing to plan: "
                "give another --latents or --text"
            )
        if self.latents == "none" and self.flip and not self.published:
            raise UsageError(
                "--flip is for images, of which --latents none encodes none: leave one of them out"
            )
