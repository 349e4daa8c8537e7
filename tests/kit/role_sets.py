"""Small latent datasets whose samples have images in roles."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.kit.joined_sets import Images, write_part
from tests.kit.latent_sets import EMB, field
from tests.kit.shape_sets import CELL, RESOLUTION, SHAPES
from wdsprep.dataset.npy_arrays import FLIPPED, Field
from wdsprep.dataset.samples import role_of
from wdsprep.dataset.shapes import Size

SQUARE = (RESOLUTION, RESOLUTION)
CELLS = RESOLUTION // CELL
LATENT = field("latent", (4, CELLS, CELLS))
LATENT_FLIPPED = replace(LATENT, name=FLIPPED)
SOURCE = Field(name="source.npy", dtype="<f2", shape=(4, CELLS, CELLS), is_of_role=True)
SOURCE_FLIPPED = replace(SOURCE, name="source_flipped.npy")
MASK = Field(name="mask.npy", dtype="|u1", shape=(CELLS, CELLS), is_of_role=True)
TEXT = field("emb", EMB)


@dataclass(frozen=True, kw_only=True)
class RoleSample:
    """The size of the target, and of each further image of a sample by its name."""

    target: Size = SQUARE
    images: Mapping[str, Size]


Shards = Sequence[Sequence[RoleSample]]


def random_samples(
    shards: int, each: int, *, shapes: Sequence[Size] = SHAPES[2:5], seed: int = 0
) -> list[list[RoleSample]]:
    """Return samples with one or two sources of any shape; some have a mask like their target."""
    chance = random.Random(seed)
    samples = []
    for _ in range(shards * each):
        target = chance.choice(shapes)
        images = {"source": chance.choice(shapes), "source_1": chance.choice(shapes)}
        if chance.random() < 0.5:
            del images["source_1"]
        if chance.random() < 0.7:
            images["mask"] = target
        samples.append(RoleSample(target=target, images=images))
    return [samples[n * each : (n + 1) * each] for n in range(shards)]


def keys_of(shards: Shards) -> dict[str, RoleSample]:
    """The samples by their keys, which rise as their images stand in the image shards."""
    return {f"{n:012d}": sample for n, sample in enumerate(s for shard in shards for s in shard)}


def write_roles(
    url: str,
    shards: Shards,
    fields: Sequence[Field] = (LATENT, SOURCE, MASK, TEXT),
    *,
    shapes: Sequence[Size] = SHAPES,
) -> str:
    """Write these arrays of all samples; datasets of the same samples may be joined.

    Targets have shapes, if there are targets."""
    samples = keys_of(shards)
    roles = [item.role for item in fields if item.role and not item.mirrors]
    images = Images(
        sizes=[len(shard) for shard in shards],
        shapes=shapes,
        shape_of={key: sample.target for key, sample in samples.items()},
        bucket=64,
    )
    more: dict[str, Any] = {"scale": 1.0, "shift": 0.0}
    if not roles:
        return write_part(url, images, fields, more=more)
    more["roles"] = ["target"] * (LATENT.name in {item.name for item in fields}) + roles

    def sizes(key: str) -> dict[str, Size]:
        named = samples[key].images.items()
        return {name: size for name, size in named if role_of(name)[0] in roles}

    return write_part(url, images, fields, more=more, roles=sizes)
