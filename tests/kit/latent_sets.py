"""Small latent datasets without a model: the arrays tell which sample they are of."""

import hashlib
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from wdsprep.dataset.file_names import MANIFEST, table_name
from wdsprep.dataset.manifest import Manifest, Receipt, Shard
from wdsprep.dataset.npy_arrays import BFLOAT16, Field, layout, text_fields
from wdsprep.dataset.sample_table import ROW, TableWriter, table_columns
from wdsprep.dataset.samples import parse_object
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.tar.write import TarWriter
from wdsprep.store import open_store
from wdsprep.store.base import Store, write_bytes

LATENT = (4, 8, 8)
EMB = (7, 16)


def field(
    name: str, shape: tuple[int, ...], dtype: str = "<f2", *, is_variable: bool = False
) -> Field:
    return Field(name=f"{name}.npy", dtype=dtype, shape=shape, is_variable=is_variable)


def array_of(key: str, item: Field) -> Any:
    """As NumPy reads it; where lengths vary, so long that some captions fill their row."""
    seed = hashlib.sha256(f"{key}/{item.name}".encode()).digest()[:4]
    chance = np.random.default_rng(list(seed))
    if item.dtype == "|u1":
        return chance.integers(256, size=item.shape, dtype="|u1")
    length = 1 + int(chance.integers(item.shape[0])) if item.is_variable else item.shape[0]
    return stored(chance.standard_normal((length, *item.shape[1:])), item)


def stored(values: Any, item: Field) -> Any:
    """Numbers in the dtype that the field has in its file."""
    if item.dtype == BFLOAT16:
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2")
    return values.astype(item.dtype)


def empty_of(item: Field) -> Any:
    """What stands for the empty caption: nines, and two tokens of them where lengths vary."""
    length = 2 if item.is_variable else item.shape[0]
    return stored(np.full((length, *item.shape[1:]), 9.0), item)


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


Member = tuple[str, bytes]


def members(key: str, fields: Sequence[Field]) -> list[Member]:
    arrays = [(item.name, npy(array_of(key, item))) for item in fields]
    text = f"caption {key} " * (int(key) % 50)
    return [*arrays, ("json", f'{{"key":"{key}"}}'.encode()), ("txt", text.encode())]


def write_unit(
    store: Store,
    unit: str,
    settings: Mapping[str, Any],
    samples: Iterable[tuple[int, str, list[Member]]],
    **receipt: Any,
) -> Receipt:
    """Write a shard with its index and its table, and return the receipt of its unit.

    Samples are the position in their image shard, their key, and their members."""
    table = TableWriter(table_columns("latents", settings))
    with store.write(name := f"{unit}.tar") as sink, TarWriter(sink) as tar:
        for position, key, stored_members in samples:
            tar.add(key, stored_members)
            table.add(key, {**(parse_object(dict(stored_members)["json"]) or {}), ROW: position})
        tar.finish()
    write_bytes(store, f"{name}.idx", tar.index)
    write_bytes(store, table_name(name), data := table.finish())
    shard = Shard(name=name, samples=tar.samples, nbytes=tar.nbytes, digest=tar.digest)
    return receipt_of(shard, settings, files={table_name(name): hex_digest(data)}, **receipt)


def write_latents(
    url: str,
    sizes: Sequence[int] = (60,) * 5,
    *,
    bucket: str = "256",
    base: int = 0,
    fields: Sequence[Field] = (),
    moments: bool = False,
    more: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> str:
    """A dataset of shards with so many samples; its keys are numbers from `base` on. `more` are
    settings, and `extra` is what the manifest has beside them."""
    fields = fields or (field("latent", LATENT), field("emb", EMB))
    if moments:
        fields = (field("latent", (2 * LATENT[0], *LATENT[1:])), *fields[1:])
    store = open_store(url)
    settings = {
        "latents": "moments" if moments else "sample",
        "layout": layout(fields),
        "scale": 0.18215,
        "shift": 0.1,
        **(more or {}),
    }
    receipts = []
    for number, size in enumerate(sizes):
        keys = [f"{base + sum(sizes[:number]) + n:012d}" for n in range(size)]
        samples = ((n, key, members(key, fields)) for n, key in enumerate(keys))
        receipts.append(write_unit(store, f"{bucket}/{number:06d}", settings, samples))
    publish(store, settings, receipts, fields, extra=extra or {})
    return url


def receipt_of(shard: Shard, settings: Mapping[str, Any], **more: Any) -> Receipt:
    """The receipt of a unit that lost no sample, but for what is said otherwise."""
    said = {"input": "", "inputs": shard.samples, "rejects": {}, "shards": (shard,)}
    unit = shard.name.removesuffix(".tar")
    return Receipt(dataset="latents", unit=unit, generation=0, settings=settings, **(said | more))


def publish(
    store: Store,
    settings: Mapping[str, Any],
    receipts: Iterable[Receipt],
    fields: Sequence[Field],
    *,
    tag: str = "",
    **more: Any,
) -> None:
    """Write the manifest, and what stands for the empty caption; a tag makes that another."""
    for item in text_fields(fields):
        write_bytes(store, f"empty.{item.name}", npy(empty_of(item) + len(tag)))
    said = {"settings": settings, "receipts": tuple(receipts), "complete": True}
    write_bytes(store, MANIFEST, Manifest(dataset="latents", **(said | more)).to_bytes())


# --- what a loader gave


def keys(batches: Any, steps: int | None = None) -> list[list[str]]:
    return [batch["key"] for batch in itertools.islice(batches, steps)]


def flat(found: Any) -> list[str]:
    return [key for part in found for key in part]
