"""Small latent datasets whose samples have images in roles, as `encode` lays them out."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.kit.latent_sets import EMB, array_of, empty_of, field, npy, receipt_of
from tests.kit.shape_sets import CELL, RESOLUTION, SHAPES
from wdsprep.dataset.file_names import table_name
from wdsprep.dataset.manifest import Manifest, Shard
from wdsprep.dataset.npy_arrays import FLIPPED, Field, layout, text_fields
from wdsprep.dataset.sample_table import TableWriter, table_columns
from wdsprep.dataset.samples import facts_bytes, role_of
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.shapes import Size, fields_in_shape, shape_name
from wdsprep.dataset.tar.write import TarWriter
from wdsprep.loading.open_datasets import SIDES
from wdsprep.store import open_store
from wdsprep.store.base import write_bytes

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
    store = open_store(url)
    roles = [item.role for item in fields if item.role and not item.mirrors]
    has_target = LATENT.name in {item.name for item in fields}
    settings: dict[str, Any] = {
        "latents": "sample" if has_target else "none",
        "layout": layout(fields),
        "resolution": RESOLUTION,
        "scale": 1.0,
        "shift": 0.0,
    }
    if roles:
        settings["roles"] = ["target"] * has_target + roles
    if has_target and shapes:
        settings["shapes"] = [list(size) for size in shapes]
    columns, keys = table_columns("latents", settings), iter(keys_of(shards))
    receipts = []
    for number, samples in enumerate(shards):
        rows = [(row, next(keys), sample) for row, sample in enumerate(samples)]
        counts: dict[str, int] = {}
        if "shapes" in settings:
            rows.sort(key=lambda row: shapes.index(row[2].target))
            counts.update(Counter(shape_name(sample.target) for sample in samples))
        name = f"64/{number:06d}.tar"
        table = TableWriter(columns)
        with store.write(name) as sink, TarWriter(sink) as tar:
            for row, key, sample in rows:
                facts = facts_of(key, sample, roles)
                tar.add(key, members(key, sample, settings, facts))
                table.add(key, {**facts, "row": row})
            tar.finish()
        write_bytes(store, f"{name}.idx", tar.index)
        write_bytes(store, table_name(name), data := table.finish())
        shard = Shard(name, tar.samples, tar.nbytes, tar.digest)
        more = {"counts": counts, "files": {table_name(name): hex_digest(data)}}
        receipts.append(receipt_of(shard, settings, input=f"{number:064x}", **more))
    for item in text_fields(fields):
        write_bytes(store, f"empty.{item.name}", npy(empty_of(item)))
    manifest = Manifest(
        dataset="latents", settings=settings, receipts=tuple(receipts), complete=True
    )
    write_bytes(store, "wdsprep.json", manifest.to_bytes())
    return url


def facts_of(key: str, sample: RoleSample, roles: Sequence[str]) -> dict[str, Any]:
    sizes = {name: size for name, size in sample.images.items() if role_of(name)[0] in roles}
    sides = {
        f"{n}_{side}": of for n, size in sizes.items() for side, of in zip(SIDES, size, strict=True)
    }
    return {"key": key, "source": key, **sides}


def fields_of_sample(sample: RoleSample, settings: Mapping[str, Any]) -> tuple[Field, ...]:
    size = sample.target if "shapes" in settings else None
    return fields_in_shape(settings, size, sample.images)


def members(
    key: str, sample: RoleSample, settings: Mapping[str, Any], facts: Mapping[str, Any]
) -> list[tuple[str, bytes]]:
    fields = fields_of_sample(sample, settings)
    arrays = [(item.name, npy(array_of(key, item))) for item in fields]
    return [*arrays, ("json", facts_bytes(facts)), ("txt", f"caption {key}".encode())]
