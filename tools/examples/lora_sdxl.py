#!/usr/bin/env python3
"""Train a LoRA of SDXL on latents that `wdsprep encode --model sdxl` made.

    wdsprep encode shards/images shards/latents-1024 --model sdxl --resolution 1024 --shapes sdxl
    accelerate launch --mixed_precision bf16 tools/examples/lora_sdxl.py shards/latents-1024

Here is what only SDXL has: its UNet, which is told the sizes of images, and its loss. The rest is
in `lora_training.py`.
"""

import argparse
from typing import Any

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.training_utils import compute_snr
from lora_training import LoraTraining, parser_of, train_or_say
from torch import Tensor


class SdxlTraining(LoraTraining):
    network = "unet"
    arrays = ("latent", "emb", "pooled", "time_ids")
    layers = ("to_q", "to_k", "to_v", "to_out.0")  # of each attention

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.schedule = DDPMScheduler.from_pretrained(options.model, subfolder="scheduler")

    def open_network(self) -> UNet2DConditionModel:
        return UNet2DConditionModel.from_pretrained(
            self.options.model, subfolder="unet", torch_dtype=self.dtype
        )

    def draw_times(self, random: torch.Generator) -> Tensor:
        most = self.schedule.config.num_train_timesteps
        return torch.randint(most, (self.options.batch,), generator=random)

    def loss_of(self, model: torch.nn.Module, batch: dict[str, Any], step: int) -> Tensor:
        latents = batch["latent"].float()
        noise, times = self.noise_and_times(latents, step)
        noisy = self.schedule.add_noise(latents, noise, times)
        sizes = {"text_embeds": batch["pooled"], "time_ids": batch["time_ids"]}
        predicted = model(
            noisy.to(self.dtype),
            times,
            encoder_hidden_states=batch["emb"].to(self.dtype),
            added_cond_kwargs={name: value.to(self.dtype) for name, value in sizes.items()},
        ).sample
        target = noise
        if self.predicts_velocity:
            target = self.schedule.get_velocity(latents, noise, times)
        losses = (predicted.float() - target).square().flatten(1).mean(1)
        return (losses * self.weights_at(times)).mean()

    @property
    def predicts_velocity(self) -> bool:
        return bool(self.schedule.config.prediction_type == "v_prediction")

    def weights_at(self, times: Tensor) -> Tensor:
        """Return the weight of the loss at each time: 1, or less at little noise (min-SNR)."""
        if not self.options.min_snr:
            return torch.ones_like(times, dtype=torch.float32)
        ratio = compute_snr(self.schedule, times)
        return ratio.clamp(max=self.options.min_snr) / (ratio + self.predicts_velocity)

    def text_inputs(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        empty = self.first(drop_text=1.0)[0]

        def tensor(batch: dict[str, Any], name: str) -> Tensor:
            return batch[name].to(self.accelerator.device, self.dtype)

        return {
            "prompt_embeds": tensor(batch, "emb"),
            "pooled_prompt_embeds": tensor(batch, "pooled"),
            "negative_prompt_embeds": tensor(empty, "emb"),
            "negative_pooled_prompt_embeds": tensor(empty, "pooled"),
        }


def parse() -> argparse.Namespace:
    parser = parser_of(model="stabilityai/stable-diffusion-xl-base-1.0", out="lora-sdxl")
    parser.description = (__doc__ or "").partition("\n")[0]
    parser.add_argument("--min-snr", type=float, default=0.0, help="weigh losses by it, such as 5")
    return parser.parse_args()


def main() -> None:
    train_or_say("lora_sdxl", SdxlTraining, parse())


if __name__ == "__main__":
    main()
