"""What a loader is given, and what a dataset holds: its shards, their sizes, a digest, the layout.

A dataset is known by what its shards hold, never by where it lies, so a state of the loader
outlives a move to another disk or bucket. Tars without a manifest are known by names and sizes.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from wdsprep import order
from wdsprep.arrays import Field, fields_of
from wdsprep.dataset import read_manifest
from wdsprep.errors import NotFoundError, UsageError
from wdsprep.manifest import Manifest, Shard
from wdsprep.order.mixing import Want
from wdsprep.order.permute import Ints
from wdsprep.store import Store, open_store


@dataclass(frozen=True)
class Stream:
    """One dataset among those a loader mixes.

    At most one of `weight` (its proportion to the other streams), `repeat` (how often each sample
    comes in an epoch) and `count` (so many samples an epoch) says how much of it an epoch has; by
    default each sample comes once. `buckets` names the folders to take, by default all.
    """

    url: str
    weight: float | None = None
    repeat: float | None = None
    count: int | None = None
    buckets: Sequence[str | int] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """An opened stream. `kind` is latents, images, or tars where there is no manifest."""

    store: Store
    kind: str
    names: tuple[str, ...]
    contents: tuple[str, ...]  # what changes when a shard's bytes do
    sizes: tuple[int, ...]
    nbytes: int
    digest: str
    want: Want
    settings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """The arrays of a sample, the first members of it; none but in latent shards."""
        return fields_of(self.settings["layout"]) if self.kind == "latents" else ()

    @cached_property
    def ends(self) -> Ints:
        """Where each shard ends, if the samples of all are counted through."""
        return np.cumsum(np.asarray(self.sizes, np.int64))

    @property
    def sample_nbytes(self) -> int:
        """The mean, so that reading ahead can be bounded in bytes."""
        return max(1, self.nbytes // int(self.ends[-1]))

    @property
    def has_moments(self) -> bool:
        return self.settings.get("latents") == "moments"

    def urls(self) -> list[str]:
        return [f"{self.store.url}/{name}" for name in self.names]

    def as_stream(self) -> order.Stream:
        sizes = np.asarray(self.sizes, np.int64)
        return order.Stream(digest=self.digest, sizes=sizes, want=self.want)


def open_all(streams: "str | Stream | Iterable[str | Stream]") -> tuple[Dataset, ...]:
    """The datasets behind what `load` was given."""
    given = [streams] if isinstance(streams, str | Stream) else list(streams)
    if not given:
        raise UsageError("nothing to load: give the path or URL of a dataset")
    opened = [s if isinstance(s, Stream) else Stream(s) for s in given]
    return tuple(open_dataset(stream) for stream in opened)


def open_dataset(stream: Stream) -> Dataset:
    """One GET where there is a manifest; a listing for tars that something else made."""
    store = open_store(stream.url)
    want = Want(weight=stream.weight, repeat=stream.repeat, count=stream.count)
    buckets = None if stream.buckets is None else frozenset(map(str, stream.buckets))
    manifest = read_manifest(store)
    if manifest is None:
        return _of_tars(store, want, buckets)
    return _of_manifest(store, manifest, want, buckets)


def _of_manifest(
    store: Store, manifest: Manifest, want: Want, buckets: "frozenset[str] | None"
) -> Dataset:
    there = {shard.name.partition("/")[0] for shard in manifest.shards}
    shards = [s for s in manifest.shards if buckets is None or s.name.partition("/")[0] in buckets]
    if not shards:
        hint = f"it has the buckets {', '.join(sorted(there))}" if there else "it has no shards yet"
        raise UsageError(f"{store.url} holds nothing to load: {hint}")
    return Dataset(
        store=store,
        kind=manifest.dataset,
        names=tuple(shard.name for shard in shards),
        contents=tuple(shard.sha256 for shard in shards),
        sizes=tuple(shard.samples for shard in shards),
        nbytes=sum(shard.nbytes for shard in shards),
        digest=_digest(shards),
        want=want,
        settings=manifest.settings,
    )


def _digest(shards: Iterable[Shard]) -> str:
    parts = [(shard.name, shard.samples, shard.sha256) for shard in shards]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _of_tars(store: Store, want: Want, buckets: "frozenset[str] | None") -> Dataset:
    """An index tells the samples of its tar by its length, so nothing but the listing is read."""
    listed = {entry.name: entry for entry in store.list()}
    names = [n for n in listed if n.endswith(".tar")]
    names = [n for n in names if buckets is None or n.partition("/")[0] in buckets]
    if not names:
        raise NotFoundError(f"{store.url} holds no dataset: no wdsprep.json and no tars")
    bare = [name for name in names if f"{name}.idx" not in listed]
    if bare:
        raise UsageError(
            f"{store.url}/{bare[0]} has no index ({len(bare)} of {len(names)} tars): "
            f'run "wdsprep index {store.url}" first'
        )
    sizes = [listed[f"{name}.idx"].nbytes // 8 - 1 for name in names]
    nbytes = [listed[name].nbytes for name in names]
    parts = list(zip(names, sizes, nbytes, strict=True))
    return Dataset(
        store=store,
        kind="tars",
        names=tuple(names),
        contents=tuple(f"{store.url}/{n} {listed[n].stamp} {listed[n].nbytes}" for n in names),
        sizes=tuple(sizes),
        nbytes=sum(nbytes),
        digest=hashlib.sha256(json.dumps(parts).encode()).hexdigest(),
        want=want,
    )
