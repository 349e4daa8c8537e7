"""Find the model to decode latents with, if it is on this machine: a report fetches nothing.

The model is loaded with the first latent that is decoded, by the one module that needs torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from wdsprep.encoding.models.find_model import Model, find_model
from wdsprep.errors import UsageError, WdsprepError
from wdsprep.reporting.facts.datasets import ReportDataset

if TYPE_CHECKING:
    from wdsprep.encoding.models.decoder import Decoder


NONE = "none"
PACKAGES = ("torch", "diffusers")  # needed to decode


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """The model that decodes the latents of a dataset, or the `reason` why none does.

    With a model the reason is a warning, or empty.
    """

    model: Model | None
    reason: str


def model_name(latents: ReportDataset, wanted: str) -> str:
    """Return the name of the model to decode with: `wanted` or the dataset's; empty for none."""
    return "" if wanted == NONE else wanted or str(latents.manifest.extra.get("model", ""))


def find_decoding(latents: ReportDataset, wanted: str) -> Decoding:
    """Find the model that is wanted, or else the one that the dataset was made with.

    The result has a reason and no model if decoding is not wanted, no model is named, a package is
    missing, or the dataset's own model is not on this machine or has other weights now. A wanted
    model raises an error if it is not on this machine or does not fit the latents. If only its
    weights differ from those of the dataset, the reason is a warning.
    """
    if wanted == NONE:
        return Decoding(model=None, reason="--model none was given")
    settings = latents.manifest.settings
    name = model_name(latents, wanted)
    if not name:
        reason = "the dataset does not say which model made it: give it with --model"
        return Decoding(model=None, reason=reason)
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        return Decoding(model=None, reason=f"{missing[0]} is not installed here")
    try:
        model = find_model(name, text=settings["text"], is_offline=True)
    except WdsprepError as error:
        if wanted:
            raise
        return Decoding(model=None, reason=str(error))
    if model.weights == settings["weights"]:
        return Decoding(model=model, reason="")
    if not wanted:
        return Decoding(model=None, reason=f"the latents were made with other weights of {name}")
    _check_channels(model, latents)
    return Decoding(model=model, reason=f"the latents were made with other weights of {name}")


def _check_channels(model: Model, latents: ReportDataset) -> None:
    settings = latents.manifest.settings
    channels = settings["layout"][0]["shape"][0]
    if settings["latents"] == "moments":  # as the VAE gives them
        channels = channels // 2 * model.patch**2
    if channels != model.channels:
        raise UsageError(
            f"--model {model.name} has {model.channels} latent channels, and {latents.shown} has "
            f"{channels}: give the model that made its latents"
        )


class Decoders:
    """The decoders of several models, each of which is loaded once."""

    def __init__(self, told: Callable[[str], None]) -> None:
        self._told = told
        self._loaded: dict[str, Decoder | WdsprepError] = {}

    def decode(self, model: Model, latent: Any) -> Any:
        if model.weights not in self._loaded:
            self._loaded[model.weights] = self._load(model)
        loaded = self._loaded[model.weights]
        if isinstance(loaded, WdsprepError):
            raise loaded
        return loaded.decode(latent)

    def _load(self, model: Model) -> "Decoder | WdsprepError":
        """Load a decoder; return the error if that fails, so that it is not tried again."""
        from wdsprep.encoding.models.decoder import Decoder

        self._told(f"loading the decoder of {model.name}")
        try:
            return Decoder(model)
        except WdsprepError as error:
            return error
