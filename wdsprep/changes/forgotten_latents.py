"""Latents that a removal from their images forgot: which there are, and what they have to lose.

Whoever removes samples from images has to name the latents made of them, and may forget some. So
`remove` looks for these beside the images, in the same parent folder or prefix. Those that were
forgotten follow later: the images keep what became of each shard (`Removed.successors`), and the
keys of removed samples among their rejects.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from wdsprep.dataset.file_names import MANIFEST, latent_shard, unit_of_file
from wdsprep.dataset.manifest import Manifest, Receipt, image_shard_digest
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import rejects_in
from wdsprep.dataset.removed_samples import ShardRemoval, ShardSuccessor, removed_from
from wdsprep.dataset.stored_dataset import read_manifest
from wdsprep.errors import NotFoundError, WdsprepError
from wdsprep.store import open_store
from wdsprep.store.base import local_path

MOST_LISTED = 20_000
"""The most names that are listed of a prefix in a bucket, which lists all files below it."""


def find_neighbours(
    urls: Sequence[str],
) -> tuple[tuple[str, ...], dict[str, Mapping[str, ShardSuccessor]]]:
    """Return the latents beside some datasets that were made of images among these.

    Also return what became of the shards of the images beside them from which samples were removed,
    by the URL of the images. A dataset that cannot be read is passed over.
    """
    wanted: set[str] = set()
    for url in urls:
        if (manifest := _read_manifest(url)) and manifest.dataset == "images":
            wanted |= manifest.image_digests() | _successors(url).keys()
    latents: list[str] = []
    successors: dict[str, Mapping[str, ShardSuccessor]] = {}
    parents = dict.fromkeys(url.rstrip("/").rpartition("/")[0] for url in urls)
    for url in (place for parent in parents for place in _list_datasets(parent)):
        manifest = None if url in urls else _read_manifest(url)
        if manifest is None:
            continue
        if manifest.dataset == "images" and (lost := _successors(url)):
            successors[url] = lost
        if manifest.dataset == "latents" and not wanted.isdisjoint(manifest.image_digests()):
            latents.append(url)
    return tuple(sorted(latents)), successors


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
    images: str, receipts: Sequence[Receipt], now: Mapping[str, ShardRemoval]
) -> dict[str, ShardRemoval]:
    """Return by units of latents what the image shards that they were made of lose or have lost.

    They have lost it if these latents were forgotten when samples were removed from the images.
    `now` has what the shards lose, by units of latents.
    """
    store, lost_by_unit = open_store(images), dict(now)
    removed = removed_from(store)
    losing = {lost.digest: ShardSuccessor(digest="", rows=lost.rows) for lost in now.values()}
    all_removed = replace(removed, successors={**removed.successors, **losing})
    for receipt in receipts:
        digest = image_shard_digest(receipt.input)
        successor = all_removed.follow(digest)
        if successor is None or digest in losing:
            continue
        name = latent_shard(receipt.unit)
        keys = {*now[receipt.unit].keys} if receipt.unit in now else set[str]()
        with suppress(NotFoundError):
            rejects = rejects_in(store, unit_of_file(name, "images"))
            keys |= {reject.key for reject in rejects if reject.code is Code.REMOVED}
        lost_by_unit[receipt.unit] = ShardRemoval(
            name=name,
            samples=0,  # of the shard there was, nothing else is known
            nbytes=0,
            digest=digest,
            rows=successor.rows,
            keys=tuple(sorted(keys)),
        )
    return lost_by_unit
