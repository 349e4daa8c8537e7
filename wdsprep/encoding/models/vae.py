"""The way from pixels to the output of a VAE, and from there to the latents of a denoiser.

Every VAE follows one of four rules, by its class and config: `vae_rules` reads them. A latent is
stored as (patchify(z) - shift) * scale, where z is a sample or the mean of the VAE's distribution,
or the VAE's output if it has no distribution. The decoder turns latents back into pictures, to see
what a model would learn.
"""

import logging
from typing import Any, cast

import torch
from torch import Tensor, nn

from wdsprep.dataset.latent_scaling import normalise
from wdsprep.encoding.models.find_model import Model, rule_of
from wdsprep.encoding.models.load_networks import load_vae, silence_libraries
from wdsprep.encoding.models.noise import normal
from wdsprep.encoding.models.vae_rules import VIDEO_KINDS
from wdsprep.encoding.models.vae_shortcuts import flatten_frames

_log = logging.getLogger("wdsprep")


class Moments(nn.Module):
    """The encoder of a VAE, from uint8 pixels to the means and log-variances of latents.

    A VAE without a distribution gives the latents themselves. The decoder is not kept.
    """

    def __init__(self, vae: Any, layout: torch.memory_format) -> None:
        """Take the encoder of a VAE.

        `layout` is the memory layout of images. If the network needs several frames, the layout is
        contiguous instead, and a warning is logged.
        """
        super().__init__()
        self.encoder = vae.encoder
        self.quant = getattr(vae, "quant_conv", None) or nn.Identity()
        self.dtype = vae.dtype
        self.takes_frames = isinstance(self._first_convolution(), nn.Conv3d)
        kept = flatten_frames(self)
        self.layout = torch.contiguous_format if kept else layout
        if self.layout is not layout:
            _log.warning(
                "%s: %s needs more than one frame, so all is computed as a video, which is slower",
                type(vae).__name__,
                kept[0],
            )

    def _first_convolution(self) -> nn.Module:
        kinds = nn.Conv2d | nn.Conv3d
        return next(module for module in self.encoder.modules() if isinstance(module, kinds))

    def forward(self, pixels: Tensor) -> Tensor:
        image = 2 * (pixels.float() / 255) - 1  # to the bit what diffusers makes of it
        image = image.to(self.dtype, memory_format=self.layout)
        if self.takes_frames:  # an image is a video of one frame
            return cast(Tensor, self.quant(self.encoder(image.unsqueeze(2))).squeeze(2).float())
        return cast(Tensor, self.quant(self.encoder(image)).float())


class Rule:
    """The step from the moments of a VAE to the latents that are stored, in fp32."""

    def __init__(self, model: Model, kept: str) -> None:
        self._model, self._kept = model, kept
        self._here: dict[torch.device, dict[str, Any]] = {}

    def __call__(self, moments: Tensor, noise: Tensor) -> Tensor:
        """Return what is stored of moments: the moments themselves, or shifted and scaled latents.

        `noise` has a key of noise for each sample.
        """
        if self._kept == "moments":
            return moments
        if not self._model.is_sampled:
            return self._normalise(moments)
        latents, logvar = moments.chunk(2, dim=1)
        if self._kept == "sample":
            deviation = (0.5 * logvar.clamp(-30, 20)).exp()
            latents = latents + deviation * normal(noise, tuple(latents.shape[1:]))
        return self._normalise(latents)

    def _normalise(self, latents: Tensor) -> Tensor:
        """Shift and scale latents.

        Lists of numbers by channel are copied to a device once, as a copy waits for the device's
        work.
        """
        rule = self._here.get(latents.device)
        if rule is None:
            rule = rule_of(self._model)
            lists = {name: value for name, value in rule.items() if isinstance(value, list)}
            rule |= {name: latents.new_tensor(value) for name, value in lists.items()}
            self._here[latents.device] = rule
        return cast(Tensor, normalise(latents, rule))


class Decoder:
    """The decoder of a model's VAE in fp32, on a GPU if there is one."""

    def __init__(self, model: Model) -> None:
        silence_libraries()
        self._model = model
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        vae = load_vae(model, torch.float32, needed=("decoder.", "post_quant_conv."))
        self._vae = vae.eval().requires_grad_(False).to(self._device)
        self._scale, self._shift = map(self._by_channel, (model.scale, model.shift))

    def _by_channel(self, numbers: float | tuple[float, ...]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float32, device=self._device).view(-1, 1, 1)

    def decode(self, latent: Any) -> Any:
        """Return the picture of a latent as uint8 (height, width, 3).

        The latent is as a trainer gets it, shifted and scaled.
        """
        stored = torch.as_tensor(latent, dtype=torch.float32, device=self._device)
        values = _unpatchify(stored / self._scale + self._shift, self._model.patch)[None]
        is_video = self._model.vae_kind in VIDEO_KINDS
        with torch.inference_mode():
            pixels = self._vae.decode(values[:, :, None] if is_video else values).sample
            pixels = (pixels[:, :, 0] if is_video else pixels)[0]
            levels = ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
            return levels.permute(1, 2, 0).contiguous().cpu().numpy()


def _unpatchify(stored: torch.Tensor, patch: int) -> torch.Tensor:
    """Return a latent with the channels of each place spread over `patch` x `patch` places again.

    The order of the channels is that of Flux.2.
    """
    channels, height, width = stored.shape
    squares = stored.view(channels // patch**2, patch, patch, height, width)
    rows = squares.permute(0, 3, 1, 4, 2)
    return rows.reshape(channels // patch**2, height * patch, width * patch)
