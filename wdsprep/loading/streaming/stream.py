"""`stream`: serve latents to trainers while other processes of a Ray cluster make them.

Ray Data runs a pipeline: numbers of pieces, pixels, arrays, trainers. It gives a `Trainer` its
pieces in their order, also when workers die. The trainer checks each piece for that, makes batches
of them, and counts them. A piece that is lost, repeated or out of turn is an error, never a wrong
batch.
"""

import atexit
import logging
import os
import re
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, cast

import ray
import torch
from ray import cloudpickle
from ray.data import ActorPoolStrategy, DataContext, read_datasource
from ray.data._internal.execution.backpressure_policy import (
    ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY,
)
from ray.data.collate_fn import NumpyBatchCollateFn
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from wdsprep import errors
from wdsprep.dataset.npy_arrays import fields_of
from wdsprep.encoding.on_the_fly.latent_writer import LatentWriter
from wdsprep.encoding.progress import Stats
from wdsprep.errors import UsageError, WdsprepError, WorkError
from wdsprep.loading.encoded_batches import BatchBuilder, open_tee, with_empty_caption
from wdsprep.loading.loader import load
from wdsprep.loading.open_datasets import as_streams, join_places
from wdsprep.loading.options import Pool, ServingOptions, StreamOptions
from wdsprep.loading.streaming import workers
from wdsprep.loading.streaming.stages import (
    PackedPiece,
    Piece,
    Pieces,
    piece_limit,
    samples_in_store,
    unpack_piece,
)
from wdsprep.loading.streaming.workers import (
    THEN,
    Numbers,
    StageWorker,
    StreamPace,
    encode_empty_caption,
    new_trainer,
    send_to_workers,
)
from wdsprep.options import takes_options
from wdsprep.runners import worker_versions
from wdsprep.runners.options import ray_in_use
from wdsprep.runners.ray.cluster import connect_to_ray
from wdsprep.runners.worker_versions import find_refusal
from wdsprep.store.base import absolute
from wdsprep.version import __version__

LEAST = 2  # cores of a Ray that is started here: one for a worker of each stage
READY = 2  # batches that are fetched before they are wanted, if there is room for them
RECENT_S = 120.0


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """The state of a stage: its workers and how fast they are.

    `workers` lists all workers so far (host:process), also those that have ended. `rate` is the
    number of samples that they make in a second together, and `busy` the share of time in which
    they work rather than wait. Both count only workers whose pieces came in the last two
    minutes.
    """

    name: str
    workers: tuple[str, ...]
    rate: float
    busy: float


class PieceCollate(NumpyBatchCollateFn):  # type: ignore[misc]
    """A function that unpacks pieces, in a thread beside the trainer.

    Each piece leaves Ray's memory on its own. A whole step may be more than that has room for.
    """

    def __call__(self, packed: PackedPiece) -> Piece:
        return unpack_piece(packed)


class Trainer:
    """A trainer of a stream: an iterable over the batches of one rank.

    It is picklable until it is iterated. An iteration may be left and continued. It ends with
    the stream.
    """

    def __init__(
        self,
        pieces: Pieces,
        source: Any,
        pace: Any,
        *,
        step: int,
        end: int,
        ready: int,
        empty: Mapping[str, torch.Tensor],
    ) -> None:
        """Make a trainer that fetches up to `ready` pieces before they are asked for."""
        self._pieces, self._source, self._pace = pieces, source, pace
        self.plan = pieces.plan
        self._ready = ready
        self._empty = empty
        self._end = end
        self.step = step
        self._workers: dict[tuple[str, str], tuple[Stats, float]] = {}
        """The work of each worker, and the time of its last piece, by stage and worker."""

    def __len__(self) -> int:
        """Return how many batches are left."""
        return self._end - self.step

    def __repr__(self) -> str:
        return f"<Trainer {self.plan.summary}; at step {self.step:,}>"

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from, the same on every trainer.

        A loader of the stored latents would have the same state.
        """
        return self.plan.order.state(self.step)

    def stages(self) -> list[Stage]:
        """Return the state of both stages, as known from the batches so far."""
        stages = []
        for name in ("decode", "encode"):
            workers = {worker: work for (of, worker), work in self._workers.items() if of == name}
            last = max((at for _, at in workers.values()), default=0.0)
            recent = [stats for stats, at in workers.values() if at > last - RECENT_S]
            wall = sum(stats.wall_s for stats in recent)
            stage = Stage(
                name=name,
                workers=tuple(workers),
                rate=sum(stats.samples / stats.wall_s for stats in recent if stats.wall_s),
                busy=sum(stats.busy_s for stats in recent) / wall if wall else 0.0,
            )
            stages.append(stage)
        return stages

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.step < self._end:
            numbers = self._pieces.numbers(self.step, self.plan.rank)
            pieces = [self._take_piece(number) for number in numbers]
            batches = [piece.batch for piece in pieces]
            rows = [row for piece in pieces for row in piece.rows]
            out = self._builder.build(batches, rows).out
            self.step += 1
            yield out
        self.close()

    def close(self) -> None:
        """Stop the iteration. With a tee, list the complete latent shards in their manifest."""
        opened = vars(self)
        with ExitStack() as stack:  # from the last one on, whatever fails
            if tee := opened.get("_tee"):
                stack.callback(tee.close)
                stack.callback(tee.publish)
            if "_made" in opened:
                atexit.unregister(self._at_exit)
                stack.callback(self._made.close)

    @property
    def actors(self) -> tuple[Any, Any]:
        """The two actors that a stream cannot do without: the pipeline and the pace."""
        return self._source._coord_actor, self._pace

    def _take_piece(self, wanted: int) -> Piece:
        try:
            piece = next(self._made)
        except StopIteration:
            raise WorkError(
                f"the stream ended at step {self.step} of {self._end}: {THEN}"
            ) from None
        except RayError as error:
            raise worker_error(error) from error
        if piece.number != wanted:
            raise WorkError(
                f"step {self.step} of the stream is lost, as piece {piece.number} came in place of "
                f"piece {wanted}: {THEN}"
            )
        self._pace.note_done.remote(self.plan.rank, wanted + self.plan.world)
        for stage, worker, stats in piece.worked:
            known = self._workers.get((stage, worker))
            if known is None or known[0].samples < stats.samples:
                self._workers[stage, worker] = stats, time.monotonic()
        return piece

    @cached_property
    def _made(self) -> "Generator[Piece, None, None]":
        pieces: Generator[Piece, None, None] = iter(
            self._source.iter_torch_batches(
                batch_size=1, collate_fn=PieceCollate(), prefetch_batches=self._ready
            )
        )
        self._at_exit = partial(_close_on_ray, pieces)
        atexit.register(self._at_exit)
        return pieces

    @cached_property
    def _builder(self) -> BatchBuilder:
        return BatchBuilder(with_empty_caption(self.plan, self._empty), self._tee)

    @cached_property
    def _tee(self) -> LatentWriter | None:
        return open_tee(self.plan, self._pieces.encoding, lambda: self._empty)

    def __reduce__(self) -> tuple[Any, ...]:
        return new_trainer, (__version__,), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        opened = ("_made", "_at_exit", "_builder", "_tee")
        return {name: value for name, value in vars(self).items() if name not in opened}


def _close_on_ray(pieces: "Generator[Piece, None, None]") -> None:
    """Close a stream that the program left open, unless Ray has ended.

    If Ray has ended, closing the stream would start Ray again.
    """
    if ray.is_initialized():
        pieces.close()


def worker_error(error: RayError) -> WdsprepError:
    """Return a worker's own error, without what Ray wraps around it.

    The error is found in the text of Ray's error, as only the text comes here. If the text has no
    error of wdsprep, return a WorkError with its last line.
    """
    text = str(error).strip()
    if refusal := find_refusal(text):
        return WorkError(refusal)
    for name, message in re.findall(r"^wdsprep\.errors\.(\w+): (.+)$", text, re.MULTILINE):
        return cast(WdsprepError, getattr(errors, name)(message))
    return WorkError(f"the stream has failed: {text.splitlines()[-1]}")


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
