"""Latents straight into a trainer, beside what people would write, and beside stored shards.

Streams: `wdsprep.stream` and Ray Data in the Anyscale guide's shape (fp32 samples from Parquet), on
a Ray that runs, with encoders that cost nothing, in batches of 64. The first 24 batches do not
count: by then all workers are there, and what had gathered meanwhile is used up. The same without
`preserve_order` shows what the order costs.

Memory: an epoch of ten times the size of Ray's object store, which is looked at after each step.

Offloading: a trainer whose step takes a fixed time, on a device of its own. Encoding takes a share
of that time for the same samples, on the same device or elsewhere. Both are waits, so that two
cores are enough to tell what a cluster would do: what is measured is what does not overlap.
"""

import itertools
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.kit.clusters import object_store
from tools.benches import CORES, Group, Rival, Role, call, note, took
from tools.benches.encode import make_images, photo

BATCH, IMAGES, SKIPPED = 64, 1_024, 24
STORE, TIMES = 200 << 20, 10
PIECE_NBYTES = 362_000  # of a sample: pixels and arrays, once each
STEP_S, SMALL_BATCH, STEPS = 0.4, 16, 12
SHARES = (0.25, 0.5, 1.0)
GUIDE = "Ray Data in the guide's shape"
UNORDERED = "wdsprep.stream in any order"
STORED = "stored shards"
ELSEWHERE = "images, encoded elsewhere (Ray)"
OWN = "images, encoded in line on the trainer's device"


def groups(home: Path, scale: float) -> Iterator[Group]:
    from tools.benches.encode_peers import make_parquet

    batches = round(24 * scale)
    make_images(home, IMAGES)
    rows = (SKIPPED + batches) * BATCH
    make_parquet(home / "parquet", [photo(512, seed) for seed in range(20)], rows)
    yield Group(
        name="online-stream",
        title="images of 512 px to a trainer at 256, an encoder that costs nothing",
        count=batches * BATCH,
        rivals=[
            Rival(name="wdsprep.stream", command=call(ours, home, batches), role=Role.OURS),
            Rival(name=GUIDE, command=call(guide, home, batches)),
            Rival(name=UNORDERED, command=call(in_any_order, home, batches), role=Role.LIMIT),
        ],
        targets={GUIDE: 2},
        rounds=2,
    )
    yield Group(
        name="online-memory",
        title=f"an epoch {TIMES} times as large as the object store of {STORE >> 20} MB",
        rivals=[
            Rival(name="wdsprep.stream", command=call(memory, home, TIMES * scale), role=Role.OURS)
        ],
        rounds=1,
    )
    yield Group(
        name="online-offload",
        title=f"a trainer whose steps take {STEP_S} s, and so does encoding",
        count=SMALL_BATCH * STEPS,
        rivals=[
            Rival(name=ELSEWHERE, command=call(elsewhere, home), role=Role.OURS),
            Rival(name=STORED, command=call(stored, home), role=Role.LIMIT),
            Rival(name=OWN, command=call(own, home), role=Role.OURS),
        ],
        targets={STORED: 0.95},
        rounds=1,
    )


# --- in processes of their own


@contextmanager
def ray_running(store: int = 2 << 30, cpus: int = CORES + 2) -> Iterator[None]:
    import logging

    import ray

    ray.init(
        address="local",
        num_cpus=cpus,
        object_store_memory=store,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def rest_of(batches: Iterable[Any], count: int) -> float:
    """Seconds of so many batches, after the first."""
    left = iter(batches)
    for _ in itertools.islice(left, SKIPPED):
        pass
    started = time.perf_counter()
    for _ in itertools.islice(left, count):
        pass
    return time.perf_counter() - started


def wide_model(*arguments: Any, **options: Any) -> Any:
    """`tiny` with embeddings as wide as those of sd2; its weights are not looked at here."""
    from wdsprep.encoding.models.find_model import find_model

    found = find_model(*arguments, **options)
    emb, *others = found.outputs
    return replace(found, outputs=(replace(emb, shape=(77, 1024)), *others))


def set_encoder(make: Any) -> None:
    from wdsprep.encoding import encode as encoding
    from wdsprep.encoding.on_the_fly import encode_steps as online

    encoding.make_encoder, online.find_model = make, wide_model


def feed_of(home: str, make: Any, *, batch: int = BATCH, **options: Any) -> Any:
    import wdsprep

    set_encoder(make)
    how = wdsprep.Encode(resolution=256, model="tiny", device="cpu", batch_size=batch)
    return wdsprep.stream(f"{home}/images", encode=how, global_batch=batch, **options)


def ours(home: str, count: int) -> None:
    from tools.benches.encode_peers import make_free

    pools = {"decoders": (CORES, CORES), "encoders": (1, 1)}
    with ray_running(), feed_of(home, make_free, epochs=None, **pools) as feed:
        trainer = feed.trainers[0]
        took(rest_of(trainer, count))
        for stage in trainer.stages():
            note(f"{len(stage.workers)} {stage.name}: {stage.rate:,.0f}/s, busy {stage.busy:.0%}")


def in_any_order(home: str, count: int) -> None:
    from unittest.mock import patch

    from wdsprep.loading.streaming import stream as works
    from wdsprep.loading.streaming.stream import Trainer

    def tune(context: Any) -> None:
        plain(context)
        context.execution_options.preserve_order = False

    def take(trainer: Any, wanted: int) -> Any:
        piece = next(trainer._made)  # whichever it is
        trainer._pace.note_done.remote(trainer.plan.rank, wanted + trainer.plan.world)
        return piece

    plain = works._tune
    with patch.object(works, "_tune", tune), patch.object(Trainer, "_take_piece", take):
        ours(home, count)


def guide(home: str, count: int) -> None:
    import ray.data
    from ray.data import ActorPoolStrategy

    from tools.benches.encode_peers import DummyEncoder, Transform, start_ray

    start_ray()
    try:
        read = ray.data.read_parquet(f"{home}/parquet")
        pixels = read.map_batches(
            Transform,
            fn_constructor_args=(256,),
            batch_size=BATCH,
            compute=ActorPoolStrategy(size=CORES),
            num_cpus=1,
        )
        encoded = pixels.map_batches(
            DummyEncoder,
            fn_constructor_args=(256, BATCH),
            batch_size=BATCH,
            compute=ActorPoolStrategy(size=1),
            num_cpus=0.5,
        ).select_columns(["latent", "emb"])
        took(rest_of(encoded.iter_torch_batches(batch_size=BATCH), count))
    finally:
        ray.shutdown()


def memory(home: str, times: float) -> None:
    """An epoch of so many times what the object store holds."""
    from tools.benches.encode_peers import make_free

    pools = {"decoders": (CORES, CORES), "encoders": (1, 1)}
    steps = math.ceil(times * STORE / PIECE_NBYTES / BATCH)
    marks = {math.ceil(part * steps): part * times for part in (0.2, 0.6, 1)}
    epoch = {"epochs": 1, "epoch_steps": steps}
    keys, used_mb = [], 0
    with ray_running(STORE), feed_of(home, make_free, **epoch, **pools) as feed:
        for step, batch in enumerate(feed.trainers[0], start=1):
            keys += batch["key"]
            store = object_store()
            used_mb = max(used_mb, store.object_store_bytes_used >> 20)
            if step in marks:
                note(f"all processes after {marks[step]:g} times the store: {processes_mb():,} MB")
    assert len(keys) == steps * BATCH
    passes = [keys[first : first + IMAGES] for first in range(0, len(keys), IMAGES)]
    assert all(len(set(each)) == len(each) for each in passes), "a key was repeated"
    note(f"{store.cumulative_created_bytes >> 20:,} MB went through, each key once a pass")
    note(f"at most {used_mb} MB in use, {store.spilled_bytes_total >> 20} MB spilled")


def processes_mb() -> int:
    from tools.benches.turns import family, pss_kb

    return sum(map(pss_kb, family(os.getpid()))) >> 10


class Slow:
    """The dummy encoder that takes its time, on a device that only one may use."""

    device_is_free = threading.Lock()

    def __init__(self, recipe: Any, share: float) -> None:
        from tools.benches.encode_peers import make_free

        self._free = make_free(None, recipe, "cpu")
        self._each_s = share * STEP_S / SMALL_BATCH

    def __getattr__(self, name: str) -> Any:
        return getattr(self._free, name)

    def encode_images(self, pixels: Any, noise: Any, *, exact: bool = False) -> Any:
        with self.device_is_free:
            time.sleep(len(pixels) * self._each_s)
        return self._free.encode_images(pixels, noise, exact=exact)


class MakeSlow:
    """Picklable, for workers."""

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, _model: Any, recipe: Any, _device: str) -> Slow:
        return Slow(recipe, self.share)


def trained(batches: Iterable[Any]) -> float:
    """Seconds of the steps of a trainer that has begun, and what is between them."""
    left = iter(batches)
    for _ in range(3):
        step(next(left))
    started = time.perf_counter()
    for batch in itertools.islice(left, STEPS):
        step(batch)
    return time.perf_counter() - started


def step(_batch: Any) -> None:
    with Slow.device_is_free:
        time.sleep(STEP_S)


def _told(seconds: dict[float, float]) -> None:
    took(seconds[1.0])
    for share, taken in seconds.items():
        rate = SMALL_BATCH * STEPS / taken
        note(f"{rate:.1f} samples/s where encoding takes {share:g} times a step's time")


def stored(_home: str) -> None:
    import tempfile

    import wdsprep
    from tests.kit.latent_sets import field, write_latents

    fields = (field("latent", (4, 32, 32)), field("emb", (77, 1024)))
    with tempfile.TemporaryDirectory() as folder:
        url = write_latents(folder, (100, 100), fields=fields)
        took(trained(wdsprep.load(url, global_batch=SMALL_BATCH, epochs=None)))


def own(home: str) -> None:
    import wdsprep

    seconds = {}
    for share in SHARES:
        set_encoder(MakeSlow(share))
        how = wdsprep.Encode(resolution=256, model="tiny", batch_size=SMALL_BATCH // 4)
        images = f"{home}/images"
        loader = wdsprep.load(images, encode=how, global_batch=SMALL_BATCH, epochs=None)
        seconds[share] = trained(loader)
    _told(seconds)


def elsewhere(home: str) -> None:
    seconds = {}
    with ray_running():
        for share in SHARES:
            pools = {"decoders": (1, 1), "encoders": (1, 1), "epochs": None}
            with feed_of(home, MakeSlow(share), batch=SMALL_BATCH, **pools) as feed:
                seconds[share] = trained(feed.trainers[0])
    _told(seconds)
