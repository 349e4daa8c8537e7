"""Select samples by a condition, by keys, by chance, or by parts of a split.

A selection has samples of one list of shards: those of a group of datasets. Chance is a
hash of the seed, of the digest of the shard and of the number in it. So neither the order of shards
nor that of the options changes which samples are drawn, and nothing but indexes has to be read.
"""

import os
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import accumulate, islice

import numpy as np
from numpy.typing import NDArray

from wdsprep.changes.merged_datasets import Group
from wdsprep.changes.options import NameList, read_lines
from wdsprep.dataset.random_numbers import draw, key_of
from wdsprep.dataset.sample_selection import Numbers, SampleSelection, ShardSamples
from wdsprep.dataset.sample_table import KEY
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.errors import UsageError
from wdsprep.loading.where import Subset
from wdsprep.tables.query import WantedTexts
from wdsprep.text import EXAMPLES, examples, plural

Parts = Mapping[str, Fraction]
"""The share of each part of a split, by its name."""


# --- by keys
class WantedKeys(WantedTexts):
    """The keys to select, of a file with a key on each line, or a list; `shown` says which."""

    def __init__(self, keys: NameList) -> None:
        self._given, self.shown = keys, "the list of keys"
        if isinstance(keys, str | os.PathLike):
            self.shown = os.fspath(keys)
        super().__init__(KEY, read_lines("keys", keys))
        if not len(self):
            raise UsageError(f"{self.shown} has no keys: write one on each line")

    @property
    def digest(self) -> str:
        return hex_digest(self.marks.data)

    def check_seen(self) -> None:
        """Raise UsageError if one of the keys was not seen."""
        if missing := int((~self.seen).sum()):
            missing_keys = [*islice(self.unseen(read_lines("keys", self._given)), EXAMPLES + 1)]
            raise UsageError(
                f"{self.shown} has {plural(missing, 'key')} that no sample has "
                f"({examples(missing_keys)}): remove them from the list"
            )


def select_keys(selection: SampleSelection, group: Group, wanted: WantedKeys) -> SampleSelection:
    """Return the samples with the wanted keys. Raise UsageError if a key is missing."""
    is_wanted = np.zeros(selection.samples, np.bool_)
    first = 0
    for _, keys in group.read_keys(selection):
        is_wanted[first + wanted.find(keys)] = True
        first += len(keys)
    wanted.check_seen()
    return selection.filter(is_wanted)


# --- by a condition
def select_where(
    selection: SampleSelection, group: Group, subsets: Sequence[Subset]
) -> SampleSelection:
    """Return those samples of a selection that meet a condition.

    `subsets` has for each dataset all samples that meet it.
    """
    numbers: dict[tuple[int, str], Numbers] = {}
    for at, subset in enumerate(subsets):
        meets = subset.selection(None)
        for name, samples in zip(subset.whole.files.names, meets.per_shard(), strict=True):
            numbers[at, name] = samples.numbers
    by_shard = (numbers[origin, shard.name] for origin, shard in group.shards)
    return selection.intersect(SampleSelection.from_numbers(by_shard))


# --- by chance
def draw_samples(
    selection: SampleSelection, group: Group, count: int, seed: int
) -> SampleSelection:
    """Return `count` samples, drawn at random. Raise UsageError if there are fewer."""
    if selection.samples < count:
        there = plural(selection.samples, "sample")
        raise UsageError(f"--count {count:,} is more than the {there} to draw from: give fewer")
    return _divide(selection, group, seed, [0, count])[0]


def split_samples(
    selection: SampleSelection, group: Group, parts: Parts, seed: int
) -> dict[str, SampleSelection]:
    """Return the samples of each part of a split.

    Each sample is in one part at most. If shares sum up to less than 1, some are in none.
    """
    ends = [0, *(int(share * selection.samples) for share in accumulate(parts.values()))]
    return dict(zip(parts, _divide(selection, group, seed, ends), strict=True))


def _divide(
    selection: SampleSelection, group: Group, seed: int, ends: Sequence[int]
) -> list[SampleSelection]:
    """Return the samples whose places in a random order lie between each of `ends` and the next.

    The seed decides the order.
    """
    draw_words = partial(_random_words, group, seed)
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


def _random_words(group: Group, seed: int, samples: ShardSamples) -> NDArray[np.uint64]:
    """Return a random number for each of some samples."""
    _origin, shard = group.find_shard(samples)
    return draw(key_of("select", seed, shard.digest), samples.numbers.astype(np.int64))
