"""`stream`: serve latents to trainers while other processes of a Ray cluster make them.

Ray Data runs a pipeline: numbers of pieces, pixels, arrays, trainers.
"""

import atexit
import logging
import os
from contextlib import ExitStack
from dataclasses import fields, replace
from typing import Any

import ray
import torch
from ray import cloudpickle
from ray.data import ActorPoolStrategy, DataContext, read_datasource
from ray.data._internal.execution.backpressure_policy import (
    ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY,
)
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from wdsprep.dataset.npy_arrays import fields_of
from wdsprep.errors import UsageError
from wdsprep.loading.loader import load
from wdsprep.loading.open_datasets import as_streams, join_places
from wdsprep.loading.options import Pool, ServingOptions, StreamOptions
from wdsprep.loading.streaming import workers
from wdsprep.loading.streaming.stages import Pieces, piece_limit, samples_in_store
from wdsprep.loading.streaming.trainer import READY, Trainer, worker_error
from wdsprep.loading.streaming.workers import (
    Numbers,
    StageWorker,
    StreamPace,
    encode_empty_caption,
    send_to_workers,
)
from wdsprep.options import takes_options
from wdsprep.runners import worker_versions
from wdsprep.runners.options import ray_in_use
from wdsprep.runners.ray.cluster import connect_to_ray
from wdsprep.store.base import absolute

LEAST = 2  # cores of a Ray that is started here: one for a worker of each stage


@takes_options(StreamOptions)
def stream(options: StreamOptions) -> "Feed":
    """Serve batches to trainers, made of image shards by other processes on a Ray cluster.

        how = wdsprep.Encode(resolution=256, model="sd2")
        with wdsprep.stream("shards/images", encode=how, global_batch=1024, trainers=8) as feed:
            ...  # give feed.trainers[rank] to the process of that rank, which iterates it

    The cluster is that of this process, that of `ray_address`, or one started here. `trainers`
    is their number. `encode` and the options up to `tee` are those of `wdsprep.load`. The
    trainers themselves read what is joined. `state` is what any `state_dict` has returned.
    `tee` is where to keep the latent shards. `decoders` and `encoders` are the least and the
    most workers of a stage, by default 1 and as many as the cluster has room for;
    `gpus_per_encoder` below 1 lets encoders share a GPU.
    """
    encode, trainers = options.encode, options.trainers
    # workers and trainers may run in other folders
    served = {option.name: getattr(options, option.name) for option in fields(ServingOptions)}
    served["join"] = tuple(map(absolute, join_places(options.join)))
    served["tee"] = absolute(options.tee) if options.tee else ""
    streams = [
        replace(
            images,
            url=absolute(os.fspath(images.url)),
            join=tuple(map(absolute, join_places(images.join))),
        )
        for images in as_streams(options.images)
    ]
    stack = ExitStack()
    with stack:
        stack.enter_context(connect_to_ray(ray_in_use(options.ray_address), cpus=LEAST))
        device = encode.device if encode.device != "auto" else "cuda" if _total("GPU") else "cpu"
        gpus = options.gpus_per_encoder if device.startswith("cuda") else 0.0
        _check_room(gpus)
        loader = load(
            streams,
            encode=replace(encode, device=device),
            rank=0,
            world_size=trainers,
            threads=1,
            **served,
        )
        if options.state is not None:
            loader.load_state_dict(options.state)
        if loader.encoding is None:
            raise UsageError(
                'stream() needs image shards: give a dataset that "wdsprep pack" has made'
            )
        arrays = fields_of(loader.encoding.settings["layout"])
        room = samples_in_store(_total("object_store_memory"), encode.resolution, arrays)
        decoders = options.decoders or (1, max(1, int(_total("CPU"))))
        most = _total("GPU") / gpus if gpus else _total("CPU") / 2
        encoders = options.encoders or (1, max(1, int(most)))
        # so many pieces must be under way that no worker is idle
        least = PER_WORKER * (decoders[1] + encoders[1]) + PER_TRAINER * trainers
        pieces = Pieces(plan=loader.plan, encoding=loader.encoding, most=piece_limit(room, least))
        wanted = least + PER_TRAINER * (pieces.per_step - trainers)
        ahead = max(least, min(wanted, room // pieces.size))  # or more, if there is room
        first, end = (step * pieces.per_step for step in (loader.step, loader.end))
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        new_pace = ray.remote(num_cpus=0, scheduling_strategy=here)(StreamPace)
        pace, sent = new_pace.remote(first, trainers, ahead), send_to_workers(pieces)
        encoded = _run_stages(Numbers(first, end, pace), sent, decoders, encoders, gpus=gpus)
        empty: dict[str, torch.Tensor] = {}
        if options.drop_text or options.tee:  # on a node where an encoder could run
            task = ray.remote(num_cpus=0 if gpus else 1, num_gpus=gpus)(encode_empty_caption)
            try:
                empty = ray.get(task.remote(sent))
            except RayError as error:
                raise worker_error(error) from error
        feed = [
            Trainer(
                replace(pieces, plan=replace(loader.plan, rank=rank)),
                source,
                pace,
                step=loader.step,
                end=loader.end,
                ready=max(1, min(READY * pieces.parts, ahead // trainers // 2)),
                empty=empty,
            )
            for rank, source in enumerate(encoded.streaming_split(trainers, equal=False))
        ]
        stack.callback(_stop_actors, feed[0])
        return Feed(feed, stack.pop_all())


class Feed:
    """A running stream, with its `trainers`.

    Give each of them to a process that trains; they have to be iterated at the same time.
    Closing the feed, or leaving its `with`, ends the stream wherever the trainers are, and a
    Ray that was started for it. A feed that is never closed ends with the program, while Ray
    still works: it no longer does once Python unloads modules.
    """

    def __init__(self, trainers: "list[Trainer]", stack: ExitStack) -> None:
        self.trainers, self._stack = trainers, stack
        atexit.register(stack.close)

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        atexit.unregister(self._stack.close)
        with self._stack as stack:
            for trainer in self.trainers:
                stack.callback(trainer.close)


def _stop_actors(trainer: Trainer) -> None:
    """Stop the actors of a stream.

    The pipeline runs in an actor that owns all workers. Ray ends them with it, so that the
    cluster has their CPUs and GPUs again. If Ray was shut down, it has ended them all.
    """
    for actor in trainer.actors if ray.is_initialized() else ():
        ray.kill(actor)


def _check_room(gpus: float) -> None:
    """Check that the cluster has the CPUs and GPUs of one worker of each stage.

    Ray waits without end for what a cluster does not have.
    """
    cores = 1 if gpus else 2
    if _total("CPU") < cores or _total("GPU") < gpus:
        raise UsageError(
            f"a stream needs {cores} CPUs and {gpus:g} GPUs or more, and the Ray cluster has "
            f"{_total('CPU'):g} and {_total('GPU'):g}: start it with more, or encode with "
            'device="cpu" on 2 CPUs'
        )


def _total(kind: str) -> float:
    return float(ray.cluster_resources().get(kind, 0))


for _by_value in (worker_versions, workers):
    cloudpickle.register_pickle_by_value(_by_value)

PER_WORKER = 4  # pieces that wait for a worker, are worked on, or wait behind it
PER_TRAINER = 4  # steps, or pieces where the object store is small


def _run_stages(numbers: Numbers, sent: Any, decoders: Pool, encoders: Pool, *, gpus: float) -> Any:
    """Return the dataset of Ray Data that reads, decodes and encodes.

    The stages need different resources, so Ray Data does not fuse them.
    """
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    how = {"batch_size": 1, "batch_format": "numpy"}
    read = read_datasource(numbers, override_num_blocks=1, num_cpus=0)
    decoded = read.map_batches(
        StageWorker,
        fn_constructor_args=(sent, "make_decoder"),
        compute=_make_pool(decoders),
        num_cpus=1,
        **how,
    )
    encoded = decoded.map_batches(
        StageWorker,
        fn_constructor_args=(sent, "make_encoder"),
        compute=_make_pool(encoders, calls=2),
        num_gpus=gpus,
        num_cpus=0 if gpus else 1,
        **how,
    )
    _tune(encoded.context)
    return encoded


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
