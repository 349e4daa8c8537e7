"""Select samples by a condition, by keys, by chance, or by parts of a split; plan their shards.

A selection has samples of one list of shards: those of a group of datasets. Chance is a
hash of the seed, of the digest of the shard and of the number in it. So neither the order of shards
nor that of the options changes which samples are drawn, and nothing but indexes has to be read.

A new shard is a run of selected samples of one bucket, bounded in number and bytes. It also ends
where the next key does not rise, which is usually between two datasets. So keys rise in each shard,
as `verify` and `inspect` expect.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from wdsprep.changes.merged_datasets import Group, numbers_by_shard
from wdsprep.changes.options import NameList, read_lines
from wdsprep.dataset.damage import naming_repair
from wdsprep.dataset.file_names import image_shard, is_table, latent_shard, latent_unit, slice_name
from wdsprep.dataset.manifest import Shard
from wdsprep.dataset.random_numbers import draw, key_of
from wdsprep.dataset.sample_selection import Numbers, SampleSelection, ShardSamples, ranges
from wdsprep.dataset.samples import key_order
from wdsprep.dataset.sealed_json import canonical_json, hex_digest
from wdsprep.dataset.shard_reader import ShardReader
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.errors import UsageError
from wdsprep.loading.subsets import Subset
from wdsprep.packing.options import ShardSizes
from wdsprep.tables.key_join import open_join
from wdsprep.tables.query import WantedTexts
from wdsprep.text import EXAMPLES, examples, plural


# --- by keys
def select_keys(
    selection: SampleSelection, group: Group, wanted: WantedTexts, keys: NameList
) -> SampleSelection:
    """Return the samples with the wanted keys, which were read from `keys`.

    Raise UsageError if a key is missing.
    """
    is_wanted = np.zeros(selection.samples, np.bool_)
    first = 0
    for _, shard_keys in group.read_keys(selection):
        is_wanted[first + wanted.find(shard_keys.to_pylist())] = True
        first += len(shard_keys)
    if missing := int((~wanted.seen).sum()):
        missing_keys = [*islice(wanted.unseen(read_lines("keys", keys)), EXAMPLES + 1)]
        raise UsageError(
            f"--keys has {plural(missing, 'key')} that no sample has "
            f"({examples(missing_keys)}): remove them from the list"
        )
    return selection.filter(is_wanted)


# --- by a condition
def select_where(
    selection: SampleSelection, group: Group, subsets: Sequence[Subset]
) -> SampleSelection:
    """Return those samples of a selection that meet a condition.

    `subsets` has for each dataset all samples that meet it.
    """
    numbers = [*map(numbers_by_shard, subsets)]
    by_shard = (numbers[origin][shard.name] for origin, shard in group.shards)
    return selection.intersect(SampleSelection.from_numbers(by_shard))


# --- by chance
def divide_samples(
    selection: SampleSelection, group: Group, seed: int, ends: Sequence[int]
) -> list[SampleSelection]:
    """Return the samples whose places in a random order lie between each of `ends` and the next.

    The seed decides the order.
    """

    def draw_words(samples: ShardSamples) -> NDArray[np.uint64]:
        _, shard = group.shards[samples.shard]
        return draw(key_of("select", seed, shard.digest), samples.numbers.astype(np.int64))

    all_words = np.concatenate([np.empty(0, np.uint64), *map(draw_words, selection.per_shard())])
    all_words.sort()
    masks: list[list[NDArray[np.bool_]]] = [[] for _ in ends[1:]]
    for words in map(draw_words, selection.per_shard()):
        behind = [
            words > all_words[end - 1] if end else np.ones_like(words, np.bool_) for end in ends
        ]
        for part, first, last in zip(masks, behind, behind[1:], strict=False):
            part.append(first & ~last)
    return [selection.filter(np.concatenate(part)) for part in masks]


# --- their shards
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
    """Return the list of the inputs of a unit, which does not depend on where datasets are."""
    lines = [
        {
            "dataset": piece.origin,
            "digest": piece.shard.digest,
            "samples": ranges(piece.numbers),
            "shard": piece.shard.name,
        }
        for piece in pieces
    ]
    return b"".join(canonical_json(line) + b"\n" for line in lines)


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
        name = slice_name(number) if are_images else latent_unit(tar)
        return CopyUnit(
            name=name,
            shard=tar if are_images else latent_shard(name, group.settings),
            pieces=tuple(pieces),
            input=hex_digest(list_pieces(pieces)),
            nbytes=nbytes,
        )

    def read_sizes(samples: ShardSamples) -> NDArray[np.int64]:
        at, shard = group.shards[samples.shard]
        store = group.origins[at].store
        if is_table(shard.name):
            return np.full(len(samples.numbers), shard.nbytes // shard.samples)
        with naming_repair(store):
            return ShardReader(store, shard).sizes[samples.numbers]

    all_sizes = map_ahead(read_sizes, selection.per_shard(), group.readers)
    for sizes, (samples, keys) in zip(all_sizes, group.read_keys(selection), strict=True):
        at, old = group.shards[samples.shard]
        first, end = (key_order(prefixes[at] + keys[n].as_py()) for n in (0, -1))
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


def _check_apart(selection: SampleSelection, group: Group) -> None:
    """Raise UsageError if two samples have the same key."""
    with open_join() as join:
        for _, keys in group.read_keys(selection):
            join.add(keys, {})
        join.find_first()
        _, twice = join.repeated_names(1)
    if twice:
        raise UsageError(
            f"{group.shown} have the key {twice[0].decode()} more than once: give --prefix, which "
            "puts the number of its dataset (0, 1, ...) before each key"
        )
