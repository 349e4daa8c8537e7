"""Join datasets of the same images: a batch then has the arrays of all of them.

Everything that is made of one image shard has its name and its order, so nothing is searched.
Shards are matched by name. A sample is found by its *position*: its number in the image shard.
Rejects and shapes move samples; then the tables of shards say the positions of their samples
(`wdsprep.dataset.image_positions`).

Receipts say which image shard each unit was made from, and how many samples that has. So the
manifests alone tell every fault of a join before the first step. Samples that a joined dataset
lacks leave the order. To find them, the rows of shards with rejects are read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsprep.dataset.damage import naming_next_step
from wdsprep.dataset.file_names import latent_unit, maker_of, table_name
from wdsprep.dataset.image_positions import NBYTES, NOWHERE, numbers_at, plain_positions
from wdsprep.dataset.manifest import Manifest, image_shard_digest
from wdsprep.dataset.random_numbers import Ints
from wdsprep.dataset.reindex import make_step
from wdsprep.dataset.sample_selection import (
    Numbers,
    SampleSelection,
    digest_of_shape,
    digest_of_shards,
)
from wdsprep.dataset.settings import Settings
from wdsprep.dataset.shapes import shape_name, shapes_of
from wdsprep.dataset.stored_dataset import read_manifest
from wdsprep.dataset.thread_map import map_ahead, read_each
from wdsprep.errors import UsageError
from wdsprep.loading.open_datasets import (
    counts_by_shape,
    dataset_from_manifest,
    select,
    split_by_shape,
)
from wdsprep.loading.order.mixing import StreamAmount
from wdsprep.loading.served_datasets import Dataset, JoinedDataset
from wdsprep.sources.patterns import is_table
from wdsprep.store import open_store
from wdsprep.store.base import Store
from wdsprep.text import plural

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
        less time than reading all tables. The others are read, which raises an error.
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

    @cached_property
    def _max_maps(self) -> int:
        """The most shards whose numbers are kept in memory."""
        mean = max(1.0, float(self.first.inputs.mean()))
        return max(KEPT, int(KEPT_NBYTES / (NBYTES * mean)))

    def _read_map(self, shard: int) -> Numbers:
        """Return the numbers that the samples of a shard have in the other dataset."""
        numbers = self._maps.get(shard)
        if numbers is None:
            other = self.other.read(int(self.shards[shard]))
            by_position = numbers_at(other, int(self.first.inputs[shard]))
            numbers = by_position[self.first.read(shard)]
            while len(self._maps) >= self._max_maps:  # whatever other threads take out meanwhile
                self._maps.pop(next(iter([*self._maps])), None)
            self._maps[shard] = numbers
        return numbers

    def find_incomplete(self) -> Ints:
        """Return the shards of the first dataset with samples that the other dataset may lack."""
        others, inputs = self.shards, self.other.inputs[self.shards]
        is_less = (self.other.sizes[others] < inputs) | (inputs < self.first.inputs)
        return np.flatnonzero((others < 0) | is_less)

    def find_present(self, shard: int) -> NDArray[np.bool_]:
        """Return a mask of the samples of a shard that the other dataset has too."""
        if self.shards[shard] < 0:
            return np.zeros(int(self.first.sizes[shard]), np.bool_)
        present: NDArray[np.bool_] = self._read_map(shard) != NOWHERE
        return present


def join_datasets(datasets: Iterable[Dataset]) -> tuple[Dataset, ...]:
    """Return the datasets joined with those that their `join` lists.

    Samples that a joined dataset lacks are left out, and tables in `join` are not joined here.
    Raise UsageError if datasets do not fit together.
    """
    opened: dict[str, tuple[Dataset, Manifest]] = {}
    by_whole: dict[Dataset, list[Dataset]] = {}
    for dataset in datasets:
        by_whole.setdefault(dataset.whole, []).append(dataset)
    joined: list[Dataset] = []
    for whole, parts in by_whole.items():
        places = [place for place in whole.join if not is_table(place)]
        joined += _join_one(whole, parts, places, opened) if places else parts
    return tuple(joined)


def _join_one(
    whole: Dataset,
    parts: list[Dataset],
    places: Sequence[str],
    opened: dict[str, tuple[Dataset, Manifest]],
) -> list[Dataset]:
    if whole.kind == "tars":
        raise UsageError(
            f"{whole.store.url} holds tars without a manifest, and nothing says which images they "
            "are of: leave out join="
        )
    files = whole.files
    first = _make_positions(files, files.inputs, parts if files.kind == "latents" else ())
    beside: list[JoinedDataset] = []
    shapes: list[tuple[Dataset, ...]] = []
    for place in places:
        store = open_store(place)
        url = store.url
        others = whole, *(joined.dataset for joined in beside)
        if _canonical_place(store) in {_canonical_place(other.store) for other in others}:
            raise UsageError(f"{place} is joined twice: name each dataset once")
        if url not in opened:
            opened[url] = _open_joined(place)
        shapes.append(_split_joined(whole, *opened[url]))
        beside.append(_match_shards(files, first, *opened[url], shapes[-1]))
    left = []
    for part in _drop_lacking_samples(whole, parts, beside):
        joined = tuple(
            other._replace(dataset=next(shape for shape in parts_of if shape.size == part.size))
            if parts_of
            else other
            for other, parts_of in zip(beside, shapes, strict=True)
        )
        left.append(replace(part, joined=joined))
    return left


def _make_positions(dataset: Dataset, inputs: Ints, parts: Sequence[Dataset]) -> DatasetPositions:
    """Return the positions of a dataset's samples in the image shards.

    `inputs` counts the samples of each image shard, and `parts` are the dataset's shapes. A shard
    without rejects whose samples all have one shape keeps the order of the images.
    """
    count = np.zeros(len(dataset.names), np.int64)
    for part in parts:
        if part.part_of is not None:
            count[part.selection.shards] += 1
    return DatasetPositions(
        store=dataset.store,
        settings=dataset.settings,
        names=dataset.names,
        sizes=dataset.sizes,
        inputs=inputs,
        moved=(dataset.sizes != inputs) | (count > 1),
    )


def _canonical_place(store: Store) -> str:
    """Return the same text for all ways to write the place of a store."""
    return str(store.root.resolve()) if store.root else store.url


def _open_joined(place: str) -> tuple[Dataset, Manifest]:
    store = open_store(place)
    manifest = read_manifest(store)
    if manifest is None:
        raise UsageError(
            f"{place} was not made by wdsprep, so nothing says which images it belongs to: join "
            'what "wdsprep encode" has made'
        )
    if manifest.dataset != "latents":
        raise UsageError(f"{place} holds {manifest.dataset}: join a dataset of latents or of texts")
    return dataset_from_manifest(store, manifest, StreamAmount()), manifest


def _split_joined(whole: Dataset, dataset: Dataset, manifest: Manifest) -> tuple[Dataset, ...]:
    """Return a joined dataset split by shape, or () if it has no shapes.

    Raise UsageError if the first dataset has other shapes. If both were cropped alike, a sample
    has the same shape in both.
    """
    shapes, url = shapes_of(manifest.settings), dataset.store.url
    if not shapes:
        return ()
    if not (known := shapes_of(whole.settings)):
        raise UsageError(
            f"{url} has latents of many shapes, which decide the order: load it first, "
            "and join the others to it"
        )
    if {*known} != {*shapes}:
        raise UsageError(
            f"{url} has other shapes than {whole.store.url}, and a batch has one shape: join "
            "datasets made with the same --shapes and --resolution"
        )
    return split_by_shape(dataset, shapes, counts_by_shape(dataset, manifest))


def _match_shards(
    whole: Dataset,
    first: DatasetPositions,
    dataset: Dataset,
    manifest: Manifest,
    shapes: tuple[Dataset, ...],
) -> JoinedDataset:
    url = dataset.store.url
    ledger = manifest.ledger
    known = dict(zip(ledger.units(), ledger.column("inputs"), strict=True))
    source = dict(zip(known, ledger.column("input"), strict=True))
    units = [*map(latent_unit, whole.names)]
    lacking = [name for name, unit in zip(whole.names, units, strict=True) if unit not in source]
    others = [
        name
        for name, unit, digest in zip(whole.names, units, whole.made_of, strict=True)
        if unit in source and image_shard_digest(source[unit]) != image_shard_digest(digest)
    ]
    if others and len(others) + len(lacking) == len(whole.names):
        raise UsageError(
            f"{url} and {whole.store.url} were made from different images: join datasets made "
            "from the same image shards"
        )
    maker = maker_of(manifest.dataset, manifest.settings)
    if lacking:
        remedy = ": make it with --resolution as small, or load without them (buckets=)"
        if not manifest.complete:
            remedy = f', as it is not complete: run the same "{maker}" again, to its end'
        elif manifest.is_scored:
            remedy = f', as they were packed later: run the same "{maker}" again'
        raise UsageError(
            f"{url} has nothing of {_name_shards(lacking)}, which {whole.store.url} has{remedy}"
        )
    if others:
        raise UsageError(
            f"{url} and {whole.store.url} were made from different images in "
            f'{_name_shards(others)}, which were packed again in between: run "wdsprep repair" on '
            f'both with their images, then the same "{maker}" again'
        )
    numbers = {latent_unit(name): number for number, name in enumerate(dataset.names)}
    shards = np.array([numbers.get(unit, -1) for unit in units], np.int64)
    inputs = np.array([known[latent_unit(name)] for name in dataset.names], np.int64)
    other = _make_positions(dataset, inputs, shapes)
    return JoinedDataset(dataset, JoinPositions(shards=shards, first=first, other=other))


def _name_shards(shards: Sequence[str]) -> str:
    more = f" and {plural(len(shards) - 1, 'more shard')}" if len(shards) > 1 else ""
    return f"{shards[0]}{more}"


def _drop_lacking_samples(
    whole: Dataset, parts: list[Dataset], beside: list[JoinedDataset]
) -> list[Dataset]:
    """Return the parts of a dataset without the samples that a joined dataset lacks.

    Raise UsageError if no sample is left.
    """
    keep = _find_common([other.positions for other in beside])
    if all(has.all() for has in keep.values()):
        return parts
    numbers = SampleSelection.from_numbers(
        np.flatnonzero(keep.get(shard, np.ones(size, np.bool_))).astype(np.uint32)
        for shard, size in enumerate(whole.files.sizes.tolist())
    )
    left = [selected for part in parts if (selected := select(part, numbers)) is not None]
    if not left:
        places = " and ".join(other.dataset.store.url for other in beside)
        raise UsageError(f"no sample of {whole.store.url} is in {places}: all were rejected there")
    return _set_common_digests(whole, left)


def _find_common(beside: list[JoinPositions]) -> dict[int, NDArray[np.bool_]]:
    """Return masks of the samples that all datasets have, by shard of the first dataset.

    Shards without a mask have all their samples in all datasets. Raise an error if the positions
    of these samples cannot be found.
    """
    keep: dict[int, NDArray[np.bool_]] = {}
    lacks = [positions.find_incomplete() for positions in beside]
    for positions, shards in zip(beside, lacks, strict=True):
        masks = map_ahead(positions.find_present, shards.tolist(), positions.other.store.readers)
        for shard, has in zip(shards.tolist(), masks, strict=True):
            keep[shard] = keep[shard] & has if shard in keep else has
    read = [
        shards[positions.shards[shards] >= 0]
        for positions, shards in zip(beside, lacks, strict=True)
    ]
    beside[0].first.check(np.concatenate(read))
    for positions, numbers in zip(beside, read, strict=True):
        positions.other.check(positions.shards[numbers])
    return keep


def _set_common_digests(whole: Dataset, parts: list[Dataset]) -> list[Dataset]:
    """Return the parts of a dataset, with digests of the samples that they still have.

    The order is then that of a single dataset which holds just these samples.
    """
    counts = [np.zeros(len(whole.names), np.int32) for _ in parts]
    for of_part, part in zip(counts, parts, strict=True):
        of_part[part.selection.shards] = part.sizes
    total = np.sum(counts, axis=0)
    filled = np.flatnonzero(total)
    lines = ((whole.names[n], int(total[n]), whole.made_of[n]) for n in filled.tolist())
    digest = digest_of_shards(lines)
    return [
        replace(
            part,
            digest=digest
            if part.size is None
            else digest_of_shape(digest, shape_name(part.size), of_part[filled]),
        )
        for of_part, part in zip(counts, parts, strict=True)
    ]
