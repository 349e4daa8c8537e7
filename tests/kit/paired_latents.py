"""Latents of packed images as `encode` lays them out, without a model: the arrays tell the key."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.kit.latent_sets import array_of, empty_of, field, npy
from wdsprep.dataset.digests import hex_digest
from wdsprep.dataset.draft import Draft
from wdsprep.dataset.file_names import latent_unit, rejects_name
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.npy_arrays import Field, layout
from wdsprep.dataset.receipts import Receipt, Shard
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject
from wdsprep.dataset.sample_table import LATENT_COLUMNS
from wdsprep.dataset.samples import facts_bytes
from wdsprep.dataset.shapes import Size, fields_by_shape, shape_name
from wdsprep.dataset.stored_dataset import read_manifest, write_manifest
from wdsprep.dataset.tar.read import file_tape, read_samples
from wdsprep.dataset.unit_locks import Edition
from wdsprep.images.nearest_shape import cut_of
from wdsprep.store import open_store
from wdsprep.store.base import write_bytes

RESOLUTION = 64
FIELDS = (field("latent", (4, 8, 8)), field("emb", (7, 16)))


def nothing(_key: str) -> bool:
    return False


def latents_of(
    images: Path,
    out: Path,
    *,
    rejected: Callable[[str], bool] = nothing,
    shapes: Sequence[Size] = (),
    seed: int = 0,
) -> Path:
    """Of all buckets."""
    store = open_store(str(out))
    settings: dict[str, Any] = {
        "latents": "sample",
        "layout": layout(FIELDS),
        "resolution": RESOLUTION,
        "scale": 0.18215,
        "seed": seed,
        "shift": 0.0,
        "text": "emb",
        "weights": "none",
    }
    if shapes:
        settings["shapes"] = [list(size) for size in shapes]
    empty = npy(empty_of(FIELDS[1]))
    write_bytes(store, "empty.emb.npy", empty)
    manifest = read_manifest(open_store(str(images)))
    assert manifest is not None
    made = [_shard(images, shard, out, settings, rejected) for shard in manifest.shards]
    write_manifest(
        store,
        Manifest(
            dataset="latents",
            settings=settings,
            receipts=tuple(made),
            complete=True,
            extra={"model": "tiny"},
        ),
    )
    return out


def _shard(
    images: Path,
    shard: Shard,
    out: Path,
    settings: dict[str, Any],
    rejected: Callable[[str], bool],
) -> Receipt:
    unit, by_shape = latent_unit(shard.name), fields_by_shape(settings)
    fits = cut_of(settings)
    found: dict[str, list[tuple[int, str, list[tuple[str, bytes]]]]] = {}
    counts = {"cut": 0, "empty_caption": 0}
    with (
        Draft(Edition(store=open_store(str(out))), unit) as draft,
        file_tape(images / shard.name) as tape,
    ):
        for position, sample in enumerate(read_samples(tape, shard.name)):
            facts, key = json.loads(sample.fields["json"]), sample.key
            if rejected(key):
                reject = Reject(key=key, source=facts["source"], code=Code.NOT_FINITE)
                draft.rejects.add(reject)
                continue
            fit = fits.fit(facts["width"], facts["height"])
            shape = shape_name((fit.width, fit.height)) if by_shape else ""
            members = _members(key, facts, fit, by_shape.get(shape, FIELDS))
            found.setdefault(shape, []).append((position, key, members))
            counts["empty_caption"] += not facts["caption"]
        tar = draft.shard(shard.name, LATENT_COLUMNS) if found else None
        for shape in by_shape or [""]:
            for position, key, members in found.get(shape, ()):
                assert tar is not None
                said = {**json.loads(dict(members)["json"]), "row": position}
                tar.add(key, members, facts=said)
            if shape and shape in found:
                counts[shape] = len(found[shape])
        files = {rejects_name(unit): draft.rejects.digest}
        empty = hex_digest(npy(empty_of(FIELDS[1])))
        receipt = Receipt(
            dataset="latents",
            unit=unit,
            generation=0,
            settings=settings,
            input=shard.digest,
            inputs=shard.samples,
            shards=(tar.finish(),) if tar else (),
            rejects=dict(draft.rejects.counts),
            counts=counts if tar else {},
            files={**files, "empty.emb.npy": empty},
        )
        return draft.finish(receipt, {})


def _members(
    key: str, facts: dict[str, Any], fit: Any, fields: Sequence[Field]
) -> list[tuple[str, bytes]]:
    said = {
        **{name: facts[name] for name in ("caption", "height", "width", "source")},
        **{name: facts[name] for name in ("source_height", "source_width")},
        "crop": [fit.left, fit.top, fit.left + fit.width, fit.top + fit.height],
        "cut": False,
        "key": key,
        "scaled_height": fit.scaled_height,
        "scaled_width": fit.scaled_width,
        "tokens": 3,
    }
    arrays = [(item.name, npy(array_of(key, item))) for item in fields]
    return [*arrays, ("json", facts_bytes(said)), ("txt", facts["caption"].encode())]
