"""Join datasets of the same images: a batch then has the arrays of all of them.

Everything that is made of one image shard has its name and its order, so nothing is searched.
Shards are matched by name, and samples by their *positions*: their numbers in the image shard.
Rejects and shapes move samples; then the tables of shards say the positions of their samples
(`wdsprep.dataset.image_positions`).

Receipts say which image shard each unit was made from, and how many samples that has. So the
manifests alone tell every fault of a join before the first step. Samples that a joined dataset
lacks leave the order. To find them, the rows of shards with rejects are read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
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
from wdsprep.dataset.shapes import shape_name, shapes_of
from wdsprep.dataset.stored_dataset import read_manifest
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.errors import UsageError
from wdsprep.loading.open_datasets import (
    counts_by_shape,
    dataset_from_manifest,
    image_counts,
    open_place,
    select,
    split_by_shape,
)
from wdsprep.loading.order.mixing import StreamAmount
from wdsprep.loading.served_datasets import Dataset
from wdsprep.sources.patterns import is_table
from wdsprep.store import did_you_mean_place
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
class JoinedDataset:
    """A dataset that is joined to a `first` one, and where it has the samples of that one.

    `shards` says which shard of the joined dataset belongs to each shard of the first; -1 means
    none. `moved` is a mask of the shards of the first whose samples may have other numbers in the
    joined one.
    """

    first: Dataset
    dataset: Dataset
    shards: Ints
    moved: NDArray[np.bool_]
    _maps: dict[int, Numbers] = field(default_factory=dict, repr=False)

    def locate(self, shards: Ints, indices: Ints) -> tuple[Ints, Ints]:
        """Return where samples of the first dataset are in the joined one: shards and numbers.

        Of a sample that the joined dataset lacks, the number is NOWHERE or the shard is -1.
        """
        places, is_moved = indices, self.moved[shards]
        if is_moved.any():
            places = indices.copy()
            moved = np.unique(shards[is_moved]).tolist()
            is_many = sum(shard not in self._maps for shard in moved) > FEW_SHARDS
            maps = map_ahead(self._read_map, moved, self.dataset.store.readers if is_many else 1)
            for shard, numbers in zip(moved, maps, strict=True):
                here = shards == shard
                places[here] = numbers[indices[here]]
        return self.shards[shards], places

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without the rows that were read.

        Another process reads the rows that it needs.
        """
        return {**self.__dict__, "_maps": {}}

    def _read_map(self, shard: int) -> Numbers:
        """Return the numbers that the samples of a shard have in the joined dataset."""
        numbers = self._maps.get(shard)
        if numbers is None:
            positions = read_positions(self.dataset.whole, int(self.shards[shard]))
            by_position = numbers_at(positions, int(self.first.inputs[shard]))
            numbers = by_position[read_positions(self.first, shard)]
            mean = max(1.0, float(self.first.inputs.mean()))
            most = max(KEPT, int(KEPT_NBYTES / (NBYTES * mean)))
            while len(self._maps) >= most:  # whatever other threads take out meanwhile
                self._maps.pop(next(iter([*self._maps])), None)
            self._maps[shard] = numbers
        return numbers

    def find_present(self) -> dict[int, NDArray[np.bool_]]:
        """Return masks of the samples that the joined dataset has too, by shard of the first.

        Shards without a mask have all their samples in both.
        """
        inputs, sizes = (c[self.shards] for c in (self.dataset.inputs, self.dataset.whole.sizes))
        is_less = (sizes < inputs) | (inputs < self.first.inputs)
        shards = np.flatnonzero((self.shards < 0) | is_less).tolist()

        def find(shard: int) -> NDArray[np.bool_]:
            if self.shards[shard] < 0:
                return np.zeros(int(self.first.sizes[shard]), np.bool_)
            return np.asarray(self._read_map(shard) != NOWHERE)

        masks = map_ahead(find, shards, self.dataset.store.readers)
        return dict(zip(shards, masks, strict=True))


def read_positions(dataset: Dataset, shard: int) -> NDArray[np.uint32]:
    """Return the positions of all samples of a shard in its image shard."""
    count = int(dataset.sizes[shard])
    if not dataset.moved[shard]:
        return plain_positions(count)
    store, inputs = dataset.store, int(dataset.inputs[shard])
    with naming_next_step(make_step(store.url, "latents", dataset.settings)):
        from wdsprep.tables.stored_tables import read_rows  # pyarrow, which few need

        name = dataset.names[shard]
        return read_rows(store, name, dataset.settings, samples=count, inputs=inputs)


def check_positions(dataset: Dataset, read: Ints) -> None:
    """Check that the positions in all shards can be found, except in the shards `read`.

    A shard passes if its samples did not move, or if its table is listed: one listing takes less
    time than reading all tables. Of the others the first is read, which raises the error.
    """
    unread = dataset.moved.copy()
    unread[read] = False
    if unread.any():
        listed = {entry.name for entry in dataset.store.list()}
        for shard in np.flatnonzero(unread).tolist():
            if table_name(dataset.names[shard]) not in listed:
                read_positions(dataset, shard)


def join_datasets(datasets: Iterable[Dataset]) -> tuple[Dataset, ...]:
    """Return the datasets joined with those that their `join` lists.

    Samples that a joined dataset lacks are left out, and tables in `join` are not joined here.
    Raise UsageError if datasets do not fit together.
    """
    opened: dict[str, tuple[Dataset, Manifest]] = {}
    joined: list[Dataset] = []
    for whole, of_whole in groupby(datasets, lambda dataset: dataset.whole):
        parts, places = [*of_whole], [place for place in whole.join if not is_table(place)]
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
    files, shapes = whole.files, np.zeros(len(whole.names), np.int64)
    for part in parts if files.kind == "latents" else ():
        if part.part_of is not None:
            shapes[part.selection.shards] += 1
    first = replace(files, moved=(files.sizes != files.inputs) | (shapes > 1))
    beside: list[tuple[JoinedDataset, tuple[Dataset, ...]]] = []
    known = {_canonical_place(whole.store)}
    for place in places:
        store = open_place(place)
        if (canonical := _canonical_place(store)) in known:
            raise UsageError(f"{place} is joined twice: name each dataset once")
        known.add(canonical)
        if store.url not in opened:
            manifest = read_manifest(store)
            if manifest is None or manifest.dataset != "latents":
                raise UsageError(
                    f"{place}{did_you_mean_place(place)} does not say which images its samples are "
                    'made of: join what "wdsprep encode" or "wdsprep score" has made'
                )
            dataset = dataset_from_manifest(store, manifest, StreamAmount())
            opened[store.url] = dataset, manifest
        beside.append(_match(whole, first, *opened[store.url]))
    left = []
    for part in _drop_lacking_samples(whole, parts, [other for other, _ in beside]):
        joined = tuple(
            replace(other, dataset=next(shape for shape in shapes if shape.size == part.size))
            if shapes
            else other
            for other, shapes in beside
        )
        left.append(replace(part, joined=joined))
    return left


def _canonical_place(store: Store) -> str:
    """Return the same text for all ways to write the place of a store."""
    return str(store.root.resolve()) if store.root else store.url


def _match(
    whole: Dataset, first: Dataset, dataset: Dataset, manifest: Manifest
) -> tuple[JoinedDataset, tuple[Dataset, ...]]:
    """Return a dataset joined to a whole one, and its parts of one shape each, if it has shapes.

    If both were cropped alike, a sample has the same shape in both. Raise UsageError if they have
    other shapes or are of other images.
    """
    shapes, url = shapes_of(manifest.settings), dataset.store.url
    inputs = image_counts(dataset, manifest)
    moved = dataset.sizes != inputs
    if shapes:
        if {*shapes_of(whole.settings)} != {*shapes}:
            raise UsageError(
                f"{url} has other shapes than {whole.store.url}, and a batch has one shape: load "
                "latents of many shapes first, and join datasets made with the same --shapes and "
                "--resolution"
            )
        counts = counts_by_shape(dataset, manifest)
        moved |= np.count_nonzero(counts, axis=1) > 1
    dataset = replace(dataset, inputs=inputs, moved=moved)
    parts = split_by_shape(dataset, shapes, counts) if shapes else ()
    source = dict(zip(*map(manifest.ledger.column, ("unit", "input")), strict=True))
    units = [*map(latent_unit, whole.names)]
    lacking = [name for name, unit in zip(whole.names, units, strict=True) if unit not in source]
    others = [
        name
        for name, unit, digest in zip(whole.names, units, whole.made_of, strict=True)
        if unit in source and image_shard_digest(source[unit]) != image_shard_digest(digest)
    ]
    maker = maker_of(manifest.dataset, manifest.settings)
    if others:
        raise UsageError(
            f"{url} and {whole.store.url} were made from different images in "
            f"{_name_shards(others)}: join datasets made from the same image shards; if they were "
            'packed again in between, run "wdsprep repair" on both with their images, then the '
            f'same "{maker}" again'
        )
    if lacking:
        raise UsageError(
            f"{url} has nothing of {_name_shards(lacking)}, which {whole.store.url} has: run the "
            f'same "{maker}" again, to its end, or load without them (buckets=)'
        )
    numbers = {latent_unit(name): number for number, name in enumerate(dataset.names)}
    shards = np.array([numbers.get(unit, -1) for unit in units], np.int64)
    has_other = shards >= 0
    moved_here = first.moved & has_other
    moved_here[has_other] |= moved[shards[has_other]]
    joined = JoinedDataset(first=first, dataset=dataset, shards=shards, moved=moved_here)
    return joined, parts


def _name_shards(shards: Sequence[str]) -> str:
    more = f" and {plural(len(shards) - 1, 'more shard')}" if len(shards) > 1 else ""
    return f"{shards[0]}{more}"


def _drop_lacking_samples(
    whole: Dataset, parts: list[Dataset], beside: list[JoinedDataset]
) -> list[Dataset]:
    """Return the parts of a dataset without the samples that a joined dataset lacks.

    The order is then that of a single dataset which holds just these samples. Raise an error if no
    sample is left, or if the positions of samples cannot be found.
    """
    keep: dict[int, NDArray[np.bool_]] = {}
    read: list[Ints] = []
    for joined in beside:
        present = joined.find_present()
        for shard, has in present.items():
            keep[shard] = keep[shard] & has if shard in keep else has
        shards = np.array([*present], np.int64)
        read.append(shards[joined.shards[shards] >= 0])
    check_positions(beside[0].first, np.concatenate(read))
    for joined, shards in zip(beside, read, strict=True):
        check_positions(joined.dataset, joined.shards[shards])
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
    counts = np.zeros((len(left), len(whole.names)), np.int32)
    for of_part, part in zip(counts, left, strict=True):
        of_part[part.selection.shards] = part.sizes
    total = counts.sum(axis=0)
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
        for of_part, part in zip(counts, left, strict=True)
    ]
