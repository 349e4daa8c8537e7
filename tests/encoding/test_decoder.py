"""A report decodes what is stored with the VAE of its family: the way back of each rule."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kit.families import latent_of
from wdsprep.encoding.models.find_model import find_model
from wdsprep.encoding.models.vae import Decoder

VIDEO = ("AutoencoderKLQwenImage",)


def by_the_vae_alone(folder: Path, pixels: "np.ndarray[Any, Any]") -> Tensor:
    """There and back by diffusers, with nothing done in between."""
    kind = json.loads((folder / "vae/config.json").read_text())["_class_name"]
    vae = getattr(diffusers, kind).from_pretrained(str(folder / "vae"), low_cpu_mem_usage=False)
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 127.5 - 1
    with torch.inference_mode():
        found = vae.encode(image[:, :, None] if kind in VIDEO else image)
        latent = found.latent_dist.mode() if hasattr(found, "latent_dist") else found.latent
        made = vae.decode(latent).sample
        made = made[:, :, 0] if kind in VIDEO else made
        return ((made[0] / 2 + 0.5).clamp(0, 1) * 255).permute(1, 2, 0)


@pytest.mark.parametrize("name", ["StableDiffusionXL", "Flux", "Flux2Klein", "QwenImage", "Sana"])
def test_a_latent_goes_back_the_way_it_came(name: str, family: Callable[[str], Path]) -> None:
    folder = family(name)
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    decoder = Decoder(find_model(str(folder), text="none"))
    made = torch.from_numpy(decoder.decode(latent_of(folder, pixels)))
    wanted = by_the_vae_alone(folder, pixels)
    assert made.shape == wanted.shape == (64, 64, 3)
    assert wanted.std() > 1, "nothing can be seen in it"
    assert (made.float() - wanted).abs().max() <= 0.51
