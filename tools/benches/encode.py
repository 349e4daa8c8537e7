"""`encode` beside what people would write themselves.

Decoding: one core, photo-like JPEGs of quality 90, wdsprep's uint8 crop beside the Pillow path of
the Anyscale guide (decode, RGB, bicubic, centre square, float32 in [-1, 1]).

A free encoder: what is left when the models cost nothing, start of the workers included, beside the
guide's shape on a Ray Data that is running (Parquet of images and captions is read, made fp32 by
CPU actors, encoded by one actor, written as Parquet in fp32).

Models: from first batch to last, beside a loop that does nothing but run the same models on tensors
that are ready. The model is `tiny`, widened until it is nearly all the work.

A family with a large text encoder: the same with Z-Image of random weights, beside a loop of the
pipeline's own `encode_prompt` and VAE. A note says how busy the device is, which is to be at least
95 %, and how much of that was text.

Two resolutions: 256 and 512 in one pass, beside a run for each. What counts is the CPU time of all
processes with an encoder that costs nothing, starts included, which is to be 0.6 of that or less.

Text alone: the captions of images of each phase with an encoder that costs nothing, from first
batch to last, beside the same with the images. It is to be 5 times as fast or more. An embedding is
158 kB, so what a machine writes in a second counts.
"""

import io
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from tools.benches import Group, Rival, Role, call, note, ours, took

if TYPE_CHECKING:
    from tools.benches.encode_peers import Launch

LOOP_BATCHES = (1, 2, 8)
LOOP_S = 5.0
"""A loop on a GPU takes so long: there the images of a CPU are done in a tenth of a second."""
TEXT_SIDES = (256, 512)
SIZES = ((1024, 256), (512, 256), (1024, 512))


def groups(home: Path, scale: float) -> Iterator[Group]:
    for side, resolution in SIZES:
        count = max(4, round(100 * scale))
        yield Group(
            name=f"encode-pixels-{side}-{resolution}",
            title=f"decode and crop, {side} px to {resolution}, one core",
            unit="images",
            count=count,
            rivals=[
                Rival(
                    name="wdsprep.images.crop.crop",
                    command=call(pixels, "crop", side, resolution, count),
                    role=Role.OURS,
                ),
                Rival(
                    name="the guide's Pillow path",
                    command=call(pixels, "guide", side, resolution, count),
                ),
            ],
        )
    count = round(2_000 * scale)
    make_images(home, count)
    yield _free(home, count)
    yield _both(home, 512, count)
    large = home / "large"
    large.mkdir()
    make_images(large, count, 1024)
    yield _both(large, 1024, count)
    for side in TEXT_SIDES:
        yield _text(home, side, round(20_000 * scale))
    yield from _models(home, round(100 * scale))
    yield _family(home, round(32 * scale))


def _free(home: Path, count: int) -> Group:
    from tools.benches.encode_peers import make_parquet

    pictures = [photo(512, seed) for seed in range(20)]
    make_parquet(home / "parquet", pictures, count)
    latents = home / "latents"
    return Group(
        name="encode-free",
        title="512 px to 256, an encoder that costs nothing",
        unit="images",
        count=count,
        rivals=[
            Rival(
                name=f"wdsprep encode, {runner}",
                command=call(free, home, runner),
                role=Role.OURS,
                leaves=latents,
            )
            for runner in ("local", "ray")
        ]
        + [
            Rival(
                name="Ray Data in the guide's shape",
                command=call(guide, home),
                leaves=home / "theirs",
            )
        ],
        targets={"Ray Data in the guide's shape": 1.5},
    )


def _both(home: Path, side: int, count: int) -> Group:
    return Group(
        name=f"encode-both-{side}",
        title=f"{side} px to 256 and 512, an encoder that costs nothing, CPU time",
        unit="images",
        count=count,
        rivals=[
            Rival(name=name, command=call(both, home, passes), role=role, leaves=home / "both")
            for name, passes, role in (
                ("wdsprep encode --resolution 256,512", [[256, 512]], Role.OURS),
                ("a run for each", [[256], [512]], Role.RIVAL),
            )
        ],
        targets={"a run for each": 1 / 0.6},
    )


def _text(home: Path, side: int, count: int) -> Group:
    place = home / f"text-{side}"
    place.mkdir()
    make_images(place, count, side)
    return Group(
        name=f"encode-text-{side}",
        title=f"captions of {side} px images, an encoder that costs nothing, start left out",
        unit="captions",
        count=count,
        rivals=[
            Rival(
                name=name,
                command=call(text, place, count, side, latents),
                role=role,
                leaves=place / "latents",
            )
            for name, latents, role in (
                ("wdsprep encode --latents none", "none", Role.OURS),
                ("with the images", "auto", Role.RIVAL),
            )
        ],
        targets={"with the images": 5.0},
    )


def _models(home: Path, count: int) -> Iterator[Group]:
    from tools.benches.encode_peers import make_wide

    model = make_wide(home / "wide")
    loops = {size: f"models alone on ready tensors, batch {size}" for size in LOOP_BATCHES}
    yield _beside_loops(
        home,
        model,
        count,
        name="encode-models",
        title="real models at 256, start left out",
        loops={name: call(loop, model, count, size) for size, name in loops.items()},
    )


def _family(home: Path, count: int) -> Group:
    from tools.benches.encode_peers import make_family

    model = make_family(home / "family")
    loops = {size: f"encode_prompt and VAE in a loop, batch {size}" for size in LOOP_BATCHES}
    return _beside_loops(
        home,
        model,
        count,
        name="encode-family",
        title="a family with a large text encoder at 256, start left out",
        loops={name: call(family_loop, model, count, size) for size, name in loops.items()},
    )


def _beside_loops(
    home: Path, model: Path, count: int, *, name: str, title: str, loops: Mapping[str, list[str]]
) -> Group:
    """`encode` with a model, and what does nothing but run it, by name."""
    return Group(
        name=name,
        title=title,
        unit="images",
        count=count,
        rivals=[
            Rival(
                name="wdsprep encode, local",
                command=call(modelled, home, model, count),
                role=Role.OURS,
                leaves=home / "latents",
            ),
            *(Rival(name=loop, command=words, role=Role.LIMIT) for loop, words in loops.items()),
        ],
        targets=dict.fromkeys(loops, 0.9),
    )


def photo(side: int, seed: int = 0) -> bytes:
    """A picture with detail at every scale and grain in places: 0.25 bytes a pixel as JPEG."""
    rng = np.random.default_rng(seed)
    levels = np.zeros((side, side, 3))
    for power in range(1, 9):
        rough = rng.integers(0, 256, (1 << power, 1 << power, 3), dtype=np.uint8)
        levels += np.asarray(Image.fromarray(rough).resize((side, side))) / 1.5**power
    levels *= 255 / levels.max()
    where = Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).resize((side, side))
    grain = rng.normal(size=(side, side, 1))
    grain = (grain + np.roll(grain, 1, 0) + np.roll(grain, 1, 1)) / 2
    levels += 10 * grain * (np.asarray(where)[..., None] / 255)
    out = io.BytesIO()
    Image.fromarray(levels.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
    return out.getvalue()


def make_images(home: Path, count: int, side: int = 512) -> None:
    """The photos as image shards, six of them, so that there is something to prefetch."""
    pictures = [photo(side, seed) for seed in range(20)]
    source = home / "downloads"
    source.mkdir()
    for number in range(count):
        (source / f"{number:06d}.jpg").write_bytes(pictures[number % len(pictures)])
        (source / f"{number:06d}.txt").write_text(f"picture number {number} of many")
    size = str(max(1, count // 6))
    words = ours("pack", source, home / "images", "--samples-per-shard", size)
    subprocess.run(words, check=True, capture_output=True)
    shutil.rmtree(source)


# --- in processes of their own


def pixels(kind: str, side: int, resolution: int, count: int) -> None:
    import torch

    from tools.benches.encode_peers import guide_pixels
    from wdsprep.images.crop import crop

    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    pictures = [photo(side, seed) for seed in range(4)]
    work = {"crop": crop, "guide": guide_pixels}[kind]
    work(pictures[0], resolution)
    started = time.perf_counter()
    for number in range(count):
        work(pictures[number % len(pictures)], resolution)
    took(time.perf_counter() - started)


def encode_apart(
    home: str, count: int = 0, resolution: int = 256, *, runner: str = "local", **options: object
) -> float:
    """Seconds of a whole run, or for `count` images from first batch to last."""
    import wdsprep
    from wdsprep.encoding.progress import Speeds
    from wdsprep.runners.job import JobListener

    speeds = Speeds()
    started = time.perf_counter()
    wdsprep.encode(
        f"{home}/images",
        f"{home}/latents",
        resolution=resolution,
        limit=count,
        runner=runner,
        listener=JobListener(on_step=speeds.take),
        **options,
    )
    whole = time.perf_counter() - started
    rate = sum(speeds.rates().values())
    sizes = {worker.batch_size for worker in speeds.workers.values()}
    note(f"{rate:,.1f} images/s from first batch to last, device {speeds}, batch {max(sizes)}")
    return count / rate if count else whole


def free(home: str, runner: str) -> None:
    from tools.benches.encode_peers import make_free
    from wdsprep.encoding import encode as encoding

    encoding.make_encoder = make_free
    workers = 1 if runner == "ray" else 0
    took(encode_apart(home, model="tiny", runner=runner, workers=workers, batch_size=64))


def text(home: str, count: int, resolution: int, latents: str) -> None:
    from tools.benches.encode_peers import make_free
    from wdsprep.encoding import encode as encoding

    encoding.make_encoder = make_free
    options = {"model": "tiny", "runner": "local", "batch_size": 64, "latents": latents}
    took(encode_apart(home, count, resolution, **options))


def both(home: str, passes: list[list[int]]) -> None:
    """The CPU time of all processes."""
    import wdsprep
    from tools.benches.encode_peers import make_free
    from wdsprep.encoding import encode as encoding

    encoding.make_encoder = make_free
    options = {"model": "tiny", "runner": "local", "batch_size": 64}
    for resolutions in passes:
        out = f"{home}/both/{{resolution}}"
        wdsprep.encode(f"{home}/images", out, resolution=resolutions, **options)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    took(sum(each.ru_utime + each.ru_stime for each in used))


def modelled(home: str, model: str, count: int, resolution: int = 256) -> None:
    took(encode_apart(home, count, resolution, model=model))


def guide(home: str) -> None:
    import ray

    from tools.benches.encode_peers import peer_ray, start_ray

    start_ray()
    try:
        peer_ray(Path(home, "parquet"), Path(home, "theirs/first"))  # starts worker processes
        started = time.perf_counter()
        peer_ray(Path(home, "parquet"), Path(home, "theirs/second"))
        took(time.perf_counter() - started)
    finally:
        ray.shutdown()


def loop(model: str, count: int, size: int) -> None:
    from tools.benches.encode_peers import sd_batch

    _took_each(sd_batch(model, resolution=256, batch_size=size), count, size)


def family_loop(
    model: str, count: int, size: int, resolution: int = 256, least_s: float = 0.0
) -> None:
    from tools.benches.encode_peers import family_batch

    launch = family_batch(model, resolution=resolution, batch_size=size)
    _took_each(launch, count, size, least_s=least_s)


def _took_each(launch: "Launch", count: int, size: int, *, least_s: float = 0.0) -> None:
    """What `count` images take in whole batches of this size."""
    from tools.benches.encode_peers import DEVICE, seconds_of

    if DEVICE == "cuda":
        batches, least_s = 1, least_s or LOOP_S
    else:
        batches = max(1, count // size)
    took(seconds_of(launch, batches=batches, least_s=least_s) * count / size)
