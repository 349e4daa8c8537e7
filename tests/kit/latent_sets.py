"""Small latent datasets without a model: the arrays tell which sample they are of."""

import hashlib
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from wdsprep.dataset.file_names import table_name
from wdsprep.dataset.image_positions import plain_positions
from wdsprep.dataset.manifest import Manifest, Receipt, Shard
from wdsprep.dataset.npy_arrays import BFLOAT16, Field, layout, text_fields
from wdsprep.dataset.reindex import make_table
from wdsprep.dataset.sample_table import LATENT_COLUMNS
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


def members(key: str, fields: Sequence[Field]) -> list[tuple[str, bytes]]:
    arrays = [(item.name, npy(array_of(key, item))) for item in fields]
    text = f"caption {key} " * (int(key) % 50)
    return [*arrays, ("json", f'{{"key":"{key}"}}'.encode()), ("txt", text.encode())]


def write_shard(store: Store, name: str, keys: Sequence[str], fields: Sequence[Field]) -> Shard:
    return write_tar(store, name, ((key, fields) for key in keys))


def write_tar(store: Store, name: str, samples: Iterable[tuple[str, Sequence[Field]]]) -> Shard:
    """Each sample by its key and what arrays it has."""
    with store.write(name) as sink, TarWriter(sink) as tar:
        for key, fields in samples:
            tar.add(key, members(key, fields))
        tar.finish()
    write_bytes(store, f"{name}.idx", tar.index)
    return Shard(name=name, samples=tar.samples, nbytes=tar.nbytes, digest=tar.digest)


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
        shard = write_shard(store, f"{bucket}/{number:06d}.tar", keys, fields)
        receipts.append(receipt_of(shard, settings))
    publish(store, settings, receipts, fields, extra or {})
    return url


def receipt_of(
    shard: Shard, settings: Mapping[str, Any], *, input: str = "", **more: Mapping[str, Any]
) -> Receipt:
    """Of a unit that lost no sample; `input` is the digest of its image shard."""
    return Receipt(
        dataset="latents",
        unit=shard.name.removesuffix(".tar"),
        generation=0,
        settings=settings,
        input=input,
        inputs=shard.samples,
        shards=(shard,),
        rejects={},
        **more,
    )


def write_tables(store: Store, receipt: Receipt) -> Receipt:
    """Write the tables of a unit that lost no sample, and return its receipt."""
    files = dict(receipt.files)
    for shard in receipt.shards:
        rows = plain_positions(shard.samples)
        table, _ = make_table(store, shard.name, columns=LATENT_COLUMNS, positions=rows)
        write_bytes(store, name := table_name(shard.name), table)
        files[name] = hex_digest(table)
    return replace(receipt, files=files)


def publish(
    store: Store,
    settings: Mapping[str, Any],
    receipts: Sequence[Receipt],
    fields: Sequence[Field],
    extra: Mapping[str, Any],
) -> None:
    for item in text_fields(fields):
        write_bytes(store, f"empty.{item.name}", npy(empty_of(item)))
    receipts = [write_tables(store, receipt) for receipt in receipts]
    manifest = Manifest(
        dataset="latents", settings=settings, receipts=tuple(receipts), complete=True, extra=extra
    )
    write_bytes(store, "wdsprep.json", manifest.to_bytes())


# --- what a loader gave


def keys(batches: Any, steps: int | None = None) -> list[list[str]]:
    return [batch["key"] for batch in itertools.islice(batches, steps)]


def flat(found: Any) -> list[str]:
    return [key for part in found for key in part]
