"""Compare the latents of a dataset with a normal distribution, channel by channel.

A diffusion model begins with noise of mean 0 and deviation 1, and latents are scaled to have the
same. If a channel is far from that, look first for a wrong scale, shift or VAE.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import erf, sqrt
from typing import Any

import numpy as np

from wdsprep.dataset.latent_scaling import patchify
from wdsprep.dataset.npy_arrays import LATENT, field_of, fields_of, values_of
from wdsprep.dataset.receipts import Settings
from wdsprep.dataset.shapes import cut_size, fields_in_shape, shapes_of
from wdsprep.errors import FormatError
from wdsprep.reporting.sheet.picking import SheetSample

SIDES = 5.0  # the end of the histogram: larger values count into its last bin
BINS = 40
FAR, VERY_FAR = 3.0, 5.0
EXTREMES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Channel:
    """The distribution of the values in one channel of latents."""

    mean: float
    std: float
    least: float
    most: float
    far: float
    """The share of values whose size is above 3."""
    very_far: float
    """The share of values whose size is above 5."""
    shares: tuple[float, ...]
    """The share of values in each bin from -5 to 5."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extreme:
    """A sample with an extreme value in a channel of its latent."""

    key: str
    channel: int
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Spectrum:
    """The distribution of latents by channel.

    `unsound` samples had a latent of another shape than the dataset states, or one that is not
    finite.
    """

    samples: int
    unsound: int
    channels: tuple[Channel, ...]
    extremes: tuple[Extreme, ...]


def usual_share(beyond: float) -> float:
    """Return the share of a normal distribution beyond some standard deviations, on both sides."""
    return 1 - erf(beyond / sqrt(2))


def latent_of(sample: SheetSample, settings: Settings) -> Any:
    """Return the latent of a sample in fp32, as a trainer takes it; for moments, the mean.

    Raise FormatError if it is not a finite array of the shape that the dataset states.
    """
    data = sample.member(LATENT)
    found = field_of(LATENT, data)
    wanted = _latent_shape(sample, settings)
    if found.shape != wanted:
        raise FormatError(f"{LATENT} of {sample.key} has shape {found.shape}, not {wanted}")
    array = values_of(found, data).astype(np.float32)
    if not np.isfinite(array).all():
        raise FormatError(f"{LATENT} of {sample.key} has values that are not finite")
    if settings["latents"] != "moments":
        return array
    mean = patchify(array[: len(array) // 2], settings.get("patch", 1))
    shift, scale = (np.reshape(np.float32(settings[of]), (-1, 1, 1)) for of in ("shift", "scale"))
    return (mean - shift) * scale


def _latent_shape(sample: SheetSample, settings: Settings) -> tuple[int, ...]:
    """Return the shape that the latent of a sample has to have.

    In a dataset of several shapes, the size of the crop decides.
    """
    fields, size = fields_of(settings["layout"]), cut_size(sample.facts)
    if sizes := shapes_of(settings):
        if size not in sizes:
            raise FormatError(f"{sample.key} has none of the shapes of the dataset")
        fields = fields_in_shape(settings, size)
    return next(field.shape for field in fields if field.name == LATENT)


def spectrum_of(samples: Sequence[SheetSample], settings: Settings) -> Spectrum | None:
    """Return the distribution of latents, or None if no latent could be used."""
    keys, latents = [], []
    for sample in samples:
        try:
            latents.append(latent_of(sample, settings))
        except FormatError:
            continue
        keys.append(sample.key)
    if not latents:
        return None
    return Spectrum(
        samples=len(keys),
        unsound=len(samples) - len(keys),
        channels=tuple(
            _channel(np.concatenate([latent[number].ravel() for latent in latents]))
            for number in range(len(latents[0]))
        ),
        extremes=tuple(_extremes(keys, latents)),
    )


def _channel(values: Any) -> Channel:
    wide = values.astype(np.float64)
    counts, _ = np.histogram(wide.clip(-SIDES, SIDES), bins=BINS, range=(-SIDES, SIDES))
    return Channel(
        mean=float(wide.mean()),
        std=float(wide.std()),
        least=float(wide.min()),
        most=float(wide.max()),
        far=float((abs(wide) > FAR).mean()),
        very_far=float((abs(wide) > VERY_FAR).mean()),
        shares=tuple(float(share) for share in counts / wide.size),
    )


def _extremes(keys: Sequence[str], latents: Sequence[Any]) -> list[Extreme]:
    """Return at most five samples: those with the most extreme values, the most extreme first."""
    furthest = np.array([abs(latent).max() for latent in latents])
    found = []
    for row in np.argsort(-furthest, kind="stable")[:EXTREMES]:
        latent = latents[row]
        place = np.unravel_index(abs(latent).argmax(), latent.shape)
        found.append(Extreme(key=keys[row], channel=int(place[0]), value=float(latent[place])))
    return found
