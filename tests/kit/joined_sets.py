"""Datasets of the same pretended images, to be joined: latents, texts and both, without a model."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.kit.latent_sets import LATENT, array_of, empty_of, npy
from tests.kit.latent_sets import field as array_field
from wdsprep.dataset.file_names import table_name
from wdsprep.dataset.manifest import Manifest, Receipt, Shard
from wdsprep.dataset.npy_arrays import Field, layout, text_fields
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject
from wdsprep.dataset.sample_table import TableWriter, table_columns
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.shapes import Size, fields_in_shape, shape_name
from wdsprep.dataset.tar.write import TarWriter
from wdsprep.store import open_store
from wdsprep.store.base import write_bytes

LATENTS = (array_field("latent", LATENT),)
TEXT = (array_field("pooled", (6,)), array_field("emb", (7, 16)))
VARIED = (array_field("pooled", (6,)), array_field("emb", (7, 16), "bfloat16", is_variable=True))
Rejected = Mapping[int, Sequence[int]]
"""By shard, the positions of images that came to nothing."""
RoleSizes = Callable[[str], Mapping[str, Size]]
"""The sizes of the images in roles that the sample of a key has, by their names."""


@dataclass(frozen=True, kw_only=True)
class Images:
    """So many in each shard; each has the shape that its key says, where there are shapes."""

    sizes: Sequence[int] = (60,) * 5
    version: str = "1"
    shapes: Sequence[Size] = ()
    resolution: int = 64
    changed: Mapping[int, str] = field(default_factory=dict)

    def key(self, shard: int, position: int) -> str:
        return f"{sum(self.sizes[:shard]) + position:012d}"

    def shape(self, key: str) -> int:
        return (int(key) * 7 + int(key) // 5) % len(self.shapes)

    def digest(self, shard: int) -> str:
        return f"{self.changed.get(shard, self.version)}-{shard:062d}"


def write_part(
    url: str,
    images: Images,
    fields: Sequence[Field],
    *,
    rejects: Rejected | None = None,
    tag: str = "",
    more: Mapping[str, Any] | None = None,
    units: int | None = None,
    roles: RoleSizes | None = None,
) -> str:
    """What `encode` would make of the images: `tag` tells captions from others, and the arrays of
    text with them; of the first `units` shards alone."""
    store = open_store(url)
    has_latents = any(item.name == "latent.npy" for item in fields)
    settings: dict[str, Any] = {
        "latents": "sample" if has_latents else "none",
        "layout": layout(fields),
        "resolution": images.resolution,
        "scale": 0.18215,
        "shift": 0.1,
        **({"shapes": [list(size) for size in images.shapes]} if _shaped(images, fields) else {}),
        **(more or {}),
    }
    receipts = []
    for number in range(len(images.sizes) if units is None else units):
        lost = (rejects or {}).get(number, ())
        receipts.append(_unit(store, images, settings, fields, number, lost, tag, roles))
    for item in text_fields(fields):
        write_bytes(store, f"empty.{item.name}", npy(empty_of(item) + len(tag)))
    whole = Manifest(
        dataset="latents", settings=settings, receipts=tuple(receipts), complete=units is None
    )
    write_bytes(store, "wdsprep.json", whole.to_bytes())
    return url


def _shaped(images: Images, fields: Sequence[Field]) -> bool:
    return bool(images.shapes) and any(item.name == "latent.npy" for item in fields)


def _unit(
    store: Any,
    images: Images,
    settings: Mapping[str, Any],
    fields: Sequence[Field],
    number: int,
    lost: Sequence[int],
    tag: str,
    roles: RoleSizes | None,
) -> Receipt:
    unit, name = f"256/{number:06d}", f"256/{number:06d}.tar"
    left = [n for n in range(images.sizes[number]) if n not in lost]
    keys = {n: images.key(number, n) for n in range(images.sizes[number])}
    counts: dict[str, int] = {}
    of_shape = [tuple(fields)] * max(1, len(images.shapes))
    if _shaped(images, fields):
        left.sort(key=lambda n: (images.shape(keys[n]), n))
        of_shape = [fields_in_shape(settings, size) for size in images.shapes]
        for n in left:
            shape = shape_name(images.shapes[images.shape(keys[n])])
            counts[shape] = counts.get(shape, 0) + 1
    shards: tuple[Shard, ...] = ()
    files: dict[str, str] = {}
    if left:
        table = TableWriter(table_columns("latents", settings))
        with store.write(name) as sink, TarWriter(sink) as tar:
            for n in left:
                shape_number = images.shape(keys[n]) if _shaped(images, fields) else 0
                own, facts = of_shape[shape_number], {}
                if roles is not None:
                    square = (images.resolution, images.resolution)
                    size = images.shapes[shape_number] if _shaped(images, fields) else square
                    own = fields_in_shape(settings, size, sizes := roles(keys[n]))
                    facts = facts_of_roles(size, sizes)
                stored = members(keys[n], own, tag, facts)
                tar.add(keys[n], stored)
                table.add(keys[n], {**json.loads(dict(stored)["json"]), "row": n})
            tar.finish()
        write_bytes(store, f"{name}.idx", tar.index)
        shards = (Shard(name, tar.samples, tar.nbytes, tar.digest),)
        write_bytes(store, table_name(name), data := table.finish())
        files[table_name(name)] = hex_digest(data)
    lines = (Reject(key=keys[n], source="", code=Code.NOT_FINITE).to_json() for n in sorted(lost))
    write_bytes(store, f"rejects/{unit}.jsonl", "".join(lines).encode())
    return Receipt(
        dataset="latents",
        unit=unit,
        generation=0,
        settings=settings,
        input=images.digest(number),
        inputs=images.sizes[number],
        shards=shards,
        rejects={"not_finite": len(lost)} if lost else {},
        counts=counts,
        files=files,
    )


def facts_of_roles(size: Size, sizes: Mapping[str, Size]) -> dict[str, Any]:
    """What the json of latents says of the crop, and of images in roles."""
    sides = {f"{name}_width": width for name, (width, _) in sizes.items()}
    sides |= {f"{name}_height": height for name, (_, height) in sizes.items()}
    return {"crop": [0, 0, *size], **sides}


def members(
    key: str, fields: Sequence[Field], tag: str, more: Mapping[str, Any]
) -> list[tuple[str, bytes]]:
    """Arrays of the image know nothing of the caption."""
    of_text = text_fields(fields)
    arrays = [
        (item.name, npy(array_of(key + (tag if item in of_text else ""), item))) for item in fields
    ]
    facts: dict[str, Any] = {"key": key, "source": f"a/{key}"}
    if len(of_text) < len(fields):
        facts |= {"width": int(key), "height": 9, "original_width": int(key), "original_height": 18}
    if of_text:
        facts |= {"caption": caption(key, tag), "tokens": int(key) % 7}
    facts |= more
    return [
        *arrays,
        ("json", json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()),
        ("txt", caption(key, tag).encode()),
    ]


def caption(key: str, tag: str) -> str:
    return f"{tag} {key} " * (1 + int(key) % 5)
