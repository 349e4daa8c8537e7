#!/usr/bin/env python3
r"""Train a LoRA of Flux Kontext or Qwen-Image-Edit on latents of pairs, what was before and after.

    wdsprep pack after/ shards/pairs --role source=before/
    wdsprep encode shards/pairs shards/edits --resolution 1024 --shapes sdxl \
        --model black-forest-labs/FLUX.1-Kontext-dev --roles target,source
    accelerate launch --mixed_precision bf16 tools/examples/lora_edit.py shards/edits

Here is what edits have beside text: latents of references, whose tokens follow the noisy ones.
Kontext takes one, which has 1 in place of 0 in front of its places; Qwen-Image-Edit-Plus takes
several (`--references source,source_1`), and is told the shape of each. The rest is in
`lora_flux.py` and `lora_training.py`.
"""

import argparse
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel
from lora_flux import FluxTraining, flow_parser, packed
from lora_training import LoraTraining, pipeline_class, train_or_say
from torch import Tensor

from wdsprep.errors import UsageError


class KontextTraining(FluxTraining):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.names = options.references.split(",")
        self.arrays = (*self.arrays, *self.names)

    def references(self, batch: dict[str, Any]) -> list[Tensor]:
        """Return the references of a batch, which all have one number of them."""
        return [batch[name].float() for name in self.names if name in batch]

    def image_inputs(self, pipeline: Any, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the first reference, of which the pipeline takes the latents."""
        return {"image": self.references(batch)[0].to(pipeline.device, self.dtype)}

    def size_inputs(self, height: int, width: int) -> dict[str, int]:
        return {"height": height, "width": width, "max_area": height * width}


class QwenTraining(KontextTraining):
    kind = QwenImageTransformer2DModel
    arrays = ("latent", "emb", "emb_mask")
    layers = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")  # of text the last is unused

    def predict(
        self, model: torch.nn.Module, noisy: Tensor, times: Tensor, batch: dict[str, Any]
    ) -> Tensor:
        images = [noisy, *self.references(batch)]
        tokens = torch.cat([*map(packed, images)], 1)
        shapes = [(1, image.shape[-2] // 2, image.shape[-1] // 2) for image in images]
        said = model(
            hidden_states=tokens.to(self.dtype),
            timestep=times.to(self.dtype),
            guidance=self.guidance(model, times),
            encoder_hidden_states_mask=batch["emb_mask"],
            encoder_hidden_states=batch["emb"].to(self.dtype),
            img_shapes=[shapes] * len(noisy),
        ).sample
        return said[:, : noisy[0, 0].numel() // 4]

    def text_inputs(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        device = self.accelerator.device
        mask = batch["emb_mask"].to(device)
        return {
            "prompt_embeds": batch["emb"].to(device, self.dtype),
            "prompt_embeds_mask": mask.long(),
        }

    @torch.no_grad()
    def image_inputs(self, pipeline: Any, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the references as pictures, of which the pipeline makes latents once more."""
        config = pipeline.vae.config
        pictures = []
        for latents in self.references(batch):
            deviation, mean = (
                torch.tensor(values, device=pipeline.device)[:, None, None]
                for values in (config.latents_std, config.latents_mean)
            )
            raw = (latents.to(pipeline.device) * deviation + mean)[:, :, None]
            pixels = pipeline.vae.decode(raw.to(pipeline.vae.dtype)).sample[:, :, 0]
            pictures += pipeline.image_processor.postprocess(pixels.float())
        return {"image": pictures if len(pictures) > 1 else pictures[0]}

    def size_inputs(self, height: int, width: int) -> dict[str, int]:
        return {"height": height, "width": width}


TRAININGS = {
    "FluxKontextPipeline": KontextTraining,
    "QwenImageEditPipeline": QwenTraining,
    "QwenImageEditPlusPipeline": QwenTraining,
}


def training_for(options: argparse.Namespace) -> LoraTraining:
    kind = pipeline_class(options.model).__name__
    if kind not in TRAININGS:
        raise UsageError(f"--model {options.model} is a {kind}: give one of {', '.join(TRAININGS)}")
    return TRAININGS[kind](options)


def parse() -> argparse.Namespace:
    parser = flow_parser(model="black-forest-labs/FLUX.1-Kontext-dev", out="lora-edit")
    parser.description = (__doc__ or "").partition("\n")[0]
    parser.add_argument("--references", default="source", help="what the network is shown")
    parser.set_defaults(drop_text=0.0)  # what stands for no text depends on the images, with Qwen
    return parser.parse_args()


def main() -> None:
    train_or_say("lora_edit", training_for, parse())


if __name__ == "__main__":
    main()
