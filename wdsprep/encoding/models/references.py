"""Reference images as a pipeline takes them: the pixels for its VAE, and images for its text.

An edit pipeline takes images beside its prompt. It scales and cuts each by a rule of its own: to
the nearest of 17 sizes, to an area, or only where an image is too large. Nothing is known here of
these rules: the pipeline's own `__call__` is run up to the point at which its VAE has been given
all images. Its parts compute nothing, so it takes little more than the time for scaling. What its
VAE and its `encode_prompt` were given is the result, the same to the bit as in a real call.
"""

import contextlib
import inspect
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wdsprep.encoding.models.base import is_device_error
from wdsprep.encoding.models.config_files import read_json
from wdsprep.encoding.models.encode_prompt import IMAGE, assemble, pipeline_class, returned_names
from wdsprep.encoding.models.find_model import Model
from wdsprep.encoding.models.load_networks import (
    explain_errors,
    explain_load_errors,
    limit_to_weights,
    silence_libraries,
)
from wdsprep.encoding.models.model_files import cause_of
from wdsprep.errors import WorkError
from wdsprep.images.crop import blank_image

CPU = torch.device("cpu")
TRIAL = (1024, 1024)
"""The size of a blank image with which a pipeline is tried."""


class References(NamedTuple):
    """The reference images of a sample as a pipeline takes them."""

    pixels: tuple[Tensor, ...]
    """what its VAE is given of each, uint8 (3, H, W); empty if the VAE is not wanted"""
    for_text: Any
    """what its `encode_prompt` is given as `image`; None if it takes no images"""


class _CallIsOverError(Exception):
    """The pipeline has done all that it does with reference images."""


class ReferencePipeline:
    """A pipeline without weights, which prepares reference images; threads may share it."""

    def __init__(self, model: Model) -> None:
        """Build the pipeline of a model that takes reference images (`takes_references`)."""
        silence_libraries()
        kind = pipeline_class(model)
        self._name, self._has_vae = kind.__name__, bool(model.vae_kind)
        self._here = threading.local()
        signature, names = inspect.signature(kind.encode_prompt), returned_names(kind.encode_prompt)
        returned = torch.zeros(1, 8, 8)

        def encode_prompt(*words: Any, **options: Any) -> Any:
            self._here.for_text = (signature.bind(None, *words, **options).arguments.get(IMAGE),)
            self._end_if_complete()
            return tuple(returned for _ in names) or returned

        # Its input decides no more than the noise of the target.
        denoiser = _StandIn(config=_StandIn(64), dtype=torch.float32)
        scheduler = _StandIn(set_timesteps=_set_timesteps, timesteps=())
        others: dict[str, Any] = {"transformer": denoiser, "scheduler": scheduler}
        if self._has_vae:
            others["vae"] = self._empty_vae(model)
        self._pipeline = assemble(kind, model, lambda *_: None, others=others)
        self._pipeline.encode_prompt = encode_prompt
        self.blank = self.prepare([blank_image(TRIAL)])

    def prepare(self, images: Sequence[Any]) -> References:
        """Return RGB images of Pillow, the references of one sample, as the pipeline takes them.

        Raise WorkError if it refuses them: the sample of such images becomes a reject.
        """
        here = self._here
        here.pixels, here.count, here.for_text = [], len(images) if self._has_vae else 0, ()

        def refusal(error: BaseException) -> WorkError:
            return WorkError(f"{self._name} cannot take these reference images ({cause_of(error)})")

        with explain_errors(refusal, is_device_error), torch.inference_mode():
            with contextlib.suppress(_CallIsOverError):
                self._pipeline(
                    image=images[0] if len(images) == 1 else list(images),
                    prompt="",
                    generator=torch.Generator().manual_seed(0),  # not that of the whole process
                )
            if (count := len(here.pixels)) != here.count:
                raise ValueError(f"its VAE is given {count} of {here.count} before it denoises")
            return References(tuple(map(_levels, here.pixels)), *here.for_text)

    def _empty_vae(self, model: Model) -> Any:
        """Return a model's VAE without encoder and decoder, which notes what it is given."""
        import diffusers

        kind, path = getattr(diffusers, model.vae_kind), Path(model.folder, model.vae)
        limit = limit_to_weights(model.weights_in(model.vae))
        with explain_load_errors(path, kind), limit, torch.device("meta"):
            vae = kind.from_config(read_json(path / "config.json"))
        vae.encoder = vae.decoder = nn.Identity()
        vae.to_empty(device=CPU)
        channels, factor = model.channels // model.patch**2, model.factor // model.patch

        def encode(_vae: Any, pixels: Tensor) -> Any:
            self._here.pixels.append(pixels)
            self._end_if_complete()
            batch, _, *frames, height, width = pixels.shape
            latents = torch.zeros(batch, channels, *frames, height // factor, width // factor)
            drawn = SimpleNamespace(mode=lambda: latents, sample=lambda *_, **__: latents)
            return SimpleNamespace(latent_dist=drawn)

        attributes = {"device": CPU, "dtype": torch.float32, "encode": encode}
        vae.__class__ = type(kind.__name__, (kind,), attributes)
        return vae

    def _end_if_complete(self) -> None:
        if self._here.for_text and len(self._here.pixels) == self._here.count:
            raise _CallIsOverError


def _set_timesteps(*_: Any, timesteps: Any = None, sigmas: Any = None, **__: Any) -> None:
    """Stand for a scheduler's method: pipelines look for its arguments, some before they encode."""


class _StandIn:
    """A stand-in for a denoiser, its config or a scheduler, which knows a few facts.

    For any other fact it has one number, or none: whoever asks it then has prepared its images.
    """

    def __init__(self, number: int = 0, **facts: Any) -> None:
        self._number = number
        vars(self).update(facts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if not self._number:
            raise _CallIsOverError
        return self._number


def _levels(pixels: Tensor) -> Tensor:
    """Return the picture that a pipeline has made ready for its VAE, uint8 (3, H, W).

    Raise ValueError if that is not a picture of 256 levels, from -1 to 1, and opaque.
    """
    image = pixels.reshape(pixels.shape[1], *pixels.shape[-2:])
    levels = ((image + 1) * 127.5).round().to(torch.uint8)
    is_opaque = bool((levels[3:] == 255).all())
    if not torch.equal(2 * (levels.float() / 255) - 1, image) or not is_opaque:
        raise ValueError("its VAE is given no opaque picture of 256 levels")
    return levels[:3].contiguous()
