"""Find the samples of one dataset in another dataset of the same images.

Everything that is made of one image shard has its name and its order, so nothing is searched. A
sample is found by its *position*: its number in the image shard. Rejects and shapes move samples;
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
from wdsprep.dataset.image_positions import NBYTES, NOWHERE, ImagePositions
from wdsprep.dataset.random_numbers import Ints
from wdsprep.dataset.reindex import make_step
from wdsprep.dataset.sample_selection import Numbers
from wdsprep.dataset.settings import Settings
from wdsprep.dataset.thread_map import read_each
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

    def read(self, shard: int) -> ImagePositions:
        """Return the positions of all samples of a shard."""
        count = int(self.sizes[shard])
        if not self.moved[shard]:
            return ImagePositions.plain(count)
        inputs = int(self.inputs[shard])
        with naming_next_step(make_step(self.store.url, "latents", self.settings)):
            from wdsprep.tables.read_positions import read_rows  # pyarrow, which few need

            name = self.names[shard]
            return read_rows(self.store, name, self.settings, samples=count, inputs=inputs)

    def check(self, read: Ints) -> None:
        """Check that the positions in all shards can be found, except in the shards `read`.

        A shard passes if its samples did not move, or if its table is listed: one listing takes
        less time than reading all tables. The others are read, which raises an error.
        """
        unread = self.moved.copy()
        unread[read] = False
        if not unread.any():
            return
        there = {entry.name for entry in self.store.list()}
        names = self.names
        missing = [n for n in np.flatnonzero(unread).tolist() if table_name(names[n]) not in there]
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
        own, places = self.shards[shards], indices
        is_moved = self._moved[shards]
        if is_moved.any():
            places = indices.copy()
            maps = self._read_maps(np.unique(shards[is_moved]).tolist())
            for shard in maps:
                here = shards == shard
                places[here] = maps[shard][indices[here]]
        return own, places

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

    def _read_maps(self, shards: Sequence[int]) -> dict[int, Numbers]:
        """Return for each shard the numbers that its samples have in the other dataset.

        More than a few shards are read in threads.
        """
        if sum(shard not in self._maps for shard in shards) <= FEW_SHARDS:
            return {shard: self._read_map(shard) for shard in shards}
        maps = read_each(self._read_map, shards, self.other.store.readers)
        return dict(zip(shards, maps, strict=True))

    @cached_property
    def _max_maps(self) -> int:
        """The most shards whose numbers are kept in memory."""
        mean = max(1.0, float(self.first.inputs.mean()))
        return max(KEPT, int(KEPT_NBYTES / (NBYTES * mean)))

    def _read_map(self, shard: int) -> Numbers:
        found = self._maps.get(shard)
        if found is None:
            found = self._make_map(shard)
            while len(self._maps) >= self._max_maps:  # whatever other threads take out meanwhile
                self._maps.pop(next(iter([*self._maps])), None)
            self._maps[shard] = found
        return found

    def _make_map(self, shard: int) -> Numbers:
        own = self.other.read(int(self.shards[shard]))
        numbers = own.numbers(int(self.first.inputs[shard]))
        return numbers[self.first.read(shard).positions]

    def find_incomplete(self) -> Ints:
        """Return the shards of the first dataset with samples that the other dataset may lack."""
        own, inputs = self.shards, self.other.inputs[self.shards]
        is_less = (self.other.sizes[own] < inputs) | (inputs < self.first.inputs)
        return np.flatnonzero((own < 0) | is_less)

    def find_present(self, shard: int) -> NDArray[np.bool_]:
        """Return a mask of the samples of a shard that the other dataset has too."""
        if self.shards[shard] < 0:
            return np.zeros(int(self.first.sizes[shard]), np.bool_)
        present: NDArray[np.bool_] = self._read_map(shard) != NOWHERE
        return present
