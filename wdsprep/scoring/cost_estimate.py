"""The time and bytes that scoring takes, for `wdsprep plan`.

GPU hours are computed from the operations in the models' published configs, two for each
multiplication with an addition, at the share of the peak that the table of GPUs has for encoding.
They have not been measured. Bytes follow from the format.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wdsprep.dataset.tar import BLOCK
from wdsprep.encoding.cost_estimate import Choice, Fleet, Gpu, derived_rate, gflops

SCORE_GFLOPS: Mapping[str, float] = {"clip": 175, "siglip": 700, "dinov2": 46, "nsfw": 35}
"""The operations for an image, and for its caption if the model reads it, in billions: at 224
pixels, for siglip at 384."""
SAMPLE_NBYTES = 3 * BLOCK + 8
"""The headers of json and txt, the json, and a place in the index."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreEstimate:
    """The time, money and bytes that scoring by several models takes in one pass."""

    models: tuple[str, ...]
    samples: int
    device_hours: float
    """0 if no GPU is named"""
    dollars: float
    wall_hours: float
    nbytes_read: int
    nbytes_written: int


def estimate_scores(
    models: Sequence[str], samples: int, nbytes_read: int, gpu: Gpu | None, fleet: Fleet
) -> ScoreEstimate:
    """Return the time, money and bytes that scoring a number of samples takes.

    `nbytes_read` are the bytes of their images. Without a `gpu` or models, hours and dollars are 0.
    """
    rate = 0.0
    if gpu is not None and models:
        each = derived_rate(gpu, 256, Choice()) * gflops(256, Choice())
        rate = each / sum(SCORE_GFLOPS[name] for name in models)
    hours = samples / rate / 3600 if rate else 0.0
    return ScoreEstimate(
        models=tuple(models),
        samples=samples,
        device_hours=hours,
        dollars=hours * fleet.price,
        wall_hours=hours / fleet.devices,
        nbytes_read=nbytes_read,
        nbytes_written=samples * SAMPLE_NBYTES,
    )
