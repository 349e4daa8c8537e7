"""Which samples are selected: by a condition, by keys, by chance, by parts of a split.

What is selected of a shard are numbers of its samples. Chance is a hash of the seed, of the digest
of the shard and of the number in it, so that neither the order of shards nor of what is asked for
first changes who is drawn, and nothing but indexes has to be read for it.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from wdsprep.changes.key_lists import PIECE_NAMES, NameList, read_words
from wdsprep.dataset.ahead import ahead
from wdsprep.dataset.chance import draw, key_of
from wdsprep.dataset.damage import naming_repair
from wdsprep.dataset.digests import DigestKind
from wdsprep.dataset.keys import keys_at, offsets_of
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.names import SHARD
from wdsprep.dataset.receipts import Shard
from wdsprep.errors import UsageError
from wdsprep.loading.where import Subset
from wdsprep.store import opened
from wdsprep.store.base import Store
from wdsprep.text import examples, plural

Numbers = NDArray[np.uint32]
"""Of samples in their tar, which rise."""
Parts = Mapping[str, Fraction]
"""Of a split, by their names: the share of each."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A dataset to select from, as its receipts have it."""

    url: str
    shown: str
    manifest: Manifest

    @property
    def store(self) -> Store:
        return opened(self.url)

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """In the order in which pack numbered their samples, bucket by bucket."""
        return tuple(sorted(self.manifest.shards, key=_shard_order))

    @cached_property
    def units(self) -> Mapping[str, str]:
        """Of each shard the unit that made it."""
        ledger = self.manifest.ledger
        made = zip(ledger.units(), ledger.column("shards"), strict=True)
        return {shard["name"]: unit for unit, shards in made for shard in shards}

    @cached_property
    def content(self) -> str:
        """A digest of what is in its shards, wherever it lies."""
        shards = "".join(f"{shard.name} {shard.digest}\n" for shard in self.shards)
        return DigestKind.BLAKE3.hex(shards.encode())

    def offsets(self, shard: Shard) -> NDArray[np.int64]:
        with naming_repair(self.store):
            return np.array(offsets_of(self.store, shard), np.int64)

    def keys(self, shard: Shard, starts: NDArray[np.int64]) -> list[bytes]:
        """As arrays hold them; many shards are read at a time, so of each one after the other."""
        with naming_repair(self.store):
            found = keys_at(self.store, shard.name, starts.tolist(), at_once=False)
        return [key.encode("utf-8", "surrogateescape") for key in found]


def _shard_order(shard: Shard) -> tuple[int, int, int, str]:
    found = SHARD.fullmatch(shard.name)
    if found is None:  # of latents of tars that something else packed
        return shard.bucket, 0, 0, shard.name
    return shard.bucket, int(found[2]), int((found[3] or "_0")[1:]), shard.name


@dataclass(frozen=True, slots=True, eq=False)
class Some:
    """What is selected of a shard: of the dataset with this number, the samples with these; all,
    where there are none."""

    origin: int
    shard: Shard
    chosen: Numbers | None = None

    @property
    def size(self) -> int:
        return self.shard.samples if self.chosen is None else len(self.chosen)

    @property
    def numbers(self) -> Numbers:
        if self.chosen is None:
            return np.arange(self.shard.samples, dtype=np.uint32)
        return self.chosen

    def where(self, mask: NDArray[np.bool_]) -> "Some":
        """Those of them for which it is true."""
        return self if mask.all() else replace(self, chosen=self.numbers[mask])


def all_of(origins: Sequence[Origin]) -> list[Some]:
    """Bucket by bucket, in each the datasets in the order in which they were named."""
    every = [Some(at, shard) for at, one in enumerate(origins) for shard in one.shards]
    return sorted(every, key=lambda some: some.shard.bucket)


def left(every: Iterable[Some]) -> list[Some]:
    return [some for some in every if some.size]


def counted(every: Iterable[Some]) -> int:
    return sum(some.size for some in every)


# --- by keys
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WantedKeys:
    """Keys to select, sorted, each once; `shown` is where they come from."""

    keys: NDArray[np.bytes_]
    shown: str

    @classmethod
    def of(cls, given: NameList) -> "WantedKeys":
        """From a file with a key in each line; or the keys themselves."""
        shown = "the list of keys"
        if isinstance(given, str | os.PathLike):
            shown = os.fspath(given)
        some = [np.array(words, np.bytes_) for words in read_words(given) if words]
        if not some:
            raise UsageError(f"{shown} has no keys: write one in each line")
        return cls(keys=np.unique(np.concatenate(some)), shown=shown)

    @property
    def digest(self) -> str:
        """The digest of the keys, one a line."""
        found = DigestKind.BLAKE3.new()
        for begin in range(0, len(self.keys), PIECE_NAMES):
            some = self.keys[begin : begin + PIECE_NAMES].tolist()
            found.update(b"\n" * (begin > 0) + b"\n".join(some))
        return found.hexdigest()

    def of_shard(self, some: Some, origin: Origin, *, rise: bool) -> tuple[Some, Numbers]:
        """What of a shard is wanted, and the places of these keys in the list. A shard whose keys
        `rise` is not looked into where none of them can be in it."""
        offsets = origin.offsets(some.shard)
        ends = origin.keys(some.shard, offsets[[0, -2]])
        if rise and not self._meets(ends):
            return some.where(np.zeros(some.size, np.bool_)), np.empty(0, np.uint32)
        keys = np.array(origin.keys(some.shard, offsets[some.numbers]), np.bytes_)
        at = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        is_wanted = self.keys[at] == keys
        return some.where(is_wanted), at[is_wanted].astype(np.uint32)

    def _meets(self, ends: Sequence[bytes]) -> bool:
        """Whether one of them may lie between two: of keys of different lengths, perhaps."""
        first, last = ends
        if len(first) != len(last):
            return True
        begin = np.searchsorted(self.keys, np.bytes_(first))
        return bool(begin < np.searchsorted(self.keys, np.bytes_(last), side="right"))


def most_readers(origins: Sequence[Origin]) -> int:
    """Return how many threads are worth it where the slowest of the datasets is read."""
    return max(origin.store.readers for origin in origins)


def with_keys(
    every: Sequence[Some], origins: Sequence[Origin], wanted: WantedKeys, *, rise: bool
) -> list[Some]:
    """Those with the wanted keys, each of which has to be there."""
    seen = np.zeros(len(wanted.keys), np.bool_)
    found = []
    look = lambda some: wanted.of_shard(some, origins[some.origin], rise=rise)  # noqa: E731
    for some, places in ahead(look, every, most_readers(origins)):
        seen[places] = True
        found.append(some)
    if not seen.all():
        lacking = [key.decode("utf-8", "replace") for key in wanted.keys[~seen][:4].tolist()]
        count = plural(int((~seen).sum()), "key")
        raise UsageError(
            f"{wanted.shown} has {count} that no sample selected from has ({examples(lacking)}): "
            "take them out"
        )
    return found


# --- by a condition
def where(every: Sequence[Some], subsets: Sequence[Subset]) -> list[Some]:
    """Return the samples of each dataset that meet a condition."""
    found: dict[tuple[int, str], Numbers] = {}
    for at, subset in enumerate(subsets):
        meets = subset.positions(None)
        for number, name in enumerate(subset.whole.files.names):
            begin, end = meets.starts[number], meets.starts[number + 1]
            found[at, name] = meets.numbers[begin:end]
    return [
        some.where(np.isin(some.numbers, found[some.origin, some.shard.name])) for some in every
    ]


# --- by chance
def drawn(every: Sequence[Some], count: int, seed: int) -> list[Some]:
    """So many of them."""
    there = counted(every)
    if there < count:
        raise UsageError(
            f"--count {count:,}, but {plural(there, 'sample')} are there: ask for fewer"
        )
    return list(_between(every, seed, [0, count])[0])


def in_parts(every: Sequence[Some], parts: Parts, seed: int) -> dict[str, list[Some]]:
    """Each sample goes to one part; those beyond the sum of the shares to none."""
    total, share = counted(every), Fraction(0)
    ends = [0]
    for each in parts.values():
        share += each
        ends.append(int(share * total))
    return dict(zip(parts, _between(every, seed, ends), strict=True))


def _between(every: Sequence[Some], seed: int, ends: Sequence[int]) -> list[list[Some]]:
    """Sorted by what is drawn for each, those from each end to the next."""
    words = np.concatenate([np.empty(0, np.uint64), *(_words(some, seed) for some in every)])
    words.sort()
    found: list[list[Some]] = [[] for _ in ends[1:]]
    for some in every:
        places = np.searchsorted(words, _words(some, seed))
        for part, begin, end in zip(found, ends, ends[1:], strict=False):
            part.append(some.where((begin <= places) & (places < end)))
    return found


def _words(some: Some, seed: int) -> NDArray[np.uint64]:
    return draw(key_of("select", seed, some.shard.digest), some.numbers.astype(np.int64))
