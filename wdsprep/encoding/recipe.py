"""What is made of an image and its caption: the settings of encoding, with the usual values.

They stand here alone. `encode`, `load` and `stream` take theirs from here, and pass them on whole.
"""

from dataclasses import dataclass

from wdsprep.errors import UsageError
from wdsprep.limits import MAX_AREA, MAX_NBYTES

LATENTS = ("sample", "mean", "moments")
"""What may be kept of the VAE's distribution."""
TEXTS = ("emb", "tokens", "none")
"""What may be made of a caption."""
DTYPES = ("auto", "fp16", "bf16", "fp32")
"""Of the models, not of what is stored; auto goes by the device, and is settled before the work."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What decides the bytes of a latent sample, beside the model."""

    resolution: int
    latents: str = LATENTS[0]
    text: str = TEXTS[0]
    dtype: str = DTYPES[0]
    seed: int = 0
    compile: bool = False
    max_area: int = MAX_AREA
    max_nbytes: int = MAX_NBYTES

    def __post_init__(self) -> None:
        """Other words would be taken for one of these further on."""
        for name, known in (("latents", LATENTS), ("text", TEXTS), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise UsageError(f"{name} {getattr(self, name)!r}: give {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class Encode(Recipe):
    """How images become latents while a trainer waits for them.

        how = wdsprep.Encode(resolution=256, model="sd2")
        loader = wdsprep.load("shards/images", encode=how, global_batch=1024)

    The settings are those of `wdsprep encode` that decide what latents are, `batch_size` on the
    device (0: chosen), and `device`, by default the trainer's.
    """

    model: str = "sd2"
    batch_size: int = 0
    device: str = "auto"
