"""The positions of a dataset's samples in the image shards, and their places in a joined dataset.

A sample is found by its *position*: its number in the image shard. Rejects and shapes move samples;
then the tables of shards say the positions of their samples (`wdsprep.dataset.image_positions`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsprep.dataset.damage import naming_next_step
from wdsprep.dataset.file_names import table_name
from wdsprep.dataset.image_positions import NBYTES, NOWHERE, numbers_at, plain_positions
from wdsprep.dataset.random_numbers import Ints
from wdsprep.dataset.reindex import make_step
from wdsprep.dataset.sample_selection import Numbers
from wdsprep.dataset.settings import Settings
from wdsprep.dataset.thread_map import map_ahead, read_each
from wdsprep.store.base import Store

KEPT_NBYTES = 32 << 20
"""The limit on the rows kept of each joined dataset: those of 8 million samples.

These are in far more shards than a step takes samples from."""
KEPT = 512
"""The least number of shards whose rows are kept, however large these are."""
FEW_SHARDS = 16
"""The most shards whose rows are read one after another; more are read in threads."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DatasetPositions:
    """The positions of a dataset's samples in the image shards.

    For each shard, `sizes` counts its samples, `inputs` counts the samples of its image shard,
    and `moved` says whether the positions must be read.
    """

    store: Store
    settings: Settings
    names: Sequence[str]
    sizes: Ints
    inputs: Ints
    moved: NDArray[np.bool_]

    def read(self, shard: int) -> NDArray[np.uint32]:
        """Return the positions of all samples of a shard."""
        count = int(self.sizes[shard])
        if not self.moved[shard]:
            return plain_positions(count)
        inputs = int(self.inputs[shard])
        with naming_next_step(make_step(self.store.url, "latents", self.settings)):
            from wdsprep.tables.stored_tables import read_rows  # pyarrow, which few need

            name = self.names[shard]
            return read_rows(self.store, name, self.settings, samples=count, inputs=inputs)

    def check(self, read: Ints) -> None:
        """Check that the positions in all shards can be found, except in the shards `read`.

        A shard passes if its samples did not move, or if its table is listed: one listing takes
        less time than reading all tables. Of the others the first is read, which raises the error.
        """
        unread = self.moved.copy()
        unread[read] = False
        if not unread.any():
            return
        listed = {entry.name for entry in self.store.list()}
        names = self.names
        missing = [n for n in np.flatnonzero(unread).tolist() if table_name(names[n]) not in listed]
        read_each(self.read, missing[:1], self.store.readers)


@dataclass(frozen=True, kw_only=True, eq=False)
class JoinPositions:
    """The places of a `first` dataset's samples in an `other` one.

    `shards` says which shard of the other dataset belongs to each shard of the first; -1 means
    none.
    """

    shards: Ints
    first: DatasetPositions
    other: DatasetPositions
    _maps: dict[int, Numbers] = field(default_factory=dict, repr=False)

    def locate(self, shards: Ints, indices: Ints) -> tuple[Ints, Ints]:
        """Return where samples of the first dataset are in the other: their shards and numbers.

        Of a sample that the other dataset lacks, the number is NOWHERE or the shard is -1.
        """
        places, is_moved = indices, self._moved[shards]
        if is_moved.any():
            places = indices.copy()
            moved = np.unique(shards[is_moved]).tolist()
            is_many = sum(shard not in self._maps for shard in moved) > FEW_SHARDS
            readers = self.other.store.readers
            maps = (
                read_each(self._read_map, moved, readers) if is_many else map(self._read_map, moved)
            )
            for shard, numbers in zip(moved, maps, strict=True):
                here = shards == shard
                places[here] = numbers[indices[here]]
        return self.shards[shards], places

    @cached_property
    def _moved(self) -> NDArray[np.bool_]:
        """A mask of the shards whose samples may have other numbers in the other dataset."""
        has_other = self.shards >= 0
        moved: NDArray[np.bool_] = self.first.moved & has_other
        moved[has_other] |= self.other.moved[self.shards[has_other]]
        return moved

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without the rows that were read.

        Another process reads the rows that it needs.
        """
        return {**self.__dict__, "_maps": {}}

    def _read_map(self, shard: int) -> Numbers:
        """Return the numbers that the samples of a shard have in the other dataset."""
        numbers = self._maps.get(shard)
        if numbers is None:
            other = self.other.read(int(self.shards[shard]))
            by_position = numbers_at(other, int(self.first.inputs[shard]))
            numbers = by_position[self.first.read(shard)]
            mean = max(1.0, float(self.first.inputs.mean()))
            most = max(KEPT, int(KEPT_NBYTES / (NBYTES * mean)))
            while len(self._maps) >= most:  # whatever other threads take out meanwhile
                self._maps.pop(next(iter([*self._maps])), None)
            self._maps[shard] = numbers
        return numbers

    def find_present(self) -> dict[int, NDArray[np.bool_]]:
        """Return masks of the samples that the other dataset has too, by shard of the first.

        Shards without a mask have all their samples in both.
        """
        inputs = self.other.inputs[self.shards]
        is_less = (self.other.sizes[self.shards] < inputs) | (inputs < self.first.inputs)
        shards = np.flatnonzero((self.shards < 0) | is_less).tolist()

        def find(shard: int) -> NDArray[np.bool_]:
            if self.shards[shard] < 0:
                return np.zeros(int(self.first.sizes[shard]), np.bool_)
            return np.asarray(self._read_map(shard) != NOWHERE)

        masks = map_ahead(find, shards, self.other.store.readers)
        return dict(zip(shards, masks, strict=True))
