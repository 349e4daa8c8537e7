"""The output of a VAE as a denoiser takes it: cells folded into channels, shifted and scaled.

The settings of a dataset say how: `patch` cells a side (1 where they do not say) become channels,
then `shift` and `scale` are one number each, or one for every channel. A latent that `encode`
stores and one that the loader samples from moments go the same way, here. Nothing is imported:
these are methods that tensors of torch have, and where it says so arrays of NumPy.
"""

from collections.abc import Mapping
from typing import Any


def patchify(latents: Any, patch: int) -> Any:
    """Fold patches into channels: (..., C, h, w) to (..., C p p, h/p, w/p), of tensors or arrays.

    In the number of a channel, a cell's place within its patch (row by row) changes faster than
    the old channel.
    """
    if patch == 1:
        return latents
    *some, channels, height, width = latents.shape
    cells = latents.reshape(*some, channels, height // patch, patch, width // patch, patch)
    folded = cells.swapaxes(-4, -3).swapaxes(-2, -1).swapaxes(-3, -2)
    return folded.reshape(*some, channels * patch**2, height // patch, width // patch)


def patched_shape(shape: tuple[int, int, int], patch: int) -> tuple[int, int, int]:
    """Return the shape that `patchify` makes of (C, h, w)."""
    channels, height, width = shape
    return channels * patch**2, height // patch, width // patch


def normalise(latents: Any, settings: Mapping[str, Any]) -> Any:
    """Return latents of a VAE, of shape (..., C, h, w), shifted and scaled as `settings` say.

    Where they say so, patches of neighbours are first folded into channels.
    """
    folded = patchify(latents, settings.get("patch", 1))
    shift, scale = (_by_channel(folded, settings[name]) for name in ("shift", "scale"))
    return (folded - shift) * scale


def _by_channel(latents: Any, given: Any) -> Any:
    """Shape a shift or a scale so that it applies to the channels of latents.

    A single number stays one: a tensor of one number would give other bits.
    """
    if isinstance(given, int | float):
        return given
    return (given if hasattr(given, "device") else latents.new_tensor(given))[:, None, None]


def denormalise(latents: Any, settings: Mapping[str, Any]) -> Any:
    """Return the output of the VAE from arrays (C, h, w) stored with these settings."""
    raw = (latents.T / settings["scale"] + settings["shift"]).T  # channels last, as lists have them
    return unpatchify(raw, settings.get("patch", 1))


def unpatchify(latents: Any, patch: int) -> Any:
    """Unfold patches of cells from the channels of arrays (C, h, w): the reverse of `patchify`."""
    if patch == 1:
        return latents
    channels, height, width = latents.shape
    cells = latents.reshape(channels // patch**2, patch, patch, height, width)
    spread = cells.transpose(0, 3, 1, 4, 2)
    return spread.reshape(channels // patch**2, height * patch, width * patch)
