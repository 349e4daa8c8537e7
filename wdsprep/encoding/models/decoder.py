"""The other half of a VAE: latents back to pictures, to see what a model would have to learn from.

torch is imported with this module, diffusers when the weights are loaded.
"""

from typing import Any

import torch

from wdsprep.encoding.models.encoder import load_vae, silence
from wdsprep.encoding.models.find import Model


class Decoder:
    """The decoder of a model's VAE in fp32, on a GPU where there is one."""

    def __init__(self, model: Model) -> None:
        silence()
        self._model = model
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        vae = load_vae(model, torch.float32, needed=("decoder.", "post_quant_conv."))
        self._vae = vae.eval().requires_grad_(False).to(self._device)

    def decode(self, latent: Any) -> Any:
        """A latent as a trainer takes it, to levels (height, width, 3)."""
        values = torch.as_tensor(latent, dtype=torch.float32, device=self._device)[None]
        with torch.inference_mode():
            values = values / self._model.scale + self._model.shift
            pixels = self._vae.decode(values).sample[0]
            levels = ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
            return levels.permute(1, 2, 0).contiguous().cpu().numpy()
