"""The image shards that latents are made of: of a dataset that `pack` made, or any tars."""

import pickle
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from wdsprep.dataset.buckets import buckets_encoded
from wdsprep.dataset.digests import DigestKind
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.names import RECEIPTS, latent_unit
from wdsprep.dataset.shapes import Size
from wdsprep.dataset.state import check_kind, check_place, dated_manifest, refreshed
from wdsprep.errors import SourceError, UsageError
from wdsprep.sources import Columns, Item
from wdsprep.sources.patterns import tar_stem
from wdsprep.sources.recognise import UnclearSourceError, recognise
from wdsprep.sources.tars import TarsSource
from wdsprep.store import open_store
from wdsprep.text import command, human_counts, shown

SMALL_NBYTES = 50_000
"""The bytes of a small sample with its image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageShard:
    """A unit of work of `encode`.

    `digest` is what the dataset of an image shard says of it. A tar that no manifest speaks of has
    none: its name, size and date are all that `kind` is for."""

    name: str
    item: Item
    digest: str = ""
    kind: DigestKind = DigestKind.BLAKE3

    @property
    def input(self) -> str:
        """Return what a receipt remembers of what its shard was made from."""
        return self.whole_input + (f":{self.item.take}" if self.item.take else "")

    @property
    def is_foreign(self) -> bool:
        """Return whether its name, size and date are all that is known of it."""
        return not self.digest

    @property
    def whole_input(self) -> str:
        return self.digest or self.kind.hex(replace(self.item, take=0).to_json().encode())

    @property
    def likely_samples(self) -> int:
        """Return how many samples it has, or where nobody says, room for how many small ones."""
        there = self.item.nbytes // SMALL_NBYTES if self.is_foreign else self.item.samples
        return self.item.take or there

    def packed(self) -> bytes:
        """Return it as bytes, in a third of the memory."""
        item = self.item
        parts = item.name, item.parts, item.extra, item.take, item.samples
        return pickle.dumps((self.name, self.digest, self.kind.value, parts))

    @classmethod
    def unpacked(cls, data: bytes) -> "ImageShard":
        own, digest, kind, (name, parts, extra, take, samples) = pickle.loads(data)  # noqa: S301  ours
        item = Item(name=name, parts=parts, extra=extra, take=take, samples=samples)
        return cls(name=own, item=item, digest=digest, kind=DigestKind(kind))

    def is_done_by(self, made_of: str) -> bool:
        """Return whether what was made from that input has all that is wanted now."""
        return made_of in (self.input, self.whole_input)


def tars_of(url: str, max_nbytes: int) -> TarsSource:
    """Return what reads image shards, for a worker."""
    return TarsSource(url=url, pattern="*", columns=Columns(), max_nbytes=max_nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageShards:
    """The image shards of a dataset for one resolution, in the order of their names.

    `is_whole` is false for a dataset whose packing has not come to its end."""

    url: str
    resolution: int
    """The resolution of the phase; where none was asked for, that of the lowest bucket."""
    shards: tuple[ImageShard, ...]
    is_whole: bool
    max_area: int
    """The most pixels that pack let pass; 0 where nobody says."""
    count: Callable[[Item], int]
    text_resolution: int = 0
    """The resolution of the text dataset that has the captions of all images, whatever shapes they
    go to."""
    hashed_by: str | None = None
    """The digest that pack gave each image, if any; None where nobody says."""

    @property
    def is_foreign(self) -> bool:
        """Return whether pack did not make them."""
        return any(shard.is_foreign for shard in self.shards[:1])

    def first(self, limit: int) -> tuple[ImageShard, ...]:
        """Return those with the first `limit` samples (0: all), the last one cut where they end."""
        if not limit:
            return self.shards
        found = []
        for shard in self.shards:
            there = self.count(shard.item)
            is_last = there >= limit
            item = replace(shard.item, take=limit) if there > limit else shard.item
            found.append(replace(shard, item=item))
            if is_last:
                break
            limit -= there
        return tuple(found)


def find_image_shards(
    url: str,
    resolution: int,
    *,
    shapes: Sequence[Size] = (),
    kind: DigestKind = DigestKind.BLAKE3,
) -> ImageShards:
    """Find the image shards that may have an image large enough for a resolution.

    `kind` is the digest of the latents that are made of them, in `shapes` if there are any. With
    the resolution 0 it is all shards."""
    is_pattern = bool(set(url) & set("*?[{")) and not Path(url).is_dir()
    store = None if is_pattern else open_store(url)
    manifest = dated_manifest(store) if store else None
    if store is not None and manifest is None:
        check_place(url, [entry.name for entry in islice(store.list(RECEIPTS), 1)])
    if store is None or manifest is None:
        return _of_tars(url, resolution, kind)
    check_kind(store, manifest.dataset, "images")
    manifest = refreshed(store, manifest)
    resolution = resolution or min(manifest.settings["buckets"])
    shards = _of_dataset(url, manifest, resolution, shapes)
    lowest = min(int(shard.name.partition("/")[0]) for shard in shards)
    return ImageShards(
        url=store.url,
        resolution=resolution,
        text_resolution=min(resolution, lowest) if shapes else resolution,
        shards=shards,
        is_whole=manifest.complete,
        max_area=manifest.settings["max_area"],
        count=lambda item: item.samples,
        hashed_by=manifest.settings.get("compute_hash", ""),
    )


def _of_dataset(
    url: str, manifest: Manifest, resolution: int, shapes: Sequence[Size]
) -> tuple[ImageShard, ...]:
    buckets = manifest.settings["buckets"]
    wanted = {"resolution": resolution} | ({"shapes": shapes} if shapes else {})
    encoded = set(buckets_encoded(wanted, buckets))
    kind = DigestKind.of(manifest.settings)
    shards = tuple(
        ImageShard(
            name=latent_unit(shard.name),
            item=Item(
                name=shard.name, parts=((shard.name, shard.nbytes, ""),), samples=shard.samples
            ),
            digest=shard.digest,
            kind=kind,
        )
        for shard in manifest.shards
        if shard.bucket in encoded
    )
    if not shards:
        raise SourceError(_nothing(url, manifest, min(map(min, shapes), default=resolution)))
    return shards


def _nothing(url: str, manifest: Manifest, least_side: int) -> str:
    """Say why a dataset has no shard for a resolution, and what to do."""
    if not manifest.receipts:
        return f'{url} holds no shards yet: run the same "wdsprep pack" again, to its end'
    if not manifest.samples:
        return (
            f"{url} holds no image, as all were rejected ({human_counts(manifest.rejects)}): "
            f"{url}/rejects/ says why of each: pack again, with other limits or another source"
        )
    return f"{url} holds no image of {least_side} pixels or more: choose a lower --resolution"


def _of_tars(url: str, resolution: int, kind: DigestKind) -> ImageShards:
    """Find tars that something else packed.

    Their latents lie in the folder of the resolution, without what says that a tar is gzipped."""
    try:
        source = recognise(url, columns=Columns(), rows_per_item=1)
    except UnclearSourceError as error:
        pattern = shlex.quote(f"{url.rstrip('/')}/*.tar")
        first = 'run "wdsprep pack SOURCE IMAGES" first, and encode IMAGES'
        raise SourceError(f"{error.what}: {first}; or name tars, such as {pattern}") from error
    if not isinstance(source, TarsSource):
        raise SourceError(
            f"{url} holds images, but no shards: run {command('pack', url, 'IMAGES')} first, and "
            "encode IMAGES"
        )
    if not resolution:
        raise UsageError(
            f"{url} has no buckets, as pack has not made it: give --resolution, whose name the "
            "folder of its text gets, as that of the latents beside it"
        )
    shards: dict[str, ImageShard] = {}
    for item in source.items():
        name = f"{resolution}/{_stem(source.url, item.name)}"
        if name in shards:
            raise SourceError(
                f"{shards[name].item.name} and {item.name} would both become {name}.tar: name the "
                f"tars to encode, such as '{source.url}/*.tar'"
            )
        shards[name] = ImageShard(name=name, item=item, kind=kind)
    return ImageShards(
        url=source.url,
        resolution=resolution,
        text_resolution=resolution,
        shards=tuple(shards.values()),
        is_whole=True,
        max_area=0,
        count=source.count,
    )


def _stem(url: str, name: str) -> str:
    """Return the name that the latents of a tar get, which receipts have to hold."""
    if shown(name) != name:
        raise SourceError(f"{url}/{shown(name)}: the name of this tar is not UTF-8: rename it")
    return tar_stem(name)
