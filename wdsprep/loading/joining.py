"""Datasets beside each other: the arrays of several, of the same samples.

All that is made of one image shard has its name and its order, so nothing is searched: the shards
of two datasets are matched by name, and a sample is found by its *position*, its number in the
image shard. Rejects and shapes move samples; then the rows beside a shard say the positions of
those in it (`wdsprep.dataset.rows`).

Receipts say which image shard each unit was made of, and how many of its samples there are. So all
that can be wrong is told before the first step, from the manifests alone, and what a joined dataset
lacks leaves the order. Of shards with rejects the rows are read for that.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.names import index_name, latent_shard, rejects_name
from wdsprep.dataset.rejects import read_rejects
from wdsprep.dataset.rows import rows_name, rows_of
from wdsprep.dataset.samples import key_order
from wdsprep.dataset.shapes import shapes_of
from wdsprep.dataset.state import READERS, read_manifest
from wdsprep.dataset.tar.index import decode_index
from wdsprep.errors import FormatError, NotFoundError, UsageError
from wdsprep.loading.catalog import Dataset, digest_of, of_manifest
from wdsprep.loading.order.chance import Ints
from wdsprep.loading.order.mixing import Want
from wdsprep.loading.parts import Numbers, Positions, chosen, of_shape
from wdsprep.store import open_store
from wdsprep.text import command, plural

KEPT = 512
"""Shards whose rows are kept; the samples that are read at a time lie in fewer."""
NOWHERE = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Of the samples of a dataset, their positions. `moved` says of which shards it has to be
    read."""

    dataset: Dataset
    inputs: Ints
    moved: NDArray[np.bool_]

    @classmethod
    def of(cls, dataset: Dataset, inputs: Ints) -> "Rows":
        has_shapes = bool(shapes_of(dataset.settings)) and dataset.kind == "latents"
        moved = (dataset.sizes != inputs) | has_shapes
        return cls(dataset=dataset, inputs=inputs, moved=moved)

    def read(self, shard: int) -> Numbers:
        """The positions of all samples of a shard."""
        count = int(self.dataset.sizes[shard])
        if not self.moved[shard]:
            return np.arange(count, dtype=np.uint32)
        store, tar = self.dataset.store, self.dataset.names[shard]
        name = rows_name(tar)
        try:
            rows = rows_of(store.read(name), f"{store.url}/{name}")
        except NotFoundError:
            if not self._ends_with_rejects(shard):
                raise UsageError(
                    f"{store.url}/{name} is missing, which says what image each sample is of: run "
                    f"{command('index', store.url)}"
                ) from None
            rows = np.arange(count, dtype=np.uint32)
        is_sound = len(rows) == count and rows.max(initial=0) < self.inputs[shard]
        if not is_sound or len(np.unique(rows)) < count:
            raise FormatError(
                f"{store.url}/{name} is damaged: delete it and run {command('index', store.url)}"
            )
        return rows

    def _ends_with_rejects(self, shard: int) -> bool:
        """Whether all that was rejected stood behind the samples of the shard, so that none of them
        moved and nothing was written of it."""
        if shapes_of(self.dataset.settings):
            return False
        store, tar = self.dataset.store, self.dataset.names[shard]
        try:
            rejects = read_rejects(store.read(rejects_name(tar.removesuffix(".tar"))))
            offsets = decode_index(store.read(index_name(tar)), f"{store.url}/{index_name(tar)}")
        except (NotFoundError, ValueError):
            return False
        name = (
            store.read(tar, start=offsets[-2], nbytes=100).rstrip(b"\0").decode("utf-8", "replace")
        )
        last = key_order(name.partition(".")[0])
        return all(key_order(reject.key) > last for reject in rejects)

    def sample(self) -> list[int]:
        """Shards of which to see beforehand that the rows are there. Where all have some, one tells
        of all."""
        rejected = np.flatnonzero(self.dataset.sizes < self.inputs)
        return sorted({*np.flatnonzero(self.moved)[:1].tolist(), *rejected.tolist()})


@dataclass(frozen=True, kw_only=True, eq=False)
class Joined:
    """A dataset beside another one: which of its shards belongs to each of the other's (-1: none),
    and where the samples of both are in their image shards."""

    dataset: Dataset
    shards: Ints
    first: Rows
    rows: Rows
    _maps: dict[int, Numbers] = field(default_factory=dict, repr=False)

    def located(self, shards: Ints, indices: Ints) -> tuple[Ints, Ints]:
        """Where the samples are that stand beside these, by the numbers of shards and of samples in
        their tars."""
        own, places = self.shards[shards], indices
        is_moved = self.first.moved[shards] | self.rows.moved[own]
        if is_moved.any():
            places = indices.copy()
            for shard in np.unique(shards[is_moved]).tolist():
                here = shards == shard
                places[here] = self._map(shard)[indices[here]]
        return own, places

    def _map(self, shard: int) -> Numbers:
        found = self._maps.get(shard)
        if found is None:
            found = self._made(shard)
            while len(self._maps) >= KEPT:  # whatever other threads take out meanwhile
                self._maps.pop(next(iter([*self._maps])), None)
            self._maps[shard] = found
        return found

    def _made(self, shard: int) -> Numbers:
        numbers = np.full(int(self.first.inputs[shard]), NOWHERE)
        rows = self.rows.read(int(self.shards[shard]))
        inside = rows < len(numbers)
        numbers[rows[inside]] = np.flatnonzero(inside)
        return numbers[self.first.read(shard)]

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
        found += _joined(whole, parts, opened) if whole.join else parts
    return tuple(found)


def _joined(
    whole: Dataset, parts: list[Dataset], opened: dict[str, tuple[Dataset, Manifest]]
) -> list[Dataset]:
    if whole.kind == "tars":
        raise UsageError(
            f"{whole.store.url} holds tars without a manifest, and nothing says which images they "
            "are of: leave out join="
        )
    first = Rows.of(whole, whole.inputs)
    beside: list[Joined] = []
    for place in whole.join:
        url = open_store(place).url
        if url == whole.store.url or url in {each.dataset.store.url for each in beside}:
            raise UsageError(f"{place} is joined twice: name each dataset once")
        if url not in opened:
            opened[url] = _opened(place)
        beside.append(_matched(first, *opened[url]))
    left = _without_lacking(whole, parts, beside)
    return [replace(part, joined=tuple(beside)) for part in left]


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
    if shapes_of(manifest.settings):
        raise UsageError(
            f"{place} has latents of many shapes, which give the order: load it first, and join "
            "the others to it"
        )
    return of_manifest(store, manifest, Want()), manifest


def _matched(first: Rows, dataset: Dataset, manifest: Manifest) -> Joined:
    whole, url = first.dataset, dataset.store.url
    ledger = manifest.ledger
    known = dict(zip(ledger.units(), ledger.column("inputs"), strict=True))
    source = dict(zip(map(latent_shard, known), ledger.column("input"), strict=True))
    lacking = [name for name in whole.names if name not in source]
    if lacking:
        raise UsageError(_unfinished(whole, url, lacking, is_complete=manifest.complete))
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
            '"wdsprep encode" that they are from'
        )
    numbers = {name: number for number, name in enumerate(dataset.names)}
    shards = np.array([numbers.get(name, -1) for name in whole.names], np.int64)
    inputs = np.array([known[name.removesuffix(".tar")] for name in dataset.names], np.int64)
    return Joined(dataset=dataset, shards=shards, first=first, rows=Rows.of(dataset, inputs))


def _image_shard(source: str) -> str:
    """Of which shard something was made, be it of its first samples alone."""
    return source.partition(":")[0]


def _unfinished(whole: Dataset, url: str, lacking: Sequence[str], *, is_complete: bool) -> str:
    what = f"{url} has nothing of {_shown(lacking)}, which {whole.store.url} has"
    if is_complete:
        return f"{what}: make it with --resolution as small, or load without them (buckets=)"
    return f'{what}: it is not complete: run the same "wdsprep encode" again, to its end'


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
        for shard, size in enumerate(whole.sizes.tolist())
    )
    left = [made for part in parts if (made := chosen(part, numbers)) is not None]
    if not left:
        places = " and ".join(each.dataset.store.url for each in beside)
        raise UsageError(f"no sample of {whole.store.url} is in {places}: all were rejected there")
    is_plain = all(part.part is None or part.part.positions is None for part in parts)
    return _as_one(whole, left) if is_plain else left


def _kept(beside: list[Joined]) -> dict[int, NDArray[np.bool_]]:
    """By shard of which something may be lacking, which of its samples all have."""
    keep: dict[int, NDArray[np.bool_]] = {}
    with ThreadPoolExecutor(READERS) as readers:
        for each in beside:
            shards = each.lacks().tolist()
            for shard, has in zip(shards, readers.map(each.has, shards), strict=True):
                keep[shard] = keep[shard] & has if shard in keep else has
        for rows in (beside[0].first, *(each.rows for each in beside)):
            for _ in readers.map(rows.read, rows.sample()):
                pass
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
    digest = digest_of(lines)
    return [
        replace(
            dataset,
            digest=digest if dataset.size is None else of_shape(digest, dataset.size, own[there]),
        )
        for own, dataset in zip(counts, parts, strict=True)
    ]
