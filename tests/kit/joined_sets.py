"""Datasets of the same pretended images, as `encode` lays them out, without a model: latents, texts
and both, with shapes, and with images in roles."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.kit.latent_sets import LATENT, Member, array_of, npy, publish, receipt_of, write_unit
from tests.kit.latent_sets import field as array_field
from wdsprep.dataset.manifest import Receipt, Shard
from wdsprep.dataset.npy_arrays import Field, layout, text_fields
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject
from wdsprep.dataset.samples import facts_bytes
from wdsprep.dataset.shapes import Size, fields_in_shape, shape_name
from wdsprep.store import open_store
from wdsprep.store.base import Store, write_bytes

LATENTS = (array_field("latent", LATENT),)
TEXT = (array_field("pooled", (6,)), array_field("emb", (7, 16)))
VARIED = (array_field("pooled", (6,)), array_field("emb", (7, 16), "bfloat16", is_variable=True))
RoleSizes = Callable[[str], Mapping[str, Size]]
"""The sizes of the images in roles that the sample of a key has, by their names."""


@dataclass(frozen=True, kw_only=True)
class Images:
    """So many in each shard; each has the shape that `shape_of` or its key says, where there are
    shapes."""

    sizes: Sequence[int] = (60,) * 5
    version: str = "1"
    shapes: Sequence[Size] = ()
    shape_of: Mapping[str, Size] = field(default_factory=dict)
    resolution: int = 64
    bucket: int = 256
    changed: Mapping[int, str] = field(default_factory=dict)

    def key(self, shard: int, position: int) -> str:
        return f"{sum(self.sizes[:shard]) + position:012d}"

    def shape(self, key: str) -> int:
        if self.shape_of:
            return self.shapes.index(self.shape_of[key])
        return (int(key) * 7 + int(key) // 5) % len(self.shapes)

    def digest(self, shard: int) -> str:
        return f"{self.changed.get(shard, self.version)}-{shard:062d}"


def write_part(
    url: str,
    images: Images,
    fields: Sequence[Field],
    *,
    rejects: Mapping[int, Sequence[int]] | None = None,
    tag: str = "",
    more: Mapping[str, Any] | None = None,
    units: int | None = None,
    roles: RoleSizes | None = None,
) -> str:
    """Write what `encode` would make of the images, of the first `units` shards alone.

    `rejects` has the positions of images of a shard that came to nothing. `tag` tells captions from
    others, and the arrays of text with them."""
    has_latents = any(item.name == "latent.npy" for item in fields)
    settings: dict[str, Any] = {
        "latents": "sample" if has_latents else "none",
        "layout": layout(fields),
        "resolution": images.resolution,
        "scale": 0.18215,
        "shift": 0.1,
        **({"shapes": [list(size) for size in images.shapes]} if images.shapes else {}),
        **(more or {}),
    }
    if not has_latents:
        settings.pop("shapes", None)
    part = Part(open_store(url), images, fields, settings, tag, roles)
    lost = rejects or {}
    numbers = range(len(images.sizes) if units is None else units)
    receipts = [part.write(number, lost.get(number, ())) for number in numbers]
    publish(part.store, settings, receipts, fields, tag=tag, complete=units is None)
    return url


@dataclass(frozen=True)
class Part:
    """A dataset of images that is being written."""

    store: Store
    images: Images
    fields: Sequence[Field]
    settings: Mapping[str, Any]
    tag: str
    roles: RoleSizes | None

    def write(self, number: int, lost: Sequence[int]) -> Receipt:
        """Write the unit of an image shard, of which these positions are lost."""
        unit, count = f"{self.images.bucket}/{number:06d}", self.images.sizes[number]
        keys = {n: self.images.key(number, n) for n in range(count)}
        rejects = [Reject(key=keys[n], source="", code=Code.NOT_FINITE) for n in sorted(lost)]
        lines = "".join(reject.to_json() for reject in rejects)
        write_bytes(self.store, f"rejects/{unit}.jsonl", lines.encode())
        left, shapes = [n for n in keys if n not in lost], Counter[str]()
        if "shapes" in self.settings:
            left.sort(key=lambda n: (self.images.shape(keys[n]), n))
            shapes.update(shape_name(self._size(keys[n])) for n in left)
        said = {"input": self.images.digest(number), "inputs": count, "counts": {**shapes}}
        said["rejects"] = {"not_finite": len(lost)} if lost else {}
        if not left:
            return receipt_of(Shard(f"{unit}.tar", 0, 0, ""), self.settings, **said, shards=())
        samples = ((n, keys[n], [*self._members(keys[n])]) for n in left)
        return write_unit(self.store, unit, self.settings, samples, **said)

    def _size(self, key: str) -> Size:
        if "shapes" in self.settings:
            return self.images.shapes[self.images.shape(key)]
        return self.images.resolution, self.images.resolution

    def _members(self, key: str) -> Iterator[Member]:
        """Arrays of the image know nothing of the caption."""
        of_text, size = text_fields(self.fields), self._size(key)
        sizes = self.roles(key) if self.roles else {}
        fields = self.fields
        if self.roles or "shapes" in self.settings:
            fields = fields_in_shape(self.settings, size, sizes)
        for item in fields:
            yield item.name, npy(array_of(key + (self.tag if item in of_text else ""), item))
        facts: dict[str, Any] = {"key": key, "source": f"a/{key}"}
        if len(of_text) < len(self.fields):
            sides = {"width": int(key), "height": 9}
            facts |= sides | {"original_width": int(key), "original_height": 18}
        if of_text:
            facts |= {"caption": caption(key, self.tag), "tokens": int(key) % 7}
        if self.roles:
            facts |= {"crop": [0, 0, *size]}
            facts |= {f"{name}_width": width for name, (width, _) in sizes.items()}
            facts |= {f"{name}_height": height for name, (_, height) in sizes.items()}
        yield "json", facts_bytes(facts)
        yield "txt", caption(key, self.tag).encode()


def caption(key: str, tag: str) -> str:
    return f"{tag} {key} " * (1 + int(key) % 5)
