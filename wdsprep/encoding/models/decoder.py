"""The decoder of a VAE, which turns latents back into pictures, to see what a model would learn.

torch is imported with this module, diffusers when the weights are loaded.
"""

from typing import Any

import torch

from wdsprep.encoding.models.find_model import Model
from wdsprep.encoding.models.load_networks import load_vae, silence_libraries
from wdsprep.encoding.models.vae_rules import VIDEO_KINDS


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
