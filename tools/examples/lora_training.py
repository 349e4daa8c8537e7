"""What the LoRA examples share: the options, the loop, checkpoints and pictures.

`lora_sdxl.py`, `lora_flux.py` and `lora_edit.py` say what differs: the network, its inputs and its
loss. Neither
the VAE nor a text encoder is in memory while a LoRA is trained: latents and embeddings come from
the shards, and dropped captions are the empty one that `encode` kept. It needs accelerate and peft
beside wdsprep: `pip install accelerate peft`.

Killed at any moment, the same command goes on from the last checkpoint to the same weights (on a
GPU but for rounding): a checkpoint of accelerate holds the state of the loader; noise, times and
the learning rate are functions of the seed and the step, whatever the number of processes.

In OUT: pytorch_lora_weights.safetensors, which `pipeline.load_lora_weights(OUT)` reads;
samples.png, pictures that were drawn with it; samples-*.png of `--sample-every`; the last
checkpoint.
"""

import argparse
import contextlib
import math
import shutil
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import huggingface_hub
import torch
import transformers
from accelerate import Accelerator
from diffusers import DiffusionPipeline
from diffusers.training_utils import cast_training_params
from diffusers.utils import convert_state_dict_to_diffusers, make_image_grid
from huggingface_hub.errors import HfHubHTTPError
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor

import wdsprep
from wdsprep.errors import UsageError, WdsprepError

WEIGHTS = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TEXT_PARTS = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
PICTURES = 4
RUNNING = 100
"""The steps over which the mean of the loss is shown."""


def parser_of(*, model: str, out: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("data", help="a dataset of latents")
    add("--join", default=(), help="text that was encoded alone")
    add("--model", default=model, help="a repository of the hub, or a folder")
    add("--out", type=Path, default=Path(out), help="a folder for the LoRA")
    add("--steps", type=int, default=1000, help="of the optimiser")
    add("--batch", type=int, default=4, help="samples, over all processes")
    add("--rank", type=int, default=16, help="of the LoRA")
    add("--rate", type=float, default=1e-4, help="of learning")
    add("--warm-up", type=int, default=0, help="steps in which the rate rises from 0")
    add("--schedule", choices=("constant", "cosine"), default="constant", help="of the rate")
    add("--drop-text", type=float, default=0.1, help="the rate of empty captions")
    add("--flip", type=float, default=0.0, help="the rate of mirror images")
    add("--checkpointing", action="store_true", help="less memory, more time")
    add("--save-every", type=int, default=100, help="steps between checkpoints")
    add("--sample-every", type=int, default=0, help="steps between pictures; 0 for the end alone")
    add("--log-every", type=int, default=50, help="steps between lines where there is no terminal")
    add("--seed", type=int, default=0, help="of the LoRA, the order, noise and times")
    add("--prompt", action="append", help="of a picture at the end, in place of captions")
    add("--sampling-steps", type=int, default=30, help="of a picture")
    return parser


class TrainedWeights:
    """The weights that are trained, as a checkpoint of accelerate holds them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def state_dict(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.named.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take the weights of a checkpoint; raise UsageError if it is of another LoRA."""
        shapes = {name: parameter.shape for name, parameter in self.named.items()}
        if {name: value.shape for name, value in state.items()} != shapes:
            raise UsageError(
                "the checkpoint is of another LoRA: give the --rank and --model that it was begun "
                "with, or another --out"
            )
        for name, parameter in self.named.items():
            parameter.copy_(state[name])


class LoraTraining:
    """A training of a LoRA; a subclass for each family has the network and the loss."""

    network: ClassVar[str]
    """The part of the pipeline that gets the LoRA: unet or transformer."""
    arrays: Sequence[str]
    """The arrays of a batch that the loss takes."""
    layers: ClassVar[Sequence[str]]
    """The ends of the names of the layers that get a LoRA."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out = options, options.out
        self.first = cache(self._first)
        self.accelerator = Accelerator()  # precision and accumulation: as `launch` was told
        self.dtype = WEIGHTS[self.accelerator.mixed_precision]

    def open_network(self) -> torch.nn.Module:
        """Open the network with its frozen weights."""
        raise NotImplementedError

    def loss_of(self, model: torch.nn.Module, batch: dict[str, Any], step: int) -> Tensor:
        raise NotImplementedError

    def draw_times(self, random: torch.Generator) -> Tensor:
        """Draw the times of all samples of a step."""
        raise NotImplementedError

    def text_inputs(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return what the pipeline takes in place of a prompt: embeddings of a batch."""
        raise NotImplementedError

    def image_inputs(self, pipeline: Any, batch: dict[str, Any]) -> dict[str, Any]:
        """Return what else the pipeline takes of a batch: nothing, if it only takes a prompt."""
        del pipeline, batch
        return {}

    def size_inputs(self, height: int, width: int) -> dict[str, int]:
        """Return what tells the pipeline the size of a picture."""
        return {"height": height, "width": width}

    def run(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        network = self.add_lora(self.open_network())
        self.train(network)
        if self.accelerator.is_main_process:
            lora = convert_state_dict_to_diffusers(get_peft_model_state_dict(network))
            kind = pipeline_class(self.options.model)
            kind.save_lora_weights(self.out, **{f"{self.network}_lora_layers": lora})
            del network, lora  # makes room for the pipeline
            self.accelerator.free_memory()
            print(f"{self.out}/pytorch_lora_weights.safetensors written", flush=True)
            self.draw_at_the_end()
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()

    def add_lora(self, network: Any) -> Any:
        """Put a new LoRA into a network, which alone is trained, in float32."""
        network.requires_grad_(False)
        torch.manual_seed(self.options.seed)
        rank = {"r": self.options.rank, "lora_alpha": self.options.rank}
        config = LoraConfig(**rank, init_lora_weights="gaussian", target_modules=[*self.layers])
        network.add_adapter(config)
        cast_training_params(network, torch.float32)
        if self.options.checkpointing:
            network.enable_gradient_checkpointing()
        return network.train()

    def batches(self) -> Any:
        """Open the loader. A step has one shape in all processes, and each has its share of it."""
        return wdsprep.load(
            self.options.data,
            join=self.options.join,
            fields=self.arrays,
            global_batch=self.options.batch,
            seed=self.options.seed,
            epochs=None,
            drop_text=self.options.drop_text,
            flip=self.options.flip,
            pad="longest",
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
            device=self.accelerator.device,
        )

    def train(self, network: Any) -> None:
        options, accelerator, loader = self.options, self.accelerator, self.batches()
        weights = TrainedWeights(network)
        trained = [*weights.named.values()]
        model, optimizer = accelerator.prepare(network, torch.optim.AdamW(trained, options.rate))
        accelerator.register_for_checkpointing(weights, loader)
        # The frozen weights stay out of checkpoints.
        accelerator.register_save_state_pre_hook(lambda _models, states, _folder: states.clear())
        accelerator.register_load_state_pre_hook(lambda models, _folder: models.clear())
        self.resume()
        feed, parts = iter(loader), accelerator.gradient_accumulation_steps
        log = Log(options.steps, options.log_every, loader.step // parts)
        while loader.step < options.steps * parts:
            batch = next(feed)
            for group in optimizer.param_groups:
                group["lr"] = options.rate * self.rate_at((loader.step - 1) // parts)
            with accelerator.accumulate(model):
                loss = self.loss_of(model, batch, loader.step)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            mean = accelerator.reduce(loss.detach(), "mean").item()
            step, rest = divmod(loader.step, parts)
            if rest == 0:
                if accelerator.is_main_process:
                    log.add(step, mean)
                is_drawn = options.sample_every and step % options.sample_every == 0
                if is_drawn or step % options.save_every == 0 or step == options.steps:
                    self.save(step)
                if is_drawn:
                    with log.left_out():
                        self.draw_on_the_way(network, step)

    def rate_at(self, step: int) -> float:
        """Return the share of the learning rate at a step, the first of which is 0."""
        warm_up, steps = self.options.warm_up, self.options.steps
        if step < warm_up:
            return (step + 1) / warm_up
        if self.options.schedule == "constant":
            return 1.0
        return (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))) / 2

    def noise_and_times(self, latents: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return this process's share of those of the step, which are drawn anew from the seed."""
        random = torch.Generator().manual_seed(1_000_003 * self.options.seed + step)
        noise = torch.randn((self.options.batch, *latents.shape[1:]), generator=random)
        times = self.draw_times(random)
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

    @torch.no_grad()
    def draw_on_the_way(self, network: Any, step: int) -> None:
        """Draw the first captions of the data, by their embeddings: no text encoder is loaded."""
        if self.accelerator.is_main_process:
            network.eval()
            parts = {**dict.fromkeys(TEXT_PARTS), self.network: network}
            pipeline = DiffusionPipeline.from_pretrained(
                self.options.model, **parts, torch_dtype=self.dtype
            ).to(self.accelerator.device)
            inputs = [
                self.text_inputs(batch) | self.image_inputs(pipeline, batch)
                for batch in self.first()
            ]
            self.draw(pipeline, inputs, self.out / f"samples-{step:08d}.png")
            network.train()
        self.accelerator.wait_for_everyone()

    def draw_at_the_end(self) -> None:
        """Draw pictures with the whole pipeline, which loads the LoRA as any user would."""
        prompts = self.options.prompt or [batch["txt"][0] for batch in self.first()]
        pipeline = self.open_pipeline()
        pipeline.load_lora_weights(self.out)
        inputs = [
            {"prompt": text, **self.image_inputs(pipeline, batch)}
            for text, batch in zip(prompts, cycle(self.first()), strict=False)
        ]
        self.draw(pipeline, inputs, self.out / "samples.png")

    def open_pipeline(self) -> Any:
        pipeline = DiffusionPipeline.from_pretrained(self.options.model, torch_dtype=self.dtype)
        return pipeline.to(self.accelerator.device)

    def _first(self, **more: Any) -> list[dict[str, Any]]:
        """Return the first samples of the data, each as a batch."""
        fields = (*self.arrays, "txt")
        how = {"global_batch": 1, "fields": fields, "pad": "longest", "rank": 0, "world_size": 1}
        loader = wdsprep.load(self.options.data, join=self.options.join, **how, **more)
        return list(islice(loader, PICTURES))

    def draw(self, pipeline: Any, inputs: Sequence[dict[str, Any]], path: Path) -> None:
        """Draw a row of pictures, in the size of the first latent."""
        print(f"drawing {len(inputs)} pictures into {path}", flush=True)
        pipeline.set_progress_bar_config(disable=True)
        height, width = (
            pipeline.vae_scale_factor * side for side in self.first()[0]["latent"].shape[-2:]
        )
        options = self.options
        how = {**self.size_inputs(height, width), "num_inference_steps": options.sampling_steps}
        pictures = []
        for words in inputs:
            random = torch.Generator().manual_seed(options.seed)
            with self.accelerator.autocast():
                pictures += pipeline(**words, **how, generator=random).images
        make_image_grid(pictures, rows=1, cols=len(pictures)).save(path)


class Log:
    """The step, the loss and the time left: one line that is replaced, or a line now and then."""

    def __init__(self, steps: int, every: int, first: int) -> None:
        self._steps, self._every, self._first = steps, every, first
        self._losses: deque[float] = deque(maxlen=RUNNING)
        self._began = time.monotonic()

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Leave the time of a block out of that of steps."""
        began = time.monotonic()
        yield
        self._began += time.monotonic() - began

    def add(self, step: int, loss: float) -> None:
        self._losses.append(loss)
        a_step = (time.monotonic() - self._began) / (step - self._first)
        left = time.strftime("%H:%M:%S", time.gmtime((self._steps - step) * a_step))
        line = (
            f"step {step} of {self._steps}: loss {loss:.4f}, mean of the last "
            f"{len(self._losses)} {sum(self._losses) / len(self._losses):.4f}, "
            f"{a_step:.2f} s a step, {left} left"
        )
        if sys.stdout.isatty():
            end = "\n" if step == self._steps else ""
            print(f"\r\x1b[K{line}", end=end, flush=True)
        elif step % self._every == 0 or step in (self._first + 1, self._steps):
            print(line, flush=True)


def pipeline_class(model: str) -> Any:
    """Return the class of a model's pipeline."""
    return getattr(diffusers, DiffusionPipeline.load_config(model)["_class_name"])


def check_model(model: str) -> None:
    """Raise OSError if the hub does not give a model that is no folder here."""
    if Path(model).is_dir():
        return
    try:
        huggingface_hub.hf_hub_download(model, "model_index.json")
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise OSError(
            f"{model} is no folder here, and the hub does not give it ({one_line(error)}): look at "
            "the name and the network, log in with `hf auth login` if it has a licence to accept, "
            "or give the folder of a pipeline as --model"
        ) from error


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def train_or_say(
    program: str,
    training: Callable[[argparse.Namespace], LoraTraining],
    options: argparse.Namespace,
) -> None:
    """Train, or end with one line, such as for a dataset of another model or without a network."""
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    huggingface_hub.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", "`torch_dtype` is deprecated", FutureWarning)
    try:
        check_model(options.model)
        training(options).run()
    except (WdsprepError, OSError) as error:
        raise SystemExit(f"{program}: {one_line(error)}") from None
    except KeyboardInterrupt:
        said = "interrupted: the same command goes on from the last checkpoint"
        raise SystemExit(f"{program}: {said}") from None
