"""Plan the shards of a selection: runs of selected samples, bounded in number and bytes.

A shard has samples of one bucket. It also ends where the next key does not rise, which is usually
between two datasets. So keys rise in each shard, as `verify` and `inspect` expect.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from wdsprep.changes.merged_datasets import Group
from wdsprep.dataset.damage import naming_repair
from wdsprep.dataset.file_names import image_shard, is_table, latent_unit, slice_name
from wdsprep.dataset.receipts import Shard
from wdsprep.dataset.sample_selection import Numbers, SampleSelection, ShardSamples, ranges
from wdsprep.dataset.samples import key_order
from wdsprep.dataset.sealed_json import canonical_json, hex_digest
from wdsprep.dataset.shard_reader import ShardReader
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.errors import UsageError
from wdsprep.packing.options import ShardSizes

MOST_TWICE = 1_000
"""Hashes of keys that several datasets have of which keys are compared: not all are different."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplesToCopy:
    """Samples of one shard that a new shard gets, and all that a worker needs to find them.

    `origin` is the number of the dataset, and `unit` the unit that made the shard. The digest in
    `shard` tells whether it has changed since. A `ShardSamples` says less: only the number of its
    shard in a list, which no worker has and no receipt keeps.
    """

    origin: int
    unit: str
    shard: Shard
    numbers: Numbers

    def line(self) -> bytes:
        """Return the line of this piece in the inputs of a unit.

        It does not depend on where the dataset is.
        """
        line = {
            "dataset": self.origin,
            "digest": self.shard.digest,
            "samples": ranges(self.numbers),
            "shard": self.shard.name,
        }
        return canonical_json(line) + b"\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyUnit:
    """A unit of work that writes one shard of a selection.

    `input` is what its receipt states as its input: the digest of the list of `pieces`, or of the
    new image shard if latents follow their images.
    """

    name: str
    shard: str
    pieces: tuple[SamplesToCopy, ...]
    input: str
    nbytes: int

    @property
    def bucket(self) -> int:
        return self.pieces[0].shard.bucket

    @property
    def samples(self) -> int:
        return sum(len(piece.numbers) for piece in self.pieces)


def list_pieces(pieces: Sequence[SamplesToCopy]) -> bytes:
    """Return the list of the inputs of a unit."""
    return b"".join(piece.line() for piece in pieces)


def cut_into_shards(
    selection: SampleSelection, group: Group, limits: ShardSizes, *, prefixes: Sequence[str]
) -> Iterator[CopyUnit]:
    """Divide the selected samples into shards.

    `prefixes` are put before the keys of each dataset. Without them, raise UsageError if two
    datasets have the same key. A shard of images also ends where keys do not rise.
    """
    if len(group.origins) > 1 and not any(prefixes):
        _check_apart(selection, group)
    are_images = group.dataset == "images"
    number, nbytes, pieces = 0, 0, list[SamplesToCopy]()
    last = key_order("")

    def unit() -> CopyUnit:
        tar = image_shard(pieces[0].shard.bucket, slice_name(number), 0)
        return CopyUnit(
            name=slice_name(number) if are_images else latent_unit(tar),
            shard=tar,
            pieces=tuple(pieces),
            input=hex_digest(list_pieces(pieces)),
            nbytes=nbytes,
        )

    all_sizes = map_ahead(partial(_read_sizes, group), selection.per_shard(), group.readers)
    for sizes, (samples, keys) in zip(all_sizes, group.read_keys(selection), strict=True):
        at, old = group.shards[samples.shard]
        first, end = (key_order(prefixes[at] + key) for key in (keys[0], keys[-1]))
        old_unit, numbers = group.origins[at].units[old.name], samples.numbers
        falls = are_images and last >= first
        is_next = bool(pieces) and (falls or pieces[0].shard.bucket != old.bucket)
        while len(numbers):
            room = limits.samples_per_shard - sum(len(piece.numbers) for piece in pieces)
            ends = sizes[:room].cumsum()
            left = limits.max_shard_nbytes - nbytes
            fit = 0 if is_next else int(np.searchsorted(ends, left, side="right"))
            if not fit and pieces:
                yield unit()
                number, nbytes, pieces, is_next = number + 1, 0, [], False
                continue
            fit = max(1, fit)
            pieces.append(SamplesToCopy(at, old_unit, old, numbers[:fit]))
            nbytes += int(sizes[:fit].sum())
            numbers, sizes = numbers[fit:], sizes[fit:]
        last = end
    if pieces:
        yield unit()


def _read_sizes(group: Group, samples: ShardSamples) -> NDArray[np.int64]:
    origin, shard = group.find_shard(samples)
    if is_table(shard.name):
        return np.full(len(samples.numbers), shard.nbytes // shard.samples)
    with naming_repair(origin.store):
        return ShardReader(origin.store, shard).sizes[samples.numbers]


def _check_apart(selection: SampleSelection, group: Group) -> None:
    """Raise UsageError if two datasets have the same key.

    Only the hashes of all keys are held at a time.
    """
    hashes: list[list[NDArray[np.int64]]] = [[] for _ in group.origins]
    for samples, keys in group.read_keys(selection):
        key_hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
        hashes[group.shards[samples.shard][0]].append(key_hashes)
    unique = [
        np.unique(np.concatenate([np.empty(0, np.int64), *key_hashes])) for key_hashes in hashes
    ]
    values, counts = np.unique(np.concatenate(unique), return_counts=True)
    twice = {*values[counts > 1][:MOST_TWICE].tolist()}
    first_origins: dict[str, int] = {}
    for samples, keys in group.read_keys(selection) if twice else ():
        origin = group.shards[samples.shard][0]
        for key in (key for key in keys if hash(key) in twice):
            if (other := first_origins.setdefault(key, origin)) != origin:
                both = " and ".join(group.origins[number].shown for number in (other, origin))
                raise UsageError(
                    f"{both} both have the key {key}: give --prefix, which puts the number of "
                    "its dataset (0, 1, ...) before each key"
                )
