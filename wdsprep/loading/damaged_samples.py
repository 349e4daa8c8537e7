"""Replace samples that cannot be served by other samples.

The substitute depends on nothing but the damaged sample. So it is the same on every rank and in
every run.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from wdsprep.dataset.damage import verify_step
from wdsprep.dataset.random_numbers import key_of
from wdsprep.errors import FormatError, NotFoundError
from wdsprep.loading.served_datasets import Dataset

ATTEMPTS = 16  # substitutes tried for a damaged sample before the dataset is taken for lost
MISSING = "the shard is missing"
ALL_MISSING = "all its shards are missing"
StreamChoice = tuple[int, int]
"""The number of a stream, and of the captions picked for a row."""
ShardPlace = tuple[int, int]
"""A shard, and the number of a sample in it."""
_log = logging.getLogger("wdsprep")


class Fault(NamedTuple):
    """The reason why a sample cannot be served, with its tar and its number in that tar."""

    reason: str
    tar: str
    number: int


class Substitutes:
    """A source of samples to serve in place of damaged ones. It remembers missing shards."""

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self._datasets = datasets
        self._told: set[tuple[str, int]] = set()
        # What stands beside a row may be missing, and be there beside another choice of captions:
        self._missing: dict[StreamChoice, set[int]] = {}

    def draw(self, stream: int, wanted: ShardPlace, attempt: int) -> ShardPlace:
        """Return the place of a sample of the stream that may replace the wanted one.

        A hash of the wanted place and the attempt chooses it among all samples.
        """
        dataset = self._datasets[stream]
        number = key_of("substitute", dataset.digest, *wanted, attempt) % int(dataset.ends[-1])
        runs = np.searchsorted(dataset.ends, [number], side="right")
        places = number - (dataset.ends[runs] - dataset.sizes[runs])
        shards, indices = dataset.selection.locate(runs, places)
        return int(shards[0]), int(indices[0])

    def next(self, choice: StreamChoice, wanted: ShardPlace, drawn: int) -> tuple[int, ShardPlace]:
        """Draw substitutes until one is in no shard that is known to be missing.

        Return the number of draws, including the `drawn` before, and the place of the last one.
        Raise NotFoundError if all shards are known to be missing. Passing over missing shards
        saves time, and does not change the substitute.
        """
        dataset, missing = self._datasets[choice[0]], self._missing.get(choice, set())
        while len(missing) < dataset.filled_shards:
            place = self.draw(choice[0], wanted, drawn)
            drawn += 1
            if place[0] not in missing:
                return drawn, place
        joined = " and ".join(each.dataset.store.url for each in dataset.joined)
        what = f"each of its shards is missing, here or in {joined}" if joined else ALL_MISSING
        raise NotFoundError(f"{dataset.place}: {what}")

    def warn(self, choice: StreamChoice, shard: int, fault: Fault) -> None:
        """Log once that a sample is replaced, or all samples of a missing shard.

        A missing shard is remembered, so that `next` passes over it.
        """
        reason, tar, number = fault
        if reason == MISSING:
            self._missing.setdefault(choice, set()).add(shard)
        place = (tar, number if reason != MISSING else -1)
        if place in self._told:
            return
        self._told.add(place)
        what = reason if reason == MISSING else f"sample {number} cannot be served ({reason})"
        _log.warning("%s: %s; others are served in its place", tar, what)

    def make_error(self, stream: int, fault: Fault) -> FormatError:
        """Return the error for a dataset with too many damaged samples."""
        datasets = self._datasets[stream].with_joined
        damaged = next(each for each in datasets if fault.tar.startswith(f"{each.store.url}/"))
        next_step = "" if damaged.kind == "tars" else verify_step(damaged.store.url)
        what = f"{ATTEMPTS} samples in a row cannot be served, the last ({fault.reason})"
        return FormatError(f"{damaged.place}: {what}").with_next_step(next_step)
