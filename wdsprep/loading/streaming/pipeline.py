"""Build the pipeline that Ray Data runs: numbers of pieces, pixels, arrays, trainers."""

import logging
from dataclasses import replace
from typing import Any

import ray
import torch
from ray import cloudpickle
from ray.data import ActorPoolStrategy, DataContext, read_datasource
from ray.data._internal.execution.backpressure_policy import (
    ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY,
)
from ray.exceptions import RayTaskError

from wdsprep.errors import WorkError
from wdsprep.loading.options import Pool
from wdsprep.loading.streaming import piece_source, workers
from wdsprep.loading.streaming.piece_source import Numbers, new_pace
from wdsprep.loading.streaming.pieces import Pieces, StreamRoom
from wdsprep.loading.streaming.trainer import READY, Trainer
from wdsprep.loading.streaming.workers import (
    DecodeWorker,
    EncodeWorker,
    encode_empty_caption,
    send_to_workers,
)
from wdsprep.runners import worker_versions

for _by_value in (worker_versions, workers, piece_source):
    cloudpickle.register_pickle_by_value(_by_value)

PER_WORKER = 4  # pieces that wait for a worker, are worked on, or wait behind it
PER_TRAINER = 4  # steps, or pieces where the object store is small


def least_ahead(decoders: Pool, encoders: Pool, trainers: int) -> int:
    """Return how many pieces must be under way so that no worker is idle."""
    return PER_WORKER * (decoders[1] + encoders[1]) + PER_TRAINER * trainers


def pieces_ahead(pieces: Pieces, room: StreamRoom, least: int) -> int:
    """Return how many pieces may be under way at once: `least`, or more if there is room."""
    wanted = least + PER_TRAINER * (pieces.per_step - pieces.plan.world)
    return max(least, min(wanted, room.samples // pieces.size))


class Pipeline:
    """The stages of a stream: their workers, what these need, and the pieces under way."""

    def __init__(
        self, *, pieces: Pieces, decoders: Pool, encoders: Pool, gpus: float, ahead: int
    ) -> None:
        self._pieces, self._gpus, self._ahead = pieces, gpus, ahead
        self._decoders, self._encoders = decoders, encoders

    def trainers(self, step: int, end: int, *, tee: str) -> list[Trainer]:
        pieces, world = self._pieces, self._pieces.plan.world
        pace = new_pace(step * pieces.per_step, world, self._ahead)
        served = self._stages(Numbers(step * pieces.per_step, end * pieces.per_step, pace))
        empty = self._encode_empty() if pieces.plan.effects.drop_text or tee else {}
        return [
            Trainer(
                replace(pieces, plan=pieces.plan_of(rank)),
                source,
                pace,
                step=step,
                end=end,
                ready=max(1, min(READY * pieces.parts, self._ahead // world // 2)),
                empty=empty,
                tee=tee,
            )
            for rank, source in enumerate(served.streaming_split(world, equal=False))
        ]

    def _stages(self, numbers: Numbers) -> Any:
        """Return the dataset of Ray Data that reads, decodes and encodes.

        The stages need different resources, so Ray Data does not fuse them.
        """
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        read = read_datasource(numbers, override_num_blocks=1, num_cpus=0)
        sent = send_to_workers(self._pieces)
        decoded = read.map_batches(
            DecodeWorker,
            fn_constructor_args=(sent,),
            batch_size=1,
            batch_format="numpy",
            compute=_make_pool(self._decoders),
            num_cpus=1,
        )
        encoded = decoded.map_batches(
            EncodeWorker,
            fn_constructor_args=(sent,),
            batch_size=1,
            batch_format="numpy",
            compute=_make_pool(self._encoders, calls=2),
            num_gpus=self._gpus,
            num_cpus=0 if self._gpus else 1,
        )
        _tune(encoded.context)
        return encoded

    def _encode_empty(self) -> dict[str, torch.Tensor]:
        """Encode the empty caption on a node where an encoder could run."""
        options = {"num_cpus": 0 if self._gpus else 1, "num_gpus": self._gpus}
        try:
            found: dict[str, torch.Tensor] = ray.get(
                ray.remote(**options)(encode_empty_caption).remote(send_to_workers(self._pieces))
            )
        except RayTaskError as error:
            if refusal := worker_versions.find_refusal(str(error)):
                raise WorkError(refusal) from error
            raise
        return found


def _tune(context: DataContext) -> None:
    """Set Ray Data's options for this stream alone.

    Ray Data deals out blocks, so each piece is a block of one row.

    Ray Data's own ways to bound memory are off. They stop a stage by a guess about other
    stages, and start it again only when nothing runs at all; but the task that gives out
    numbers always runs. So a stream could stop for ever. The pace bounds memory instead, by
    what pieces take.
    """
    context.set_config(ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY, [])
    context.execution_options.preserve_order = True
    context.target_max_block_size = 1
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def _make_pool(size: Pool, *, calls: int = 1) -> ActorPoolStrategy:
    """Return a pool of workers that do `calls` pieces at a time and have as many waiting."""
    return ActorPoolStrategy(
        min_size=size[0],
        max_size=size[1],
        max_tasks_in_flight_per_actor=2 * calls,
        max_concurrent_calls_per_actor=calls,
        enable_true_multi_threading=calls > 1,
    )
