#!/usr/bin/env python3
"""Train a small diffusion model on latent shards: an example to read, and to begin one's own from.

    wdsprep demo                                # makes demo/latents-256 and demo/latents-512
    tools/examples/train_example.py demo/latents-256 demo/latents-512 --out demo/training
    torchrun --nproc-per-node 2 tools/examples/train_example.py ...      # the same on two processes

    tools/examples/train_example.py demo/images demo/images --online own --out demo/online
                                                # the same losses, and no latents on disk

It is what matters of a real trainer, at toy width: phases of growing resolution, each going on with
the weights of the one before; a moving average of the weights; captions dropped at times, for
classifier-free guidance. The latents say what is trained (`train_models`): a UNet with the DDPM
loss, as Stable Diffusion, or a transformer with that of rectified flow, as newer families. On
several ranks, each takes its part of the same global batch and of the same noise, so the losses
agree but for rounding. Where torch finds GPUs, each rank of a machine trains on one of its own,
else on the CPU; the checkpoints of each load on the other.

Ctrl-C, or a SIGTERM to any rank, has it save at the end of the step under way and stop; killed at
any moment it has the last checkpoint. Started again it goes on from there, in mid-epoch, and its
losses are those of a run that was never stopped (on a GPU but for rounding): the loader's state is
a few numbers, and all chance is a function of the seed and the step.

With `--online own` each rank encodes images on its own device while it trains; with `--online ray`
other processes do, on Ray. A checkpoint of one way goes on in any other, but for the precision in
which a GPU and a CPU encode: the loader refuses to go on with latents that were made otherwise.

`--track wandb` or `--track tensorboard` tells of the losses as training goes, over the steps: a run
that goes on stands in one group with the one before.

In OUT: checkpoint.pt, losses.csv, losses.png, and for each phase samples-N.png, where the upper row
is decoded from stored latents and the lower one is sampled for the same captions.
"""

import argparse
import contextlib
import copy
import csv
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from train_models import kind_of
from train_pictures import grid, plot

import wdsprep
from wdsprep.dataset.stored_dataset import read_manifest
from wdsprep.encoding.models.find_model import find_model
from wdsprep.encoding.models.vae import Decoder
from wdsprep.errors import UsageError
from wdsprep.runners.track import TRACKERS, Tracking, check_tracker
from wdsprep.store import open_store

SEED = 0
DROP_TEXT = 0.1
SHOWN = 5  # samples in a grid
ALONE = {"rank": 0, "world_size": 1}


def main() -> None:
    options = parse()
    device, backend = place()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:  # set by torchrun
        dist.init_process_group(backend)
    trainer = Trainer(options, device)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, trainer.ask_to_stop)
    try:
        with contextlib.closing(trainer.tracking):
            trainer.run()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", nargs="+", help="a dataset for each phase, in their order")
    parser.add_argument("--online", choices=["own", "ray"], help="the datasets are of images")
    parser.add_argument("--model", default="tiny", help="that encodes images, with --online")
    parser.add_argument("--resolutions", default="256,512", help="of each phase, with --online")
    parser.add_argument("--steps", help="of each phase; by default 300, then 40 each")
    parser.add_argument("--batch", type=int, default=8, help="samples of a step, over all ranks")
    parser.add_argument("--width", type=int, default=32, help="of the smallest layer, in channels")
    parser.add_argument("--rate", type=float, default=1e-3, help="of learning")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument(
        "--vae", help="of what model, for samples; by default what made the latents"
    )
    parser.add_argument("--track", choices=TRACKERS, default="", help="tell this of the losses")
    parser.add_argument("--out", type=Path, default=Path("training"))
    options = parser.parse_args()
    try:
        check_tracker(options.track)
    except UsageError as error:
        parser.error(str(error))
    steps = options.steps or ",".join(["300", *["40"] * (len(options.data) - 1)])
    options.steps = [int(count) for count in steps.split(",")]
    options.resolutions = [int(side) for side in options.resolutions.split(",")]
    if len(options.steps) != len(options.data):
        parser.error(
            f"--steps names {len(options.steps)} phases, and there are {len(options.data)}"
        )
    if options.online and len(options.resolutions) != len(options.data):
        parser.error(f"--resolutions names {len(options.resolutions)} of {len(options.data)}")
    if options.online == "ray" and "WORLD_SIZE" in os.environ:
        parser.error("--online ray trains in one process: give each of several its feed.trainers")
    return options


def place() -> tuple[torch.device, str]:
    """The device of this rank, and what ranks reach each other by."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if ranks > gpus:
        sys.exit(
            f"{ranks} ranks on this machine, and torch finds {gpus} GPU{'s' * (gpus > 1)}: give "
            f"--nproc-per-node {gpus}, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))), "nccl"


class Trainer:
    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.phase = 0
        self.asked_to_stop = False
        first = wdsprep.load(options.data[0], encode=self.how(), global_batch=1, **ALONE)
        self.kind = kind_of(first.plan.datasets[0])
        self.vae = find_model(options.vae or self.maker(), text="none")
        torch.manual_seed(SEED)
        self.network = self.kind.new_model(options.width).to(device)
        self.average = copy.deepcopy(self.network).requires_grad_(False)
        self.model = DistributedDataParallel(self.network) if self.world > 1 else self.network
        self.optimiser = torch.optim.AdamW(self.network.parameters(), lr=options.rate)
        self.losses: list[tuple[int, int, float]] = []
        options.out.mkdir(parents=True, exist_ok=True)
        kind = options.track if self.rank == 0 else ""
        told = vars(options) | {"out": str(options.out)}
        self.tracking = Tracking(kind, options.out.resolve().name, "step", told)

    def run(self) -> None:
        state = self.resume()
        for phase in range(self.phase, len(self.options.steps)):
            self.phase = phase
            self.train_phase(state)
            state = None  # the next phase begins at its start
            if self.rank == 0:
                self.draw_samples()
                plot([loss for _, _, loss in self.losses], self.options.out / "losses.png")

    def train_phase(self, state: dict[str, Any] | None) -> None:
        with self.opened(state) as loader:
            batches, last = iter(loader), self.options.steps[self.phase]
            while loader.step < last:
                batch = next(batches)
                loss, stop = self.agree(self.train_step(loader.step, batch))
                self.losses.append((self.phase, loader.step, loss))
                if self.tracking.is_due or loader.step == last:
                    self.tracking.log(len(self.losses), {"loss": loss, "phase": self.phase})
                if self.rank == 0:
                    print(f"phase {self.phase} step {loader.step} loss {loss:.4f}", flush=True)
                if stop or loader.step % self.options.save_every == 0 or loader.step == last:
                    self.save(loader.state_dict())
                if stop:
                    self.leave(loader.step)

    def ask_to_stop(self, *_: object) -> None:
        """Half a step cannot be saved, so the one under way is ended first."""
        self.asked_to_stop = True

    def leave(self, step: int) -> None:
        if self.rank == 0:
            print(f"saved at phase {self.phase} step {step}: run the same command to go on")
        sys.exit(130)

    @contextlib.contextmanager
    def opened(self, state: dict[str, Any] | None) -> Iterator[Any]:
        """The batches of a phase from a state on, from wherever they are to come."""
        wanted = {"global_batch": self.options.batch, "seed": SEED, "epochs": None}
        wanted |= {"drop_text": DROP_TEXT, "pad": "longest"}
        url = self.options.data[self.phase]
        if self.options.online == "ray":
            with wdsprep.stream(url, encode=self.how(), state=state, **wanted) as feed:
                yield feed.trainers[0]
            return
        loader = wdsprep.load(url, encode=self.how(), device=self.device, **wanted)
        if state is not None:
            loader.load_state_dict(state)
        yield loader

    def maker(self) -> str:
        """The model that makes the latents, or made them."""
        if self.options.online:
            return self.options.model
        return read_manifest(open_store(self.options.data[0])).extra["model"]

    def how(self) -> wdsprep.Encode | None:
        if not self.options.online:
            return None
        resolution = self.options.resolutions[self.phase]
        return wdsprep.Encode(resolution=resolution, model=self.options.model)

    def train_step(self, step: int, batch: dict[str, Any]) -> Tensor:
        batch = {name: batch[name].to(self.device) for name in self.kind.arrays}
        latents, text = batch["latent"].float(), self.kind.text(batch)
        noise, times = self.chance(step, latents)
        loss = self.kind.loss(self.model, latents, noise, times, text)
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimiser.step()
        self.follow(min(0.995, (step + 1) / (step + 10)))
        return loss.detach()

    def chance(self, step: int, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Noise and times of this rank's rows, cut from those of the whole global batch, which are
        drawn on the CPU: a GPU's would be others."""
        size = self.options.batch
        random = torch.Generator().manual_seed(SEED + 1_000_003 * self.phase + step)
        noise = torch.randn((size, *latents.shape[1:]), generator=random)
        times = self.kind.times(size, random)
        mine = slice(self.rank * len(latents), (self.rank + 1) * len(latents))
        return noise[mine].to(latents.device), times[mine].to(latents.device)

    @torch.no_grad()
    def follow(self, kept: float) -> None:
        for slow, fast in zip(self.average.parameters(), self.network.parameters(), strict=True):
            slow.lerp_(fast, 1 - kept)

    def agree(self, loss: Tensor) -> tuple[float, bool]:
        """The mean loss of all ranks, and whether any was asked to stop: all stop at one step."""
        both = torch.stack([loss, torch.tensor(float(self.asked_to_stop), device=loss.device)])
        if self.world > 1:
            dist.all_reduce(both)
            both /= self.world
        return float(both[0]), bool(both[1])

    def save(self, state: dict[str, Any]) -> None:
        """Under another name first: a checkpoint that is there is a whole one."""
        if self.rank != 0:
            return
        out = self.options.out
        checkpoint = {
            "network": self.network.state_dict(),
            "average": self.average.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "phase": self.phase,
            "loader": state,
            "losses": self.losses,
        }
        begun = out / "checkpoint.part"
        with begun.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        begun.replace(out / "checkpoint.pt")
        with (out / "losses.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("phase", "step", "loss"), *self.losses])

    def resume(self) -> dict[str, Any] | None:
        """Take up the last checkpoint, if there is one; the state of its phase's loader."""
        path = self.options.out / "checkpoint.pt"
        if not path.exists():
            return None
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        self.network.load_state_dict(checkpoint["network"])
        self.average.load_state_dict(checkpoint["average"])
        self.optimiser.load_state_dict(checkpoint["optimiser"])
        self.losses = [tuple(row) for row in checkpoint["losses"]]
        self.phase = checkpoint["phase"]
        state: dict[str, Any] = checkpoint["loader"]
        return state

    @torch.no_grad()
    def draw_samples(self) -> None:
        """Stored latents above, samples for their captions below."""
        url = self.options.data[self.phase]
        wanted = {"encode": self.how(), "fields": (*self.kind.arrays, "txt"), **ALONE}
        wanted |= {"global_batch": SHOWN, "device": self.device}
        shown, dropped = (
            next(iter(wdsprep.load(url, drop_text=rate, **wanted))) for rate in (0, 1)
        )
        latents, random = shown["latent"], torch.Generator().manual_seed(SEED)
        noise = torch.randn(latents.shape, generator=random).to(self.device)
        text, empty = map(self.kind.text, (shown, dropped))
        made = self.kind.sample(self.average, noise, text, empty)
        vae = Decoder(self.vae)
        rows = [[Image.fromarray(vae.decode(each)) for each in row] for row in (latents, made)]
        grid(rows, shown["txt"]).save(self.options.out / f"samples-{rows[0][0].width}.png")


if __name__ == "__main__":
    main()
