"""Small latent datasets with shapes, as `encode` lays them out, without a model or an image."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tests.kit.latent_sets import EMB, field, publish, receipt_of, write_tar
from wdsprep.dataset.manifest import Shard
from wdsprep.dataset.npy_arrays import Field, layout
from wdsprep.dataset.shapes import Size, fields_in_shape, shape_name
from wdsprep.store import open_store

RESOLUTION, CELL = 64, 8
SHAPES: tuple[Size, ...] = ((32, 128), (48, 80), (56, 72), (64, 64), (72, 56), (80, 48), (128, 32))
FIELDS = (field("latent", (4, RESOLUTION // CELL, RESOLUTION // CELL)), field("emb", EMB))


@dataclass(frozen=True, kw_only=True)
class ShapeSet:
    """A dataset at `url`, and which shape the sample with each key has."""

    url: str
    shape_of: dict[str, Size]


def random_counts(shards: int, shapes: int, seed: int = 0) -> list[list[int]]:
    """For each shard the samples of each shape: some have none, and the first shape has one in
    all."""
    chance = random.Random(seed)
    rows = [[chance.choice([0, 0, 3, 11, 25]) for _ in range(shapes)] for _ in range(shards)]
    for row in rows:
        row[0] = 0
    rows[shards // 2][0] = 1
    return rows


def write_shapes(
    url: str,
    counts: Sequence[Sequence[int]] = (),
    *,
    shapes: Sequence[Size] = SHAPES,
    fields: Sequence[Field] = FIELDS,
    resolution: int = RESOLUTION,
    moments: bool = False,
    base: int = 0,
) -> ShapeSet:
    """Keys are numbers from `base` on, rising within each shape of a shard as in `encode`'s. The
    fields are those of a square of the resolution."""
    counts = counts or random_counts(6, len(shapes))
    if moments:
        latent = fields[0]
        fields = (field("latent", (2 * latent.shape[0], *latent.shape[1:])), *fields[1:])
    store = open_store(url)
    settings = {
        "latents": "moments" if moments else "sample",
        "layout": layout(fields),
        "resolution": resolution,
        "scale": 0.18215,
        "shapes": [list(size) for size in shapes],
        "shift": 0.1,
    }
    shape_of: dict[str, Size] = {}
    receipts = []
    for number, row in enumerate(counts):
        if not sum(row):
            continue
        own = dict(_keys(base + len(shape_of), row, shapes, number))
        shape_of |= own
        made = ((key, fields_in_shape(settings, size)) for key, size in own.items())
        shard = write_tar(store, f"64/{number:06d}.tar", made)
        named = zip(map(shape_name, shapes), row, strict=True)
        counts = {"cut": 1, **{name: count for name, count in named if count}}
        receipts.append(receipt_of(shard, settings, counts=counts))
    publish(store, settings, receipts, fields, {})
    return ShapeSet(url=url, shape_of=shape_of)


def _keys(
    first: int, row: Sequence[int], shapes: Sequence[Size], seed: int
) -> Iterator[tuple[str, Size]]:
    """The keys of a shard in the order of its tar, with their shapes: an image shard has the shapes
    mixed, in the order of the keys."""
    numbers = np.random.default_rng(seed).permutation(sum(row)) + first
    for size, some in zip(shapes, np.split(numbers, np.cumsum(row)[:-1]), strict=True):
        for number in sorted(some.tolist()):
            yield f"{number:012d}", size


def write_manifest(url: str, shards: int, shapes: int, *, samples: int = 10) -> str:
    """That of a dataset of so many shards and shapes without the shards: each has up to so many
    samples of each shape, none of a fifth of them."""
    chance = np.random.default_rng(0)
    sizes = [(CELL * (n + 1), CELL * (shapes - n)) for n in range(shapes)]
    settings = {
        "layout": layout(FIELDS),
        "resolution": RESOLUTION,
        "shapes": [list(size) for size in sizes],
    }
    names = list(map(shape_name, sizes))
    receipts = []
    for number in range(shards):
        row = chance.integers(-samples // 4, samples, shapes, endpoint=True).clip(0).tolist()
        name = f"64/{number:06d}"
        shard = Shard(f"{name}.tar", sum(row), sum(row) << 17, f"{number:064x}")
        counts = {name: count for name, count in zip(names, row, strict=True) if count}
        files = {f"rejects/{name}.jsonl": f"{number:064x}"}
        made = receipt_of(shard, settings, input=shard.digest, counts=counts, files=files)
        receipts.append(made)
    publish(open_store(url), settings, receipts, FIELDS, {})
    return url
