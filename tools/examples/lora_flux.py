#!/usr/bin/env python3
"""Train a LoRA of Flux on latents that `wdsprep encode --model flux` made.

    wdsprep encode shards/images shards/latents-1024 --model flux --resolution 1024 --shapes sdxl
    accelerate launch --mixed_precision bf16 tools/examples/lora_flux.py shards/latents-1024

Here is what only Flux has: its transformer, which takes squares of 2 x 2 as tokens, and the loss of
rectified flow. The rest is in `lora_training.py`. A card of 24 GB needs `--checkpointing` and
`--quantize`, which holds the frozen weights in 4 bits, by bitsandbytes.
"""

import argparse
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers import BitsAndBytesConfig, DiffusionPipeline, FluxTransformer2DModel
from lora_training import LoraTraining, parser_of, train_or_say
from torch import Tensor


def packed(latents: Tensor) -> Tensor:
    """Return squares of 2 x 2 as tokens: of (B, C, H, W) it makes (B, H / 2 * W / 2, 4 C)."""
    squares = latents.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
    return squares.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def places(height: int, width: int, first: float = 0.0) -> Tensor:
    """Return the row and the column of each token of a latent of this size, behind `first`."""
    rows, columns = torch.arange(height / 2), torch.arange(width / 2)
    return torch.cartesian_prod(torch.tensor([first]), rows, columns)


class FluxTraining(LoraTraining):
    network = "transformer"
    kind: ClassVar[Any] = FluxTransformer2DModel
    arrays: Sequence[str] = ("latent", "emb", "pooled")
    layers = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),  # of the image
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),  # of text
    )

    def open_network(self) -> Any:
        four_bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        four_bits["bnb_4bit_compute_dtype"] = self.dtype
        config = BitsAndBytesConfig(**four_bits) if self.options.quantize else None
        model, how = self.options.model, {"torch_dtype": self.dtype, "quantization_config": config}
        return self.kind.from_pretrained(model, subfolder="transformer", **how)

    def draw_times(self, random: torch.Generator) -> Tensor:
        return torch.randn((self.options.batch,), generator=random).sigmoid()  # most in the middle

    def loss_of(self, model: torch.nn.Module, batch: dict[str, Any], step: int) -> Tensor:
        """Return the loss of rectified flow: the way from the latent to the noise is to be told."""
        latents = batch["latent"].float()
        noise, times = self.noise_and_times(latents, step)
        share = times[:, None, None, None]
        predicted = self.predict(model, (1 - share) * latents + share * noise, times, batch)
        return torch.nn.functional.mse_loss(predicted.float(), packed(noise - latents))

    def predict(
        self, model: torch.nn.Module, noisy: Tensor, times: Tensor, batch: dict[str, Any]
    ) -> Tensor:
        """Return what the network says of the tokens of noisy latents.

        Tokens of references follow them, at the same places with 1 in front.
        """
        others = self.references(batch)
        tokens = torch.cat([*map(packed, (noisy, *others))], 1)
        ids = [places(*noisy.shape[-2:]), *(places(*image.shape[-2:], 1.0) for image in others)]
        said = model(
            hidden_states=tokens.to(self.dtype),
            timestep=times.to(self.dtype),
            guidance=self.guidance(model, times),
            pooled_projections=batch["pooled"].to(self.dtype),
            encoder_hidden_states=batch["emb"].to(self.dtype),
            txt_ids=torch.zeros(batch["emb"].shape[1], 3, device=noisy.device),
            img_ids=torch.cat(ids).to(noisy.device),
        ).sample
        return said[:, : noisy[0, 0].numel() // 4]

    def references(self, batch: dict[str, Any]) -> list[Tensor]:
        """Return the latents of images that the network is given beside the noisy ones."""
        del batch
        return []

    def guidance(self, model: torch.nn.Module, times: Tensor) -> Tensor | None:
        is_guided = self.accelerator.unwrap_model(model).config.guidance_embeds
        return torch.full_like(times, self.options.guidance) if is_guided else None

    def text_inputs(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        names = {"prompt_embeds": "emb", "pooled_prompt_embeds": "pooled"}  # guidance is distilled
        return {
            option: batch[name].to(self.accelerator.device, self.dtype)
            for option, name in names.items()
        }

    def open_pipeline(self) -> Any:
        """Open the pipeline with the network in its precision, a part at a time on a GPU."""
        pipeline = DiffusionPipeline.from_pretrained(
            self.options.model, transformer=self.open_network(), torch_dtype=self.dtype
        )
        if self.accelerator.device.type == "cuda":
            pipeline.enable_model_cpu_offload(device=self.accelerator.device)
        return pipeline


def flow_parser(*, model: str, out: str) -> argparse.ArgumentParser:
    parser = parser_of(model=model, out=out)
    parser.add_argument("--quantize", action="store_true", help="the frozen weights in 4 bits")
    parser.add_argument("--guidance", type=float, default=1.0, help="what the model is told of it")
    return parser


def parse() -> argparse.Namespace:
    parser = flow_parser(model="black-forest-labs/FLUX.1-dev", out="lora-flux")
    parser.description = (__doc__ or "").partition("\n")[0]
    return parser.parse_args()


def main() -> None:
    train_or_say("lora_flux", FluxTraining, parse())


if __name__ == "__main__":
    main()
