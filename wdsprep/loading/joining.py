"""Datasets beside each other: the arrays of several, of the same samples.

All that is made of one image shard has its name and its order, so nothing is searched: the shards
of two datasets are matched by name, and a sample is found by its *position*, its number in the
image shard. Rejects and shapes move samples; then the rows beside a shard say the positions of
those in it (`wdsprep.dataset.rows`).

Receipts say which image shard each unit was made of, and how many of its samples there are. So all
that can be wrong is told before the first step, from the manifests alone, and what a joined dataset
lacks leaves the order. Of shards with rejects the rows are read for that.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsprep.dataset.ahead import ahead, read_each
from wdsprep.dataset.chance import Ints
from wdsprep.dataset.damage import naming_next_step
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.names import (
    latent_shard,
    latent_unit,
    maker_of,
    rows_name,
)
from wdsprep.dataset.receipts import Receipt
from wdsprep.dataset.reindex import encode_step, positions_without_rows, read_rows
from wdsprep.dataset.rows import NBYTES, NOWHERE, ImagePositions
from wdsprep.dataset.shapes import Size, shapes_of
from wdsprep.dataset.state import read_manifest
from wdsprep.errors import UsageError
from wdsprep.loading.catalog import Dataset, counts_by_shape, of_manifest
from wdsprep.loading.order.mixing import Want
from wdsprep.loading.parts import (
    Numbers,
    Positions,
    chosen,
    digest_of_shards,
    in_shapes,
    of_shape,
)
from wdsprep.loading.tables import is_table
from wdsprep.store import open_store
from wdsprep.store.base import Store
from wdsprep.text import plural

KEPT_NBYTES = 32 << 20
"""Of the rows that are kept of each joined dataset: 8 million samples, in far more shards than a
step has samples of."""
KEPT = 512
"""Shards whose rows are kept at least, however large."""
FEW_SHARDS = 16
"""So many at most are read one by one: threads would cost more."""
"""Shards whose rows are read one after another; more are read in threads."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DatasetPositions:
    """The positions of the samples of a dataset. `moved` says of which shards they are read."""

    dataset: Dataset
    inputs: Ints
    moved: NDArray[np.bool_]

    @classmethod
    def of(
        cls, dataset: Dataset, inputs: Ints, parts: Sequence[Dataset] = ()
    ) -> "DatasetPositions":
        """A shard of one shape has its samples in the order of the images."""
        shapes = tuple(part.part for part in parts if part.part is not None)
        count = np.zeros(len(dataset.names), np.int64)
        for shape in shapes:
            count[shape.shards] += 1
        moved = (dataset.sizes != inputs) | (count > 1)
        return cls(dataset=dataset, inputs=inputs, moved=moved)

    def read(self, shard: int) -> ImagePositions:
        """Return the positions of all samples of a shard."""
        count = int(self.dataset.sizes[shard])
        if not self.moved[shard]:
            return ImagePositions.plain(count)
        store, name = self.dataset.store, self.dataset.names[shard]
        with naming_next_step(encode_step(store.url)):
            found = read_rows(store, name, count, int(self.inputs[shard]))
            if found is None:
                receipt = self._receipts[latent_unit(name)]
                return positions_without_rows(store, receipt, every_key=False)
        return found

    @cached_property
    def _receipts(self) -> Mapping[str, Receipt]:
        """By unit; wanted only where rows are missing."""
        manifest = read_manifest(self.dataset.store)
        return {receipt.unit: receipt for receipt in manifest.receipts} if manifest else {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_receipts"}

    def check(self, read: Ints) -> None:
        """Refuse shards whose rows are missing, but for those that have been read: by a listing,
        which takes less than reading all."""
        unread = self.moved.copy()
        unread[read] = False
        if not unread.any():
            return
        there = {entry.name for entry in self.dataset.store.list() if entry.name.endswith(".rows")}
        names = self.dataset.names
        missing = [n for n in np.flatnonzero(unread).tolist() if rows_name(names[n]) not in there]
        read_each(self.read, missing, self.dataset.store.readers)


@dataclass(frozen=True, kw_only=True, eq=False)
class Joined:
    """A dataset beside another one: which of its shards belongs to each of the other's (-1: none),
    and where the samples of both are in their image shards. `parts` are its shapes, of which
    `dataset` is one where it stands beside one."""

    dataset: Dataset
    shards: Ints
    first: DatasetPositions
    rows: DatasetPositions
    parts: tuple[Dataset, ...] = ()
    _maps: dict[int, Numbers] = field(default_factory=dict, repr=False)

    def in_shape(self, size: Size | None) -> "Joined":
        """The same beside samples of one shape, which have it here too."""
        if not self.parts:
            return self
        return replace(self, dataset=next(part for part in self.parts if part.size == size))

    def located(self, shards: Ints, indices: Ints) -> tuple[Ints, Ints]:
        """Where the samples are that stand beside these, by the numbers of shards and of samples in
        their tars."""
        own, places = self.shards[shards], indices
        is_moved = self._moved[shards]
        if is_moved.any():
            places = indices.copy()
            maps = self._maps_of(np.unique(shards[is_moved]).tolist())
            for shard in maps:
                here = shards == shard
                places[here] = maps[shard][indices[here]]
        return own, places

    @cached_property
    def _moved(self) -> NDArray[np.bool_]:
        """The shards in which a sample may stand elsewhere than beside the other."""
        moved: NDArray[np.bool_] = self.first.moved | self.rows.moved[self.shards]
        return moved

    def __getstate__(self) -> dict[str, Any]:
        """Whoever else needs rows reads them."""
        return {**self.__dict__, "_maps": {}}

    def _maps_of(self, shards: Sequence[int]) -> dict[int, Numbers]:
        """Many are read in threads."""
        if sum(shard not in self._maps for shard in shards) <= FEW_SHARDS:
            return {shard: self._map(shard) for shard in shards}
        maps = read_each(self._map, shards, self.dataset.store.readers)
        return dict(zip(shards, maps, strict=True))

    @cached_property
    def _most(self) -> int:
        """The shards whose maps are kept."""
        mean = max(1.0, float(self.first.inputs.mean()))
        return max(KEPT, int(KEPT_NBYTES / (NBYTES * mean)))

    def _map(self, shard: int) -> Numbers:
        found = self._maps.get(shard)
        if found is None:
            found = self._made(shard)
            while len(self._maps) >= self._most:  # whatever other threads take out meanwhile
                self._maps.pop(next(iter([*self._maps])), None)
            self._maps[shard] = found
        return found

    def _made(self, shard: int) -> Numbers:
        own = self.rows.read(int(self.shards[shard]))
        numbers = own.numbers(int(self.first.inputs[shard]))
        return numbers[self.first.read(shard).positions]

    def lacks(self) -> Ints:
        """The shards of the other of which something may not be here."""
        own, inputs = self.shards, self.rows.inputs[self.shards]
        is_less = (self.rows.dataset.sizes[own] < inputs) | (inputs < self.first.inputs)
        return np.flatnonzero((own < 0) | is_less)

    def has(self, shard: int) -> NDArray[np.bool_]:
        """Of each sample of a shard of the other, whether it is here."""
        if self.shards[shard] < 0:
            return np.zeros(int(self.first.dataset.sizes[shard]), np.bool_)
        has: NDArray[np.bool_] = self._map(shard) != NOWHERE
        return has


def joined(datasets: Iterable[Dataset]) -> tuple[Dataset, ...]:
    """The same with what is to stand beside them, without the samples that one of these lacks."""
    opened: dict[str, tuple[Dataset, Manifest]] = {}
    by_whole: dict[Dataset, list[Dataset]] = {}
    for dataset in datasets:
        by_whole.setdefault(dataset.whole, []).append(dataset)
    found: list[Dataset] = []
    for whole, parts in by_whole.items():
        places = [place for place in whole.join if not is_table(place)]
        found += _joined(whole, parts, places, opened) if places else parts
    return tuple(found)


def _joined(
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
    first = DatasetPositions.of(files, files.inputs, parts if files.kind == "latents" else ())
    beside: list[Joined] = []
    for place in places:
        store = open_store(place)
        url = store.url
        others = whole, *(each.dataset for each in beside)
        if _place_of(store) in {_place_of(other.store) for other in others}:
            raise UsageError(f"{place} is joined twice: name each dataset once")
        if url not in opened:
            opened[url] = _opened(place)
        beside.append(_matched(first, *opened[url], _in_shapes_of(whole, *opened[url])))
    left = _without_lacking(whole, parts, beside)
    return [
        replace(part, joined=tuple(each.in_shape(part.size) for each in beside)) for part in left
    ]


def _place_of(store: Store) -> str:
    """One for all ways to write it."""
    return str(store.root.resolve()) if store.root else store.url


def _opened(place: str) -> tuple[Dataset, Manifest]:
    store = open_store(place)
    manifest = read_manifest(store)
    if manifest is None:
        raise UsageError(
            f"{place} holds no dataset of ours, so nothing says which images it is of: join what "
            '"wdsprep encode" has made'
        )
    if manifest.dataset != "latents":
        raise UsageError(f"{place} holds {manifest.dataset}: join latents, or text by itself")
    return of_manifest(store, manifest, Want()), manifest


def _in_shapes_of(whole: Dataset, dataset: Dataset, manifest: Manifest) -> tuple[Dataset, ...]:
    """The shapes of a dataset, which samples have alike where both were cut alike."""
    shapes, url = shapes_of(manifest.settings), dataset.store.url
    if not shapes:
        return ()
    if not (known := shapes_of(whole.settings)):
        raise UsageError(
            f"{url} has latents of many shapes, which give the order: load it first, and join "
            "the others to it"
        )
    if {*known} != {*shapes}:
        raise UsageError(
            f"{url} has other shapes than {whole.store.url}, and a batch has one: join what was "
            "made with the same --shapes and --resolution"
        )
    return in_shapes(dataset, shapes, counts_by_shape(dataset, manifest))


def _matched(
    first: DatasetPositions, dataset: Dataset, manifest: Manifest, parts: tuple[Dataset, ...]
) -> Joined:
    whole, url = first.dataset, dataset.store.url
    ledger = manifest.ledger
    known = dict(zip(ledger.units(), ledger.column("inputs"), strict=True))
    source = dict(zip(map(latent_shard, known), ledger.column("input"), strict=True))
    lacking = [name for name in whole.names if name not in source]
    if lacking:
        raise UsageError(_unfinished(whole, url, lacking, manifest))
    others = [
        name
        for name, made_of in zip(whole.names, whole.made_of, strict=True)
        if _image_shard(source[name]) != _image_shard(made_of)
    ]
    if len(others) == len(whole.names):
        raise UsageError(
            f"{url} and {whole.store.url} are of different images: join what was made of the same "
            "image shards"
        )
    if others:
        raise UsageError(
            f"{url} and {whole.store.url} are of different images in {_shown(others)}: these were "
            'packed anew in between: run "wdsprep repair" on both with their images, then the '
            f'"{maker_of(manifest.dataset, manifest.settings)}" that they are from'
        )
    numbers = {name: number for number, name in enumerate(dataset.names)}
    shards = np.array([numbers.get(name, -1) for name in whole.names], np.int64)
    inputs = np.array([known[latent_unit(name)] for name in dataset.names], np.int64)
    rows = DatasetPositions.of(dataset, inputs, parts)
    return Joined(dataset=dataset, shards=shards, first=first, rows=rows, parts=parts)


def _image_shard(source: str) -> str:
    """Of which shard something was made, be it of its first samples alone."""
    return source.partition(":")[0]


def _unfinished(whole: Dataset, url: str, lacking: Sequence[str], manifest: Manifest) -> str:
    what = f"{url} has nothing of {_shown(lacking)}, which {whole.store.url} has"
    if manifest.complete:
        return f"{what}: make it with --resolution as small, or load without them (buckets=)"
    maker = maker_of(manifest.dataset, manifest.settings)
    return f'{what}: it is not complete: run the same "{maker}" again, to its end'


def _shown(shards: Sequence[str]) -> str:
    more = f" and {plural(len(shards) - 1, 'more shard')}" if len(shards) > 1 else ""
    return f"{shards[0]}{more}"


def _without_lacking(whole: Dataset, parts: list[Dataset], beside: list[Joined]) -> list[Dataset]:
    """Those parts, without what is not in every joined dataset."""
    keep = _kept(beside)
    if all(has.all() for has in keep.values()):
        return parts
    numbers = Positions.of(
        np.flatnonzero(keep.get(shard, np.ones(size, np.bool_))).astype(np.uint32)
        for shard, size in enumerate(whole.files.sizes.tolist())
    )
    left = [made for part in parts if (made := chosen(part, numbers)) is not None]
    if not left:
        places = " and ".join(each.dataset.store.url for each in beside)
        raise UsageError(f"no sample of {whole.store.url} is in {places}: all were rejected there")
    return _as_one(whole, left)


def _kept(beside: list[Joined]) -> dict[int, NDArray[np.bool_]]:
    """By shard of which something may be lacking, which of its samples all have."""
    keep: dict[int, NDArray[np.bool_]] = {}
    lacks = [each.lacks() for each in beside]
    for each, shards in zip(beside, lacks, strict=True):
        found = ahead(each.has, shards.tolist(), each.dataset.store.readers)
        for shard, has in zip(shards.tolist(), found, strict=True):
            keep[shard] = keep[shard] & has if shard in keep else has
    read = [shards[each.shards[shards] >= 0] for each, shards in zip(beside, lacks, strict=True)]
    beside[0].first.check(np.concatenate(read))
    for each, own in zip(beside, read, strict=True):
        each.rows.check(each.shards[own])
    return keep


def _as_one(whole: Dataset, parts: list[Dataset]) -> list[Dataset]:
    """With the digests that one dataset would have which holds what all of them have, so that the
    order is the same."""
    counts = [np.zeros(len(whole.names), np.int32) for _ in parts]
    for own, dataset in zip(counts, parts, strict=True):
        if dataset.part is not None:
            own[dataset.part.shards] = dataset.sizes
    total = np.sum(counts, axis=0)
    there = np.flatnonzero(total)
    lines = ((whole.names[n], int(total[n]), whole.made_of[n]) for n in there.tolist())
    digest = digest_of_shards(lines)
    return [
        replace(
            dataset,
            digest=digest if dataset.size is None else of_shape(digest, dataset.size, own[there]),
        )
        for own, dataset in zip(counts, parts, strict=True)
    ]
