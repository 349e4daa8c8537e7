#!/usr/bin/env python3
"""Train a LoRA of Flux on latents that `wdsprep encode --model flux` made.

    wdsprep encode shards/images shards/latents-1024 --model flux --resolution 1024 --shapes sdxl
    accelerate launch --mixed_precision bf16 tools/examples/lora_flux.py shards/latents-1024

Neither the VAE nor a text encoder is in memory while it trains: latents and embeddings come from
the shards, and dropped captions are the empty one that `encode` kept. It needs accelerate and peft
beside wdsprep (`pip install accelerate peft`). A card of 24 GB needs `--checkpointing` and
`--quantize`, which holds the frozen weights in 4 bits, by bitsandbytes.

Killed at any moment, the same command goes on from the last checkpoint to the same weights (on a
GPU but for rounding): a checkpoint of accelerate holds the state of the loader, and noise and times
are functions of the seed and the step, whatever the number of processes.

In OUT: pytorch_lora_weights.safetensors, which `pipeline.load_lora_weights(OUT)` reads;
samples.png, pictures that were drawn with it; the last checkpoint.
"""

import argparse
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers import BitsAndBytesConfig, FluxPipeline, FluxTransformer2DModel
from diffusers.training_utils import cast_training_params
from diffusers.utils import convert_state_dict_to_diffusers, make_image_grid
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor

import wdsprep
from wdsprep.errors import UsageError

ARRAYS = ("latent", "emb", "pooled")
LAYERS = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")  # of the image
LAYERS += ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out")  # text
WEIGHTS = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def main() -> None:
    training = LoraTraining(parse())
    transformer = training.new_transformer()
    training.train(transformer)
    if training.accelerator.is_main_process:
        layers = convert_state_dict_to_diffusers(get_peft_model_state_dict(transformer))
        FluxPipeline.save_lora_weights(training.out, transformer_lora_layers=layers)
        del transformer, layers  # makes room for the pipeline
        training.accelerator.free_memory()
        training.draw_samples()
    training.accelerator.wait_for_everyone()
    training.accelerator.end_training()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", help="a dataset of latents")
    parser.add_argument("--join", default=(), help="text that was encoded alone")
    parser.add_argument("--model", default="black-forest-labs/FLUX.1-dev")
    parser.add_argument("--out", type=Path, default=Path("lora-flux"))
    parser.add_argument("--steps", type=int, default=1000, help="of the optimiser")
    parser.add_argument("--batch", type=int, default=4, help="samples, over all processes")
    parser.add_argument("--rank", type=int, default=16, help="of the LoRA")
    parser.add_argument("--rate", type=float, default=1e-4, help="of learning")
    parser.add_argument("--drop-text", type=float, default=0.1, help="the rate of empty captions")
    parser.add_argument("--flip", type=float, default=0.0, help="the rate of mirror images")
    parser.add_argument("--checkpointing", action="store_true", help="less memory, more time")
    parser.add_argument("--quantize", action="store_true", help="the frozen weights in 4 bits")
    parser.add_argument("--guidance", type=float, default=1.0, help="what the model is told of it")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt", action="append", help="of a sample; by default captions")
    parser.add_argument("--sampling-steps", type=int, default=30)
    return parser.parse_args()


class TrainedWeights:
    """The weights that are trained, as a checkpoint of accelerate holds them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def state_dict(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.named.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, parameter in self.named.items():
            parameter.copy_(state[name])


def packed(latents: Tensor) -> Tensor:
    """Return squares of 2 x 2 as tokens: of (B, C, H, W) it makes (B, H / 2 * W / 2, 4 C)."""
    squares = latents.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
    return squares.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def places(height: int, width: int) -> Tensor:
    """Return the row and the column of each token of a latent of this size, behind a zero."""
    return torch.cartesian_prod(torch.zeros(1), torch.arange(height / 2), torch.arange(width / 2))


class LoraTraining:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out = options, options.out
        self.accelerator = Accelerator()  # precision and accumulation: as `launch` was told
        self.dtype = WEIGHTS[self.accelerator.mixed_precision]
        self.out.mkdir(parents=True, exist_ok=True)

    def frozen(self) -> FluxTransformer2DModel:
        four_bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        four_bits["bnb_4bit_compute_dtype"] = self.dtype
        config = BitsAndBytesConfig(**four_bits) if self.options.quantize else None
        model, how = self.options.model, {"torch_dtype": self.dtype, "quantization_config": config}
        return FluxTransformer2DModel.from_pretrained(model, subfolder="transformer", **how)

    def new_transformer(self) -> FluxTransformer2DModel:
        """Open the frozen transformer with a new LoRA in it, which alone is trained, in float32."""
        transformer = self.frozen()
        transformer.requires_grad_(False)
        torch.manual_seed(self.options.seed)
        rank = {"r": self.options.rank, "lora_alpha": self.options.rank}
        transformer.add_adapter(
            LoraConfig(**rank, init_lora_weights="gaussian", target_modules=[*LAYERS])
        )
        cast_training_params(transformer, torch.float32)
        if self.options.checkpointing:
            transformer.enable_gradient_checkpointing()
        return transformer.train()

    def batches(self) -> Any:
        """Open the loader. A step has one shape in all processes, and each has its share of it."""
        return wdsprep.load(
            self.options.data,
            join=self.options.join,
            fields=ARRAYS,
            global_batch=self.options.batch,
            seed=self.options.seed,
            epochs=None,
            drop_text=self.options.drop_text,
            flip=self.options.flip,
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
            device=self.accelerator.device,
        )

    def train(self, transformer: FluxTransformer2DModel) -> None:
        options, accelerator, loader = self.options, self.accelerator, self.batches()
        weights = TrainedWeights(transformer)
        trained = [*weights.named.values()]
        model, optimizer = accelerator.prepare(
            transformer, torch.optim.AdamW(trained, lr=options.rate)
        )
        accelerator.register_for_checkpointing(weights, loader)
        # The frozen weights stay out of checkpoints.
        accelerator.register_save_state_pre_hook(lambda _models, states, _folder: states.clear())
        accelerator.register_load_state_pre_hook(lambda models, _folder: models.clear())
        self.resume()
        feed, each = iter(loader), accelerator.gradient_accumulation_steps
        while loader.step < options.steps * each:
            batch = next(feed)
            with accelerator.accumulate(model):
                loss = self.loss_of(model, batch, loader.step)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            mean = accelerator.reduce(loss.detach(), "mean").item()
            step, rest = divmod(loader.step, each)
            if rest == 0:
                accelerator.print(f"step {step} loss {mean:.4f}", flush=True)
                if step % options.save_every == 0 or step == options.steps:
                    self.save(step)

    def loss_of(self, model: torch.nn.Module, batch: dict[str, Tensor], step: int) -> Tensor:
        """Return the loss of rectified flow: the way from the latent to the noise is to be told."""
        latents = batch["latent"].float()
        noise, times = self.noise_and_times(latents, step)
        share = times[:, None, None, None]
        tokens = packed((1 - share) * latents + share * noise)
        is_guided = self.accelerator.unwrap_model(model).config.guidance_embeds
        made = model(
            tokens.to(self.dtype),
            timestep=times.to(self.dtype),
            guidance=torch.full_like(times, self.options.guidance) if is_guided else None,
            pooled_projections=batch["pooled"].to(self.dtype),
            encoder_hidden_states=batch["emb"].to(self.dtype),
            txt_ids=torch.zeros(batch["emb"].shape[1], 3, device=latents.device),
            img_ids=places(*latents.shape[-2:]).to(latents.device),
        ).sample
        return torch.nn.functional.mse_loss(made.float(), packed(noise - latents))

    def noise_and_times(self, latents: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return this process's share of those of the step, which are drawn anew from the seed."""
        random = torch.Generator().manual_seed(1_000_003 * self.options.seed + step)
        noise = torch.randn((self.options.batch, *latents.shape[1:]), generator=random)
        times = torch.randn((self.options.batch,), generator=random).sigmoid()  # most in the middle
        mine = self.accelerator.process_index * len(latents) + torch.arange(len(latents))
        return noise[mine].to(latents.device), times[mine].to(latents.device)

    def save(self, step: int) -> None:
        """Write a checkpoint under another name first: one that is there is a whole one."""
        begun = self.out / "checkpoint.part"
        self.accelerator.save_state(str(begun))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            before = self.checkpoints()
            begun.replace(self.out / f"checkpoint-{step:08d}")
            for folder in before:
                shutil.rmtree(folder)

    def resume(self) -> None:
        if self.accelerator.is_main_process:
            shutil.rmtree(self.out / "checkpoint.part", ignore_errors=True)
        if found := self.checkpoints():
            self.accelerator.print(f"going on from {found[-1]}", flush=True)
            self.accelerator.load_state(str(found[-1]))

    def checkpoints(self) -> list[Path]:
        return sorted(self.out.glob("checkpoint-*"))

    def draw_samples(self) -> None:
        """Draw pictures with the whole pipeline and the LoRA, in the size of the first latent."""
        options = self.options
        pipeline = FluxPipeline.from_pretrained(
            options.model, transformer=self.frozen(), torch_dtype=self.dtype
        )
        pipeline.load_lora_weights(self.out)
        if self.accelerator.device.type == "cuda":
            pipeline.enable_model_cpu_offload(device=self.accelerator.device)  # a part at a time
        how = {"global_batch": 1, "fields": ("latent", "txt"), "rank": 0, "world_size": 1}
        shown = list(islice(wdsprep.load(options.data, join=options.join, **how), 4))
        sides = [pipeline.vae_scale_factor * side for side in shown[0]["latent"].shape[-2:]]
        how = {"height": sides[0], "width": sides[1], "num_inference_steps": options.sampling_steps}
        pictures = [
            pipeline(prompt, **how, generator=torch.Generator().manual_seed(options.seed)).images[0]
            for prompt in options.prompt or [batch["txt"][0] for batch in shown]
        ]
        make_image_grid(pictures, rows=1, cols=len(pictures)).save(self.out / "samples.png")


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:  # such as a dataset of another model, or of too few samples
        raise SystemExit(f"lora_flux: {error}") from None
