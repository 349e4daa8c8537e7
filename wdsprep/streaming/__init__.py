"""Latents straight into trainers: read and decoded here, encoded there, on one Ray cluster.

    feed = wdsprep.stream(
        "shards/images", resolution=256, model="sd2", global_batch=1024, trainers=8
    )
    # in the process of trainer `rank`, which was given feed.trainers[rank]:
    for batch in trainer:                        # latent, emb, key: this rank's share
        train(batch)
        state = trainer.state_dict()

1. Numbers of pieces go in, in the order of training, as far ahead as the trainers' pace allows
   (`source`, `line`).
2. Decoders read and crop on CPUs, encoders make latents on GPUs; Ray Data runs both as pools that
   grow and shrink, and stops them when the object store fills (`stages`).
3. `streaming_split` deals the pieces out, one trainer after the other. With `preserve_order` that
   is exact: a trainer has every W-th piece, and joins them to batches (`trainer`).

The batches are those of `wdsprep.load` on the stored latents, and so are the states: a run may stop
in one and go on in the other. A decoder or encoder that dies is replaced by Ray, and its piece is
made again; a trainer or the driver that dies begins a new stream from its last state.
"""

import logging
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import ray
import torch
from ray import cloudpickle
from ray.data import ActorPoolStrategy, DataContext, read_datasource

from wdsprep.arrays import fields_of
from wdsprep.errors import UsageError
from wdsprep.loader import load
from wdsprep.loader.catalog import Stream
from wdsprep.online import Encode
from wdsprep.online.batches import BatchEncoder
from wdsprep.order import RUN
from wdsprep.runners.cluster import connected
from wdsprep.streaming.line import Line, most_of
from wdsprep.streaming.source import Numbers, new_pace
from wdsprep.streaming.stages import Decoder, Encoder
from wdsprep.streaming.trainer import Stage, Trainer

__all__ = ["Feed", "Stage", "Trainer", "stream"]
LEAST = 2  # cores of a Ray that is started here: one worker of each stage
PER_WORKER = 4  # pieces that wait for a worker, are worked on, or wait behind it
PER_TRAINER = 4  # steps

Pool = tuple[int, int]


def stream(
    images: str | Stream | Iterable[str | Stream],
    *,
    resolution: int,
    global_batch: int,
    model: str = "sd2",
    trainers: int = 1,
    latents: str = "sample",
    text: str = "emb",
    dtype: str = "auto",
    noise_seed: int = 0,
    batch_size: int = 0,
    device: str = "auto",
    seed: int = 0,
    epochs: int | None = 1,
    step: int = 0,
    state: Mapping[str, Any] | None = None,
    fields: Iterable[str] | None = None,
    drop_text: float = 0.0,
    homogeneous: bool = False,
    window: int = 256,
    run: int = RUN,
    epoch_steps: int | None = None,
    skip_missing: bool = False,
    tee: str = "",
    decoders: Pool | None = None,
    encoders: Pool | None = None,
    gpus_per_encoder: float = 1.0,
    ray_address: str | None = None,
) -> "Feed":
    """Batches for `trainers` trainers, made of image shards by other processes on a Ray cluster:
    that of this process, of `ray_address`, or one started here.

    Up to `device` the options are those of `wdsprep encode` (its seed is `noise_seed`), up to
    `skip_missing` those of `wdsprep.load`. `state` is what `state_dict` gave, in any mode. `tee`
    is where to keep the latent shards. `decoders` and `encoders` are the least and the most workers
    of a stage, by default up to what the cluster has; `gpus_per_encoder` below 1 lets encoders
    share a GPU.
    """
    stack = ExitStack()
    with stack:
        stack.enter_context(connected(ray_address, cpus=LEAST, dashboard=False))
        device = device if device != "auto" else "cuda" if _total("GPU") else "cpu"
        how = Encode(
            resolution=resolution,
            model=model,
            latents=latents,
            text=text,
            dtype=dtype,
            seed=noise_seed,
            batch_size=batch_size,
            device=device,
        )
        loader = load(
            images,
            global_batch=global_batch,
            encode=how,
            tee=tee,
            seed=seed,
            epochs=epochs,
            step=step,
            rank=0,
            world_size=trainers,
            fields=fields,
            drop_text=drop_text,
            homogeneous=homogeneous,
            window=window,
            run=run,
            epoch_steps=epoch_steps,
            skip_missing=skip_missing,
            threads=1,
        )
        if state is not None:
            loader.load_state_dict(state)
        if loader.encoding is None:
            raise UsageError("a stream is of images")
        arrays = fields_of(loader.encoding.settings["layout"])
        most = most_of(_total("object_store_memory"), resolution, arrays)
        works = Works(
            line=Line(plan=loader.plan, encoding=loader.encoding, most=most),
            decoders=decoders or (1, max(1, int(_total("CPU")))),
            encoders=encoders or (1, max(1, int(_room(device, gpus_per_encoder)))),
            gpus=gpus_per_encoder if device.startswith("cuda") else 0.0,
        )
        return Feed(works.trainers(loader.step, loader.end, tee=tee), stack.pop_all())


class Feed:
    """A stream under way. `trainers` are given to the processes that train, one to each; they have
    to be iterated at the same time. Leaving or closing it ends a Ray that was started for it."""

    def __init__(self, trainers: "list[Trainer]", stack: ExitStack) -> None:
        self.trainers, self._stack = trainers, stack

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.close()
        self._stack.close()


class Works:
    """The pipeline: how many workers each of its stages has, and what they need."""

    def __init__(self, *, line: Line, decoders: Pool, encoders: Pool, gpus: float) -> None:
        self._line, self._gpus = line, gpus
        self._decoders, self._encoders = decoders, encoders

    def trainers(self, step: int, end: int, *, tee: str) -> list[Trainer]:
        line, world = self._line, self._line.plan.world
        ahead = PER_WORKER * (self._decoders[1] + self._encoders[1])
        ahead += PER_TRAINER * line.per_step
        pace = new_pace(step * line.per_step, world, ahead)
        pieces = self._pieces(Numbers(step * line.per_step, end * line.per_step, pace))
        empty = self._empty() if line.plan.effects.drop_text or tee else {}
        return [
            Trainer(
                replace(line, plan=line.plan_of(rank)),
                source,
                pace,
                step=step,
                end=end,
                empty=empty,
                tee=tee,
            )
            for rank, source in enumerate(pieces.streaming_split(world, equal=False))
        ]

    def _pieces(self, numbers: Numbers) -> Any:
        """The stages differ in what they need, so Ray Data does not melt any into one."""
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        read = read_datasource(numbers, override_num_blocks=1, num_cpus=0)
        luggage = _luggage(self._line)
        decoded = read.map_batches(
            DecoderOf,
            fn_constructor_args=(luggage,),
            batch_size=1,
            batch_format="numpy",
            compute=_pool(self._decoders),
            num_cpus=1,
        )
        encoded = decoded.map_batches(
            EncoderOf,
            fn_constructor_args=(luggage,),
            batch_size=1,
            batch_format="numpy",
            compute=_pool(self._encoders, calls=2),
            num_gpus=self._gpus,
            num_cpus=0 if self._gpus else 1,
        )
        _tune(encoded.context)
        return encoded

    def _empty(self) -> dict[str, torch.Tensor]:
        """What the empty caption becomes, found where an encoder could run."""
        options = {"num_cpus": 0 if self._gpus else 1, "num_gpus": self._gpus}
        found: dict[str, torch.Tensor] = ray.get(
            ray.remote(**options)(_empty).remote(_luggage(self._line))
        )
        return found


class DecoderOf(Decoder):
    """Ray Data names its stages after these."""

    def __init__(self, luggage: Any) -> None:
        super().__init__(_unpacked(luggage))


class EncoderOf(Encoder):
    def __init__(self, luggage: Any) -> None:
        super().__init__(_unpacked(luggage))


def _luggage(line: Line) -> Any:
    """A line for workers, and where they find modules, as the driver does."""
    return ray.put((sys.path, cloudpickle.dumps(line)))


def _unpacked(luggage: Any) -> Line:
    path, data = ray.get(luggage) if isinstance(luggage, ray.ObjectRef) else luggage
    sys.path.extend(entry for entry in path if entry not in sys.path)
    line: Line = cloudpickle.loads(data)
    return line


def _empty(luggage: Any) -> dict[str, torch.Tensor]:
    encoder = BatchEncoder(_unpacked(luggage).encoding.load(), seed=0, most=1)
    try:
        return encoder.empty()
    finally:
        encoder.close()


def _tune(context: DataContext) -> None:
    """For this stream alone. What is dealt out is blocks, so each piece is one, of one row."""
    context.execution_options.preserve_order = True
    context.target_max_block_size = 1
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def _pool(size: Pool, *, calls: int = 1) -> ActorPoolStrategy:
    """Workers that do so many pieces at a time, and have as many more waiting."""
    return ActorPoolStrategy(
        min_size=size[0],
        max_size=size[1],
        max_tasks_in_flight_per_actor=2 * calls,
        max_concurrent_calls_per_actor=calls,
        enable_true_multi_threading=calls > 1,
    )


def _total(kind: str) -> float:
    return float(ray.cluster_resources().get(kind, 0))


def _room(device: str, gpus: float) -> float:
    return _total("GPU") / gpus if device.startswith("cuda") else _total("CPU") / 2
