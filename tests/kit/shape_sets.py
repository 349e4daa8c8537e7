"""Small latent datasets with shapes, without a model or an image."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.kit.joined_sets import Images, write_part
from tests.kit.latent_sets import EMB, field
from wdsprep.dataset.npy_arrays import Field
from wdsprep.dataset.shapes import Size

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
) -> ShapeSet:
    """Write shards of so many samples of each shape, whose images are mixed in their shards. The
    fields are those of a square of the resolution."""
    counts = counts or random_counts(6, len(shapes))
    shape_of: dict[str, Size] = {}
    for seed, row in enumerate(counts):
        mixed = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(shapes)), row))
        shape_of |= {f"{len(shape_of) + n:012d}": shapes[shape] for n, shape in enumerate(mixed)}
    images = Images(
        sizes=[sum(row) for row in counts],
        shapes=shapes,
        shape_of=shape_of,
        resolution=resolution,
        bucket=64,
    )
    return ShapeSet(url=write_part(url, images, fields), shape_of=shape_of)
