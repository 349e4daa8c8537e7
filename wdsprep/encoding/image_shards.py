"""The image shards that latents are made from: those of a dataset that `pack` made, or any tars.

`find_image_shards` finds them, and `read_rows` reads the samples of one. A shard that pack made is
compared with its digest while it is read. If images are not needed, and lie on a disk of this
machine or are large, their bytes are skipped (`read_texts`). Then the digest cannot be compared.
The shard's size is compared instead, and its index with its headers (`ShardReader.walk`).
"""

import pickle
import shlex
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

from blake3 import blake3

from wdsprep.dataset.coarse_histograms import histogram
from wdsprep.dataset.damage import repair_step
from wdsprep.dataset.file_names import RECEIPTS, index_name, latent_unit
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject
from wdsprep.dataset.samples import TARGET, Sample, roles_of
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.shapes import Size, buckets_encoded, least_side_of
from wdsprep.dataset.shard_reader import LARGE_NBYTES, ShardReader
from wdsprep.dataset.stored_dataset import (
    check_not_rewritten,
    check_of_images,
    check_place,
    dated_manifest,
    refresh_manifest,
)
from wdsprep.encoding.recipe_options import MOST_UPSCALE
from wdsprep.errors import (
    DamageError,
    FingerprintError,
    FormatError,
    NotFoundError,
    SourceError,
    UsageError,
)
from wdsprep.limits import MAX_NBYTES
from wdsprep.runners.base import HopelessError
from wdsprep.sources.base import Columns, Content, Item, Role, count_left_out, ignore_left_out
from wdsprep.sources.patterns import tar_stem
from wdsprep.sources.recognise import UnclearSourceError, recognise
from wdsprep.sources.tars import TarsSource
from wdsprep.store import open_store, shared_store
from wdsprep.store.base import Store
from wdsprep.text import command, human_bytes, human_counts, shown

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
        """Return what a receipt records as its input: a digest, and `:N` after it for the first N.

        The digest is that of the shard, or of a foreign tar's name, size and date.
        """
        return self.whole_input + (f":{self.item.take}" if self.item.take else "")

    @property
    def is_foreign(self) -> bool:
        """Return whether pack did not make the shard, so that no digest of it is known."""
        return not self.digest

    @property
    def whole_input(self) -> str:
        return self.digest or hex_digest(self.item._replace(take=0).to_json().encode())

    @property
    def likely_samples(self) -> int:
        """Return the number of samples to encode; of a whole foreign tar it is an estimate."""
        there = self.item.nbytes // SMALL_NBYTES if self.is_foreign else self.item.samples
        return self.item.take or there

    def to_bytes(self) -> bytes:
        """Return this description of a shard as bytes: a third of the object's memory."""
        return pickle.dumps((self.name, self.digest, tuple(self.item)))

    @classmethod
    def from_bytes(cls, data: bytes) -> "ImageShard":
        name, digest, item = pickle.loads(data)  # noqa: S301  ours
        return cls(name=name, item=Item(*item), digest=digest)


def tars_of(url: str, max_nbytes: int, roles: Iterable[str] = ()) -> TarsSource:
    """Return the source that reads the image shards in a store, with images in these roles."""
    further = (role for role in roles if role != TARGET)
    columns = Columns(roles=tuple(Role(name=name, where=f".{name}") for name in further))
    return TarsSource(url=url, pattern="*", columns=columns, max_nbytes=max_nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageShards:
    """The image shards of a dataset for one resolution, in the order of their names.

    `is_whole` is false for a dataset that is not completely packed.
    """

    resolution: int
    """The resolution to encode; if none was asked for, that of the lowest bucket."""
    shards: tuple[ImageShard, ...]
    tars: TarsSource
    """The source that reads these shards."""
    count: Callable[[Item], int]
    is_whole: bool = True
    text_resolution: int = 0
    """The resolution of a text dataset with the captions of all these images, of any shape."""
    roles: tuple[str, ...] = ()
    """The roles in which samples have further images."""

    @property
    def is_foreign(self) -> bool:
        """Return whether the shards are tars that pack did not make."""
        return any(shard.is_foreign for shard in self.shards[:1])


def first_shards(
    shards: tuple[ImageShard, ...], limit: int, count: Callable[[Item], int]
) -> tuple[ImageShard, ...]:
    """Return the shards that have the first `limit` samples (0: all).

    `count` returns how many samples a shard has. The last one is cut to those that are left.
    """
    first = list[ImageShard]()
    for shard in shards if limit else ():
        there = count(shard.item)
        item = shard.item._replace(take=limit) if there > limit else shard.item
        first.append(replace(shard, item=item))
        limit -= there
        if limit <= 0:
            break
    return tuple(first) or shards


def check_roles(images: str, wanted: Sequence[str], there: Sequence[str]) -> None:
    """Raise UsageError if images of these roles are to be encoded, and no sample has one of them.

    `images` is the place of a dataset, and `there` has the roles of its images.
    """
    if lacking := [role for role in wanted if role not in (TARGET, *there)]:
        raise UsageError(
            f"{images} has no images in the role {lacking[0]}, only in "
            f"{', '.join((TARGET, *there))}: give --roles of these, or pack it with --role"
        )


def find_image_shards(
    url: str,
    resolution: int,
    *,
    shapes: Sequence[Size] = (),
    upscale: float = 1.0,
    roles: Sequence[str] = (),
    max_nbytes: int = MAX_NBYTES,
) -> ImageShards:
    """Return the image shards that may have images large enough for a resolution.

    The resolution 0 stands for the lowest bucket of a dataset, and so for all shards. Tars that
    pack did not make are all returned; for them, raise UsageError if the resolution is 0. Raise
    SourceError if no shards are found. `shapes` are the shapes of the latents, if they are not
    square, and `upscale` is how much images may be scaled up. Images in `roles` are read too; raise
    UsageError if no sample of a dataset has one of them.
    """
    is_pattern = bool(set(url) & set("*?[{")) and not Path(url).is_dir()
    store = None if is_pattern else open_store(url)
    manifest = dated_manifest(store) if store else None
    if store is not None and manifest is None:
        check_place(url, [entry.name for entry in islice(store.list(RECEIPTS), 1)])
    if store is None or manifest is None:
        return _find_tars(url, resolution, roles, max_nbytes)
    check_of_images(url, manifest)
    manifest = refresh_manifest(store, manifest)
    there, tars = roles_of(manifest.settings), tars_of(store.url, max_nbytes, roles)
    check_roles(url, roles, there)
    resolution = resolution or min(manifest.settings["buckets"])
    encoded: dict[str, Any] = {"resolution": resolution, "upscale": upscale}
    encoded |= {"shapes": shapes} if shapes else {}
    buckets = buckets_encoded(encoded, manifest.settings["buckets"])
    shards = tuple(
        ImageShard(
            name=latent_unit(shard.name),
            item=Item(
                name=shard.name, parts=((shard.name, shard.nbytes, ""),), samples=shard.samples
            ),
            digest=shard.digest,
        )
        for shard in manifest.shards
        if shard.bucket in buckets
    )
    if not manifest.receipts:
        raise SourceError(
            f'{url} holds no shards yet: run the same "wdsprep pack" again, to its end'
        )
    if not manifest.samples:
        raise SourceError(
            f"{url} holds no image, as all were rejected ({human_counts(manifest.rejects)}; "
            f"{url}/rejects/ lists them): pack again, with other limits or another source"
        )
    sides, least = histogram(manifest.counts, "side"), least_side_of(encoded)
    if not shards or (sides and sides[-1][0][1] < least):
        factor = ceil(10 * least_side_of({**encoded, "upscale": 1}) / sides[-1][0][0]) / 10
        other = f", or --upscale {factor:g}" if factor <= MOST_UPSCALE else ""
        raise SourceError(
            f"{url} holds no image of {least} pixels or more: choose a lower --resolution{other}"
        )
    lowest = min(int(shard.name.partition("/")[0]) for shard in shards)
    return ImageShards(
        resolution=resolution,
        text_resolution=min(resolution, lowest) if shapes or upscale > 1 else resolution,
        shards=shards,
        tars=tars,
        is_whole=manifest.complete,
        count=lambda item: item.samples,
        roles=there,
    )


def _find_tars(url: str, resolution: int, roles: Sequence[str], max_nbytes: int) -> ImageShards:
    """Return the tars that another program packed, as image shards.

    Their latents lie in the folder of the resolution, under the name of the tar without its suffix.
    Raise SourceError if there are no tars, or if the latents of two would have one name. Raise
    UsageError if the resolution is 0.
    """
    try:
        source, what = recognise(url, columns=Columns(), rows_per_item=1), f"{url} holds no shards"
    except UnclearSourceError as error:
        source, what = None, error.what
    if not isinstance(source, TarsSource):
        pattern = shlex.quote(f"{url.rstrip('/')}/*.tar")
        raise SourceError(
            f"{what}: run {command('pack', url, 'IMAGES')} first, and give IMAGES; or give tars, "
            f"such as {pattern}"
        )
    if not resolution:
        raise UsageError(
            f"{url} was not made by pack: give --resolution, after which the folder of its text is "
            "named, as that of its latents is"
        )
    shards: dict[str, ImageShard] = {}
    for item in source.items():
        if shown(item.name) != item.name:  # receipts cannot hold it
            tar = f"{source.url}/{shown(item.name)}"
            raise SourceError(f"the name of the tar {tar} is not UTF-8: rename it")
        name = f"{resolution}/{tar_stem(item.name)}"
        if name in shards:
            raise SourceError(
                f"{shards[name].item.name} and {item.name} would both become {name}.tar: give the "
                f"tars to encode, such as '{source.url}/*.tar'"
            )
        shards[name] = ImageShard(name=name, item=item)
    return ImageShards(
        resolution=resolution,
        text_resolution=resolution,
        shards=tuple(shards.values()),
        tars=tars_of(source.url, max_nbytes, roles),
        count=source.count,
    )


def read_rows(
    source: TarsSource,
    shard: ImageShard,
    *,
    content: Content,
    left_out: Counter[str],
    has_images: bool,
) -> Generator[tuple[str, Sample | Reject], None, None]:
    """Yield each sample of an image shard with its key; raise HopelessError if it is damaged.

    The digest of the shard is compared at the end, unless the shard is foreign or cut to some
    samples. `content` collects a mark of each sample, and `left_out` counts the files of a
    foreign tar that are no input. Without `has_images` the bytes of images are skipped, except in
    foreign tars, whose marks depend on them. If the shard is read in parts, its size and its
    headers are checked in place of its digest.
    """
    item, store = shard.item, shared_store(source.url)
    if not (has_images or shard.is_foreign):
        source = replace(source, has_images=False)
    if not source.has_images and is_read_in_parts(store, shard):
        yield from islice(read_texts(source, store, shard), item.take or None)
        return
    digest = blake3()
    watch = None if shard.is_foreign else digest.update
    note = ignore_left_out  # images in roles are no strays
    if shard.is_foreign:
        note = partial(count_left_out, left_out)
    rows = source.read_keyed(item, watch=watch, left_out=note)
    for key, row in islice(rows, item.take or None):
        if isinstance(row, Reject) and row.code is Code.TAR_VANISHED:
            raise _damage(store, shard, "is not there")
        content.add(content.mark(row))
        yield key, row
    is_known = not (shard.is_foreign or item.take)
    if is_known and digest.hexdigest() != shard.digest:
        raise _change(store, shard, "another BLAKE3")


def is_read_in_parts(store: Store, shard: ImageShard) -> bool:
    """Return whether to skip the images of a shard when only its captions are needed.

    They are skipped if pack made the shard and it lies on a local disk or its images are large.
    """
    item = shard.item
    is_large = item.nbytes >= LARGE_NBYTES * max(1, item.samples)
    return not shard.is_foreign and (store.root is not None or is_large)


def read_texts(
    source: TarsSource, store: Store, shard: ImageShard
) -> Iterator[tuple[str, Sample | Reject]]:
    """Yield the samples of an image shard with their keys, in order and with empty images.

    Raise HopelessError if the shard differs from its index or has another size, or if one of them
    is missing.
    """
    name = shard.item.name
    try:
        sizes = {entry.name: entry.nbytes for entry in store.list(name)}
        if not sizes.keys() >= {name, index_name(name)}:
            raise NotFoundError(name)
        if sizes[name] != shard.item.nbytes:
            raise FormatError("another size")
        with ShardReader(store, shard.item) as reader:
            for sample in reader.walk(source.wants):
                for row in source.rows(sample, name):
                    yield sample.key, row
    except NotFoundError as error:
        raise _damage(store, shard, "is not there, or its index is not") from error
    except FormatError as error:
        cause = error.cause if isinstance(error, DamageError) else str(error)
        raise _change(store, shard, cause) from error


def _change(store: Store, shard: ImageShard, why: str) -> HopelessError:
    """Return the error of a shard that is truncated, or was changed, as `why` says."""
    name, expected = shard.item.name, shard.item.nbytes
    nbytes = next((entry.nbytes for entry in store.list(name) if entry.name == name), 0)
    how = f"is not what was packed ({why})"
    if nbytes < expected:
        how = f"is truncated (expected {human_bytes(expected)}, found {human_bytes(nbytes)})"
    return _damage(store, shard, how)


def _damage(store: Store, shard: ImageShard, how: str) -> HopelessError:
    message = f"{shard.item.name} {how}"
    if not shard.is_foreign:
        message += ": " + repair_step(store.url, '"wdsprep pack"')
        try:
            check_not_rewritten(store, shard.item.name, shard.digest)
        except FingerprintError as error:
            message = str(error)
    return HopelessError(message)
