"""The image shards that latents are made from: those of a dataset that `pack` made, or any tars."""

import pickle
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from wdsprep.dataset.file_names import RECEIPTS, latent_unit
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.shapes import Size, buckets_encoded, least_side_of
from wdsprep.dataset.stored_dataset import check_kind, check_place, dated_manifest, refresh_manifest
from wdsprep.errors import SourceError, UsageError
from wdsprep.sources.base import Columns, Item
from wdsprep.sources.patterns import tar_stem
from wdsprep.sources.recognise import UnclearSourceError, recognise
from wdsprep.sources.tars import TarsSource
from wdsprep.store import open_store
from wdsprep.text import command, human_counts, shown

SMALL_NBYTES = 50_000
"""The bytes of a small sample with its image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageShard:
    """An image shard from which a latent shard is made.

    `digest` is the digest of its bytes in the manifest of the images. A tar that no manifest lists
    has none.
    """

    name: str
    item: Item
    digest: str = ""

    @property
    def input(self) -> str:
        """Return the input that a receipt records: a digest, and the number of samples if limited.

        The digest is that of the shard, or of a foreign tar's name, size and date.
        """
        return self.whole_input + (f":{self.item.take}" if self.item.take else "")

    @property
    def is_foreign(self) -> bool:
        """Return whether pack did not make the shard, so that no digest of it is known."""
        return not self.digest

    @property
    def whole_input(self) -> str:
        return self.digest or hex_digest(replace(self.item, take=0).to_json().encode())

    @property
    def likely_samples(self) -> int:
        """Return the number of samples to encode; of a whole foreign tar it is an estimate."""
        there = self.item.nbytes // SMALL_NBYTES if self.is_foreign else self.item.samples
        return self.item.take or there

    def to_bytes(self) -> bytes:
        """Return this description of a shard as bytes: a third of the object's memory."""
        item = self.item
        parts = item.name, item.parts, item.extra, item.take, item.samples
        return pickle.dumps((self.name, self.digest, parts))

    @classmethod
    def from_bytes(cls, data: bytes) -> "ImageShard":
        own, digest, (name, parts, extra, take, samples) = pickle.loads(data)  # noqa: S301  ours
        item = Item(name=name, parts=parts, extra=extra, take=take, samples=samples)
        return cls(name=own, item=item, digest=digest)

    def is_done_by(self, made_of: str) -> bool:
        """Return whether latents made from the input `made_of` have all samples that are wanted.

        They do if `made_of` is this shard's input, or its input without a limit on samples.
        """
        return made_of in (self.input, self.whole_input)


def count_samples(shards: Sequence[ImageShard]) -> int:
    """Return the number of samples to encode in image shards; 0 if nobody has counted them."""
    counts = [shard.item.take or shard.item.samples for shard in shards]
    return sum(counts) if all(counts) else 0


def tars_of(url: str, max_nbytes: int) -> TarsSource:
    """Return the source that reads the image shards in a store."""
    return TarsSource(url=url, pattern="*", columns=Columns(), max_nbytes=max_nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageShards:
    """The image shards of a dataset for one resolution, in the order of their names.

    `is_whole` is false for a dataset that is not completely packed.
    """

    url: str
    resolution: int
    """The resolution to encode; if none was asked for, that of the lowest bucket."""
    shards: tuple[ImageShard, ...]
    is_whole: bool
    max_area: int
    """The `--max-area` that the images were packed with; 0 if it is not known."""
    count: Callable[[Item], int]
    text_resolution: int = 0
    """The resolution of a text dataset with the captions of all these images, of any shape."""
    hashed_by: str | None = None
    """The digest that pack gave each image, if any; None if it is not known."""

    @property
    def is_foreign(self) -> bool:
        """Return whether the shards are tars that pack did not make."""
        return any(shard.is_foreign for shard in self.shards[:1])

    def first(self, limit: int) -> tuple[ImageShard, ...]:
        """Return the shards that have the first `limit` samples (0: all).

        The last of them is cut to the samples that are left.
        """
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
    upscale: float = 1.0,
) -> ImageShards:
    """Return the image shards that may have images large enough for a resolution.

    The resolution 0 stands for the lowest bucket of a dataset, and so for all shards. Tars that
    pack did not make are all returned; for them, raise UsageError if the resolution is 0. Raise
    SourceError if no shards are found. `shapes` are the shapes of the latents, if they are not
    square, and `upscale` is how much images may be scaled up.
    """
    is_pattern = bool(set(url) & set("*?[{")) and not Path(url).is_dir()
    store = None if is_pattern else open_store(url)
    manifest = dated_manifest(store) if store else None
    if store is not None and manifest is None:
        check_place(url, [entry.name for entry in islice(store.list(RECEIPTS), 1)])
    if store is None or manifest is None:
        return _find_tars(url, resolution)
    check_kind(store, manifest.dataset, "images")
    manifest = refresh_manifest(store, manifest)
    resolution = resolution or min(manifest.settings["buckets"])
    wanted: dict[str, Any] = {"resolution": resolution, "upscale": upscale}
    wanted |= {"shapes": shapes} if shapes else {}
    shards = _select_shards(url, manifest, wanted)
    lowest = min(int(shard.name.partition("/")[0]) for shard in shards)
    return ImageShards(
        url=store.url,
        resolution=resolution,
        text_resolution=min(resolution, lowest) if shapes or upscale > 1 else resolution,
        shards=shards,
        is_whole=manifest.complete,
        max_area=manifest.settings["max_area"],
        count=lambda item: item.samples,
        hashed_by=manifest.settings.get("compute_hash", ""),
    )


def _select_shards(
    url: str, manifest: Manifest, settings: Mapping[str, Any]
) -> tuple[ImageShard, ...]:
    encoded = set(buckets_encoded(settings, manifest.settings["buckets"]))
    shards = tuple(
        ImageShard(
            name=latent_unit(shard.name),
            item=Item(
                name=shard.name, parts=((shard.name, shard.nbytes, ""),), samples=shard.samples
            ),
            digest=shard.digest,
        )
        for shard in manifest.shards
        if shard.bucket in encoded
    )
    if not shards:
        raise SourceError(_explain_no_shards(url, manifest, least_side_of(settings)))
    return shards


def _explain_no_shards(url: str, manifest: Manifest, least_side: int) -> str:
    """Return a message that says why a dataset has no shard for a resolution, and what to do."""
    if not manifest.receipts:
        return f'{url} holds no shards yet: run the same "wdsprep pack" again, to its end'
    if not manifest.samples:
        return (
            f"{url} holds no image, as all were rejected ({human_counts(manifest.rejects)}; "
            f"{url}/rejects/ lists them): pack again, with other limits or another source"
        )
    remedy = "choose a lower --resolution, or --upscale"
    return f"{url} holds no image of {least_side} pixels or more: {remedy}"


def _find_tars(url: str, resolution: int) -> ImageShards:
    """Return the tars that another program packed, as image shards.

    Their latents lie in the folder of the resolution, under the name of the tar without its suffix.
    Raise SourceError if there are no tars, or if the latents of two would have one name. Raise
    UsageError if the resolution is 0.
    """
    try:
        source = recognise(url, columns=Columns(), rows_per_item=1)
    except UnclearSourceError as error:
        pattern = shlex.quote(f"{url.rstrip('/')}/*.tar")
        first = 'run "wdsprep pack SOURCE IMAGES" first, and encode IMAGES'
        raise SourceError(f"{error.what}: {first}; or give tars, such as {pattern}") from error
    if not isinstance(source, TarsSource):
        raise SourceError(
            f"{url} holds images, but no shards: run {command('pack', url, 'IMAGES')} first, and "
            "encode IMAGES"
        )
    if not resolution:
        raise UsageError(
            f"{url} was not made by pack: give --resolution, after which the folder of its text is "
            "named, as that of its latents is"
        )
    shards: dict[str, ImageShard] = {}
    for item in source.items():
        name = f"{resolution}/{_latent_name(source.url, item.name)}"
        if name in shards:
            raise SourceError(
                f"{shards[name].item.name} and {item.name} would both become {name}.tar: give the "
                f"tars to encode, such as '{source.url}/*.tar'"
            )
        shards[name] = ImageShard(name=name, item=item)
    return ImageShards(
        url=source.url,
        resolution=resolution,
        text_resolution=resolution,
        shards=tuple(shards.values()),
        is_whole=True,
        max_area=0,
        count=source.count,
    )


def _latent_name(url: str, name: str) -> str:
    """Return the name for the latents of a tar; raise SourceError if receipts cannot hold it."""
    if shown(name) != name:
        raise SourceError(f"the name of the tar {url}/{shown(name)} is not UTF-8: rename it")
    return tar_stem(name)
