"""`stream`: serve latents to trainers while other processes of a Ray cluster make them."""

import atexit
import os
from contextlib import ExitStack
from dataclasses import fields, replace

import ray

from wdsprep.dataset.npy_arrays import fields_of
from wdsprep.errors import UsageError
from wdsprep.loading.loader import load
from wdsprep.loading.open_datasets import as_streams, join_places
from wdsprep.loading.options import ServingOptions, Stream, StreamOptions
from wdsprep.loading.streaming.pieces import Pieces, StreamRoom
from wdsprep.loading.streaming.pipeline import Pipeline, least_ahead, pieces_ahead
from wdsprep.loading.streaming.trainer import Trainer
from wdsprep.options import takes_options
from wdsprep.runners.ray.cluster import connect_to_ray
from wdsprep.store.base import absolute
from wdsprep.text import plural

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
    served = {each.name: getattr(options, each.name) for each in fields(ServingOptions)}
    served["join"] = tuple(map(absolute, join_places(options.join)))
    served["tee"] = tee = absolute(options.tee) if options.tee else ""
    streams = [_with_absolute_paths(each) for each in as_streams(options.images)]
    stack = ExitStack()
    with stack:
        stack.enter_context(connect_to_ray(options.ray_address, cpus=LEAST))
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
        room = StreamRoom.from_store(_total("object_store_memory"), encode.resolution, arrays)
        decoders = options.decoders or (1, max(1, int(_total("CPU"))))
        encoders = options.encoders or (1, max(1, int(_most_encoders(gpus))))
        least = least_ahead(decoders, encoders, trainers)
        pieces = Pieces(
            plan=loader.plan, encoding=loader.encoding, most=room.piece_limit(least), kept=bool(tee)
        )
        pipeline = Pipeline(
            pieces=pieces,
            decoders=decoders,
            encoders=encoders,
            gpus=gpus,
            ahead=pieces_ahead(pieces, room, least),
        )
        made = pipeline.trainers(loader.step, loader.end, tee=tee)
        stack.callback(_end, made[0])
        return Feed(made, stack.pop_all())


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

    def __repr__(self) -> str:
        trainers = plural(len(self.trainers), "trainer")
        return f"<Feed {self.trainers[0].plan.summary}; {trainers}>"

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        atexit.unregister(self._stack.close)
        with self._stack as stack:
            for trainer in self.trainers:
                stack.callback(trainer.close)


def _with_absolute_paths(stream: Stream) -> Stream:
    """Return the stream with absolute paths, for processes that run in other folders."""
    join = tuple(map(absolute, join_places(stream.join)))
    return replace(stream, url=absolute(os.fspath(stream.url)), join=join)


def _end(trainer: Trainer) -> None:
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
    if _total("CPU") < cores:
        raise UsageError(
            f"a stream needs {cores} CPUs or more, one for each decoder and each encoder without "
            f"a GPU, and the Ray cluster has {_total('CPU'):g}: start it with more"
        )
    if _total("GPU") < gpus:
        raise UsageError(
            f"an encoder needs {gpus:g} GPUs, and the Ray cluster has {_total('GPU'):g}: add one, "
            'or encode with device="cpu"'
        )


def _total(kind: str) -> float:
    return float(ray.cluster_resources().get(kind, 0))


def _most_encoders(gpus: float) -> float:
    return _total("GPU") / gpus if gpus else _total("CPU") / 2
