"""Latents that a removal from their images forgot: which there are, and what they have to lose.

Whoever removes samples from images has to name the latents made of them, and may forget some. So
`remove` looks for these beside the images, in the same parent folder or prefix. Those that were
forgotten follow later: the images keep what became of each shard (`Removed.successors`), and the
keys of removed samples among their rejects.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from wdsprep.dataset.file_names import MANIFEST, latent_shard, unit_of_file
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.receipts import Receipt, image_shard_digest
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import rejects_in
from wdsprep.dataset.removed_samples import (
    Removed,
    ShardRemoval,
    ShardSuccessor,
    removed_from,
)
from wdsprep.dataset.stored_dataset import read_manifest
from wdsprep.errors import NotFoundError, WdsprepError
from wdsprep.store import open_store
from wdsprep.store.base import Store, local_path

MOST_LISTED = 20_000
"""The most names that are listed of a prefix in a bucket, which lists all files below it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbours:
    """The datasets beside some others.

    `made_of_them` are the latents that were made of images among those. `successors` has what
    became of the shards of images from which samples were removed, by the URL of the images.
    """

    made_of_them: tuple[str, ...] = ()
    successors: Mapping[str, Mapping[str, ShardSuccessor]] = field(default_factory=dict)


NO_NEIGHBOURS = Neighbours()


def find_neighbours(urls: Sequence[str]) -> Neighbours:
    """Look for datasets beside some others; one that cannot be read is passed over."""
    wanted: set[str] = set()
    beside: dict[str, Manifest] = {}
    successors: dict[str, Mapping[str, ShardSuccessor]] = {}
    for url in urls:
        if (manifest := _read_manifest(url)) and manifest.dataset == "images":
            wanted |= manifest.image_digests() | _successors(url).keys()
    parents = dict.fromkeys(url.rstrip("/").rpartition("/")[0] for url in urls)
    for url in (place for parent in parents for place in _list_datasets(parent)):
        if url not in urls and (manifest := _read_manifest(url)):
            beside[url] = manifest
    for url, manifest in beside.items():
        if manifest.dataset == "images" and (found := _successors(url)):
            successors[url] = found
    return Neighbours(
        made_of_them=tuple(
            url
            for url, manifest in sorted(beside.items())
            if manifest.dataset == "latents" and not wanted.isdisjoint(manifest.image_digests())
        ),
        successors=successors,
    )


def _list_datasets(parent: str) -> Iterator[str]:
    """Yield the datasets in a folder or below a prefix; in a bucket only some names are listed."""
    if (path := local_path(parent)) is not None:
        with suppress(OSError):
            for place in sorted(Path(path or "/").iterdir()):
                if (place / MANIFEST).is_file():
                    yield str(place)
        return
    with suppress(WdsprepError):
        for entry in islice(open_store(parent).list(), MOST_LISTED):
            folder, _, name = entry.name.rpartition("/")
            if name == MANIFEST and folder and "/" not in folder:
                yield f"{parent}/{folder}"


def _read_manifest(url: str) -> Manifest | None:
    with suppress(WdsprepError):
        return read_manifest(open_store(url))
    return None


def _successors(url: str) -> Mapping[str, ShardSuccessor]:
    with suppress(WdsprepError):
        return removed_from(open_store(url)).successors
    return {}


def find_lost(
    removed: Removed, images: str, receipts: Sequence[Receipt], now: Mapping[str, ShardRemoval]
) -> dict[str, ShardRemoval]:
    """Return by units of latents what the image shards that they were made of lose or have lost.

    `removed` is of the images, and `now` what their shards lose, by units of latents.
    """
    store, found = open_store(images), dict(now)
    losing = {lost.digest: ShardSuccessor(digest="", rows=lost.rows) for lost in now.values()}
    every = replace(removed, successors={**removed.successors, **losing})
    for receipt in receipts:
        digest = image_shard_digest(receipt.input)
        successor = every.follow(digest)
        if successor is None or digest in losing:
            continue
        name = latent_shard(receipt.unit)
        keys = {*_removed_keys(store, unit_of_file(name, "images"))}
        keys |= {*now[receipt.unit].keys} if receipt.unit in now else set()
        found[receipt.unit] = ShardRemoval(
            name=name,
            samples=0,  # of the shard there was, nothing else is known
            nbytes=0,
            digest=digest,
            rows=successor.rows,
            keys=tuple(sorted(keys)),
        )
    return found


def _removed_keys(store: Store, unit: str) -> Iterator[str]:
    with suppress(NotFoundError):
        for reject in rejects_in(store, unit):
            if reject.code is Code.REMOVED:
                yield reject.key
