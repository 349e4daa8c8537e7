"""What train_example.py trains: two kinds of model, each with its loss and its way to sample.

Which of them, the arrays of a dataset say. Latents of four channels with text of full length are
for `Denoising`: a UNet finds the noise, as in Stable Diffusion. All others are for `Flow`: a
transformer finds the way from image to noise, as in Flux, Lumina2, Z-Image or Qwen-Image, and what
the mask leaves out of the text it does not see. Of what a family stores beside `emb`, such as the
pooled text of SDXL, a real model takes more.
"""

from itertools import pairwise
from math import prod
from typing import Any

import torch
from diffusers import DDIMScheduler, DDPMScheduler, Lumina2Transformer2DModel, UNet2DConditionModel
from torch import Tensor
from torch.nn.functional import mse_loss

from wdsprep.dataset.npy_arrays import EMB, LATENT

GUIDANCE = 2.0
SAMPLING_STEPS = 25
BETAS = {"beta_start": 0.00085, "beta_end": 0.012}  # as Stable Diffusion has them
HEAD = (4, 6, 6)  # channels of an attention head, for the order of text, rows and columns

Text = dict[str, Tensor]
"""As the models of diffusers take it."""


def kind_of(dataset: Any) -> "Denoising | Flow":
    """What can be trained on a dataset of a loader."""
    fields = {field.name: field for field in dataset.fields}
    latent, emb = fields[LATENT], fields[EMB]
    channels, (length, *width) = latent.shape[0], emb.shape
    if dataset.has_moments:  # means and deviations, of what is not folded yet
        channels = channels // 2 * dataset.patch**2
    if channels == 4 and not emb.is_variable:
        return Denoising(prod(width))
    return Flow(channels, length, prod(width), has_mask=emb.is_variable)


class Denoising:
    def __init__(self, text_width: int) -> None:
        self.text_width = text_width
        self.arrays = ("latent", "emb")
        self.schedule = DDPMScheduler(beta_schedule="scaled_linear", **BETAS)

    def new_model(self, width: int) -> UNet2DConditionModel:
        return UNet2DConditionModel(
            in_channels=4,
            out_channels=4,
            block_out_channels=(width, 2 * width),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            cross_attention_dim=self.text_width,
            attention_head_dim=4,
            norm_num_groups=8,
        )

    def text(self, batch: dict[str, Any]) -> Text:
        return {"encoder_hidden_states": batch["emb"].float()}

    def times(self, count: int, random: torch.Generator) -> Tensor:
        return torch.randint(len(self.schedule.timesteps), (count,), generator=random)

    def loss(self, model: Any, latents: Tensor, noise: Tensor, times: Tensor, text: Text) -> Tensor:
        noisy = self.schedule.add_noise(latents, noise, times)
        return mse_loss(model(noisy, times, **text).sample, noise)

    def sample(self, model: Any, latents: Tensor, text: Text, empty: Text) -> Tensor:
        """DDIM, from noise."""
        options = {"clip_sample": False, "timestep_spacing": "trailing"}
        schedule = DDIMScheduler.from_config(self.schedule.config, **options)
        schedule.set_timesteps(SAMPLING_STEPS)
        for time in schedule.timesteps:
            found = guided(model, latents, time, text, empty)
            latents = schedule.step(found, time, latents).prev_sample
        return latents


class Flow:
    def __init__(self, channels: int, length: int, text_width: int, *, has_mask: bool) -> None:
        self.channels, self.length, self.text_width = channels, length, text_width
        self.arrays = ("latent", "emb", "emb_mask") if has_mask else ("latent", "emb")

    def new_model(self, width: int) -> Lumina2Transformer2DModel:
        hidden = 4 * width
        return Lumina2Transformer2DModel(
            in_channels=self.channels,
            hidden_size=hidden,
            num_layers=4,
            num_refiner_layers=1,
            num_attention_heads=hidden // sum(HEAD),
            num_kv_heads=hidden // sum(HEAD),
            multiple_of=8,
            axes_dim_rope=HEAD,
            axes_lens=(self.length + 1, 512, 512),
            cap_feat_dim=self.text_width,
        )

    def text(self, batch: dict[str, Any]) -> Text:
        """Without a mask all of it counts, as with Flux."""
        emb = batch["emb"].float().flatten(2)
        mask = batch.get("emb_mask", torch.ones(emb.shape[:2], dtype=torch.bool, device=emb.device))
        return {"encoder_hidden_states": emb, "encoder_attention_mask": mask}

    def times(self, count: int, random: torch.Generator) -> Tensor:
        """Logit-normal: the middle, where most is to be learnt, comes most often."""
        return torch.randn(count, generator=random).sigmoid()

    def loss(self, model: Any, latents: Tensor, noise: Tensor, times: Tensor, text: Text) -> Tensor:
        noisy = latents.lerp(noise, times[:, None, None, None])
        return mse_loss(model(noisy, times, **text).sample, noise - latents)

    def sample(self, model: Any, latents: Tensor, text: Text, empty: Text) -> Tensor:
        """Euler's steps back from noise, at time 1."""
        for time, after in pairwise(torch.linspace(1, 0, SAMPLING_STEPS + 1).to(latents)):
            velocity = guided(model, latents, time.expand(len(latents)), text, empty)
            latents = latents + (after - time) * velocity
        return latents


def guided(model: Any, latents: Tensor, times: Tensor, text: Text, empty: Text) -> Tensor:
    """Away from what the empty caption would give."""
    without, having = (model(latents, times, **each).sample for each in (empty, text))
    return without + GUIDANCE * (having - without)
