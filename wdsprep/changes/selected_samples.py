"""Select samples by a condition, by keys, by chance, or by parts of a split.

A selection has samples of one list of shards: those of all datasets to select from. Chance is a
hash of the seed, of the digest of the shard and of the number in it. So neither the order of shards
nor that of the options changes which samples are drawn, and nothing but indexes has to be read.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from wdsprep.changes.options import NameList, read_lines
from wdsprep.dataset.file_names import SHARD
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.random_numbers import draw, key_of
from wdsprep.dataset.receipts import Shard
from wdsprep.dataset.sample_selection import Numbers, SampleSelection, ShardSamples
from wdsprep.dataset.sample_table import KEY
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.errors import UsageError
from wdsprep.loading.where import Subset
from wdsprep.store import shared_store
from wdsprep.store.base import Store
from wdsprep.tables.query import WantedTexts
from wdsprep.tables.stored_tables import StoredTables
from wdsprep.text import EXAMPLES, examples, plural

Parts = Mapping[str, Fraction]
"""The share of each part of a split, by its name."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A dataset to select from, with its manifest."""

    url: str
    shown: str
    manifest: Manifest

    @property
    def store(self) -> Store:
        return shared_store(self.url)

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """Return the shards in the order in which pack numbered their samples, by bucket."""
        return tuple(sorted(self.manifest.shards, key=_shard_order))

    @cached_property
    def units(self) -> Mapping[str, str]:
        """Return the unit that made each shard, by the name of the shard."""
        ledger = self.manifest.ledger
        made = zip(ledger.units(), ledger.column("shards"), strict=True)
        return {shard["name"]: unit for unit, shards in made for shard in shards}

    @cached_property
    def content(self) -> str:
        """Return a digest of the content of its shards, wherever the dataset is."""
        shards = "".join(f"{shard.name} {shard.digest}\n" for shard in self.shards)
        return hex_digest(shards.encode())


def _shard_order(shard: Shard) -> tuple[int, int, int, str]:
    found = SHARD.fullmatch(shard.name)
    if found is None:  # latents of tars that another program packed
        return shard.bucket, 0, 0, shard.name
    return shard.bucket, int(found[2]), int((found[3] or "_0")[1:]), shard.name


@dataclass(frozen=True, kw_only=True)
class OriginShards:
    """The shards of all datasets to select from.

    They are sorted by bucket, and within a bucket by dataset in the given order.
    """

    origins: Sequence[Origin]

    @cached_property
    def shards(self) -> tuple[tuple[int, Shard], ...]:
        """Return all shards by bucket, each with the number of its dataset."""
        every = [(at, shard) for at, one in enumerate(self.origins) for shard in one.shards]
        return tuple(sorted(every, key=lambda each: each[1].bucket))

    def of(self, samples: ShardSamples) -> tuple[Origin, Shard]:
        """Return the dataset and the shard that samples belong to."""
        number, shard = self.shards[samples.shard]
        return self.origins[number], shard

    @property
    def all_samples(self) -> SampleSelection:
        sizes = np.array([shard.samples for _, shard in self.shards], np.int64)
        return SampleSelection.all_of(sizes).pick(sizes > 0)

    @property
    def readers(self) -> int:
        """Return how many threads are useful for the slowest of the datasets."""
        return max(origin.store.readers for origin in self.origins)

    def read_keys(self, selection: SampleSelection) -> Iterator[tuple[ShardSamples, list[str]]]:
        """Yield the selected samples of each shard, and their keys, which its table has."""
        tables = [StoredTables(origin.store, origin.manifest) for origin in self.origins]

        def read(samples: ShardSamples) -> tuple[ShardSamples, list[str]]:
            number, shard = self.shards[samples.shard]
            table = tables[number].read_shard(lambda file: file.read([KEY]), shard)
            return samples, table.column(KEY).take(samples.numbers).to_pylist()

        return map_ahead(read, selection.per_shard(), self.readers)


# --- by keys
class WantedKeys(WantedTexts):
    """The keys to select, of a file with a key on each line, or a list; `shown` says which."""

    def __init__(self, given: NameList) -> None:
        self._given, self.shown = given, "the list of keys"
        if isinstance(given, str | os.PathLike):
            self.shown = os.fspath(given)
        super().__init__(KEY, read_lines("keys", given))
        if not len(self):
            raise UsageError(f"{self.shown} has no keys: write one on each line")

    @property
    def digest(self) -> str:
        return hex_digest(self.marks.data)

    def check_seen(self) -> None:
        """Raise UsageError if one of the keys was not seen."""
        if missing := int((~self.seen).sum()):
            some = [*islice(self.unseen(read_lines("keys", self._given)), EXAMPLES + 1)]
            raise UsageError(
                f"{self.shown} has {plural(missing, 'key')} that no sample has "
                f"({examples(some)}): remove them from the list"
            )


def select_keys(
    selection: SampleSelection, shards: OriginShards, wanted: WantedKeys
) -> SampleSelection:
    """Return the samples with the wanted keys. Raise UsageError if a key is missing."""
    is_wanted = np.zeros(selection.samples, np.bool_)
    first = 0
    for _, keys in shards.read_keys(selection):
        is_wanted[first + wanted.find(keys)] = True
        first += len(keys)
    wanted.check_seen()
    return selection.filter(is_wanted)


# --- by a condition
def select_where(
    selection: SampleSelection, shards: OriginShards, subsets: Sequence[Subset]
) -> SampleSelection:
    """Return those samples of a selection that meet a condition.

    `subsets` has for each dataset all samples that meet it.
    """
    found: dict[tuple[int, str], Numbers] = {}
    for at, subset in enumerate(subsets):
        meets = subset.selection(None)
        for name, samples in zip(subset.whole.files.names, meets.per_shard(), strict=True):
            found[at, name] = samples.numbers
    each = (found[origin, shard.name] for origin, shard in shards.shards)
    return selection.intersect(SampleSelection.from_numbers(each))


# --- by chance
def draw_samples(
    selection: SampleSelection, shards: OriginShards, count: int, seed: int
) -> SampleSelection:
    """Return `count` samples, drawn at random. Raise UsageError if there are fewer."""
    if selection.samples < count:
        there = plural(selection.samples, "sample")
        raise UsageError(f"--count {count:,} is more than the {there} to draw from: give fewer")
    return _divide(selection, shards, seed, [0, count])[0]


def split_samples(
    selection: SampleSelection, shards: OriginShards, parts: Parts, seed: int
) -> dict[str, SampleSelection]:
    """Return the samples of each part of a split.

    Each sample is in one part at most. If shares sum up to less than 1, some are in none.
    """
    share, ends = Fraction(0), [0]
    for each in parts.values():
        share += each
        ends.append(int(share * selection.samples))
    return dict(zip(parts, _divide(selection, shards, seed, ends), strict=True))


def _divide(
    selection: SampleSelection, shards: OriginShards, seed: int, ends: Sequence[int]
) -> list[SampleSelection]:
    """Return the samples whose places in a random order lie between each of `ends` and the next.

    The seed decides the order.
    """
    words = partial(_random_words, shards, seed)
    every = np.concatenate([np.empty(0, np.uint64), *map(words, selection.per_shard())])
    every.sort()
    found: list[list[NDArray[np.bool_]]] = [[] for _ in ends[1:]]
    for own in map(words, selection.per_shard()):
        behind = [own > every[end - 1] if end else np.ones_like(own, np.bool_) for end in ends]
        for masks, first, last in zip(found, behind, behind[1:], strict=False):
            masks.append(first & ~last)
    return [selection.filter(np.concatenate(masks)) for masks in found]


def _random_words(shards: OriginShards, seed: int, samples: ShardSamples) -> NDArray[np.uint64]:
    """Return a random number for each of some samples."""
    _origin, shard = shards.of(samples)
    return draw(key_of("select", seed, shard.digest), samples.numbers.astype(np.int64))
