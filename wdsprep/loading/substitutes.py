"""Other samples in the places of those that cannot be served.

Which one takes a place depends on nothing but the sample that is damaged, so that it is one on
every rank and in every run.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from wdsprep.dataset.chance import key_of
from wdsprep.dataset.damage import verify_step
from wdsprep.errors import FormatError, NotFoundError
from wdsprep.loading.datasets import Dataset

ATTEMPTS = 16  # to replace a damaged sample: more means that the dataset is lost
MISSING = "the shard is missing"
ALL_MISSING = "all its shards are missing"
StreamChoice = tuple[int, int]
"""A stream, and which of its captions are picked for a row."""
ShardPlace = tuple[int, int]
"""A shard, and the number of a sample in it."""
_log = logging.getLogger("wdsprep")


class Fault(NamedTuple):
    """Why a sample cannot be served, the tar that is to blame, and the sample's number there."""

    reason: str
    tar: str
    number: int


class Substitutes:
    """Samples of some streams that are drawn in place of others, and what is known to be lost."""

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self._datasets = datasets
        self._told: set[tuple[str, int]] = set()
        # What stands beside a row may be missing, and be there beside another choice of captions:
        self._missing: dict[StreamChoice, set[int]] = {}

    def draw(self, stream: int, wanted: ShardPlace, attempt: int) -> ShardPlace:
        """Return the sample that is drawn for another one, so many having been drawn before."""
        dataset = self._datasets[stream]
        number = key_of("substitute", dataset.digest, *wanted, attempt) % int(dataset.ends[-1])
        runs = np.searchsorted(dataset.ends, [number], side="right")
        places = number - (dataset.ends[runs] - dataset.sizes[runs])
        shards, indices = dataset.selection.locate(runs, places)
        return int(shards[0]), int(indices[0])

    def next(self, choice: StreamChoice, wanted: ShardPlace, drawn: int) -> tuple[int, ShardPlace]:
        """Return the next sample whose shard is not known to be missing, and how many were drawn.

        What is known changes nothing: the others would be drawn and missed."""
        dataset, missing = self._datasets[choice[0]], self._missing.get(choice, set())
        while len(missing) < dataset.filled:
            place = self.draw(choice[0], wanted, drawn)
            drawn += 1
            if place[0] not in missing:
                return drawn, place
        joined = " and ".join(each.dataset.store.url for each in dataset.joined)
        what = f"each of its shards is missing, there or in {joined}" if joined else ALL_MISSING
        raise NotFoundError(f"{dataset.place}: {what}")

    def tell(self, choice: StreamChoice, shard: int, fault: Fault) -> None:
        """Warn of a sample that is replaced, or once for all samples of a missing shard."""
        reason, tar, number = fault
        if reason == MISSING:
            self._missing.setdefault(choice, set()).add(shard)
        place = (tar, number if reason != MISSING else -1)
        if place in self._told:
            return
        self._told.add(place)
        what = reason if reason == MISSING else f"sample {number} cannot be served ({reason})"
        _log.warning("%s: %s: others are served in its place", tar, what)

    def lost(self, stream: int, fault: Fault) -> FormatError:
        """Return the error of a dataset of which too many samples are damaged."""
        datasets = self._datasets[stream].beside
        damaged = next(each for each in datasets if fault.tar.startswith(f"{each.store.url}/"))
        next_step = "" if damaged.kind == "tars" else verify_step(damaged.store.url)
        what = f"{ATTEMPTS} samples in a row cannot be served, the last ({fault.reason})"
        return FormatError(f"{damaged.place}: {what}").with_next_step(next_step)
