"""Join datasets of the same images: a batch then has the arrays of all of them.

Everything that is made of one image shard has its name and its order, so nothing is searched.
Shards are matched by name, and samples by their positions in the image shard (`joined_positions`).

Receipts say which image shard each unit was made from, and how many samples that has. So the
manifests alone tell every fault of a join before the first step. Samples that a joined dataset
lacks leave the order. To find them, the rows of shards with rejects are read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from wdsprep.dataset.file_names import latent_unit, maker_of
from wdsprep.dataset.manifest import Manifest, image_shard_digest
from wdsprep.dataset.random_numbers import Ints
from wdsprep.dataset.sample_selection import SampleSelection, digest_of_shape, digest_of_shards
from wdsprep.dataset.shapes import shape_name, shapes_of
from wdsprep.dataset.stored_dataset import read_manifest
from wdsprep.errors import UsageError
from wdsprep.loading.joined_positions import DatasetPositions, JoinPositions
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
    beside: list[tuple[JoinedDataset, tuple[Dataset, ...]]] = []
    known = {_canonical_place(whole.store)}
    for place in places:
        store = open_store(place)
        if (canonical := _canonical_place(store)) in known:
            raise UsageError(f"{place} is joined twice: name each dataset once")
        known.add(canonical)
        if store.url not in opened:
            manifest = read_manifest(store)
            if manifest is None:
                raise UsageError(
                    f"{place} was not made by wdsprep, so nothing says which images it belongs to: "
                    'join what "wdsprep encode" has made'
                )
            if manifest.dataset != "latents":
                raise UsageError(
                    f"{place} holds {manifest.dataset}: join a dataset of latents or of texts"
                )
            dataset = dataset_from_manifest(store, manifest, StreamAmount())
            opened[store.url] = dataset, manifest
        beside.append(_match(whole, first, *opened[store.url]))
    left = []
    for part in _drop_lacking_samples(whole, parts, [other for other, _ in beside]):
        joined = tuple(
            other._replace(dataset=next(shape for shape in shapes if shape.size == part.size))
            if shapes
            else other
            for other, shapes in beside
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


def _match(
    whole: Dataset, first: DatasetPositions, dataset: Dataset, manifest: Manifest
) -> tuple[JoinedDataset, tuple[Dataset, ...]]:
    """Return a dataset joined to a whole one, and its parts of one shape each, if it has shapes.

    If both were cropped alike, a sample has the same shape in both. Raise UsageError if they have
    other shapes or are of other images.
    """
    shapes, url = shapes_of(manifest.settings), dataset.store.url
    parts: tuple[Dataset, ...] = ()
    if shapes:
        known_shapes = shapes_of(whole.settings)
        if not known_shapes:
            raise UsageError(
                f"{url} has latents of many shapes, which decide the order: load it first, "
                "and join the others to it"
            )
        if {*known_shapes} != {*shapes}:
            raise UsageError(
                f"{url} has other shapes than {whole.store.url}, and a batch has one shape: join "
                "datasets made with the same --shapes and --resolution"
            )
        parts = split_by_shape(dataset, shapes, counts_by_shape(dataset, manifest))
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
    other = _make_positions(dataset, inputs, parts)
    return JoinedDataset(dataset, JoinPositions(shards=shards, first=first, other=other)), parts


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
    for _, positions in beside:
        present = positions.find_present()
        for shard, has in present.items():
            keep[shard] = keep[shard] & has if shard in keep else has
        shards = np.array([*present], np.int64)
        read.append(shards[positions.shards[shards] >= 0])
    beside[0].positions.first.check(np.concatenate(read))
    for (_, positions), shards in zip(beside, read, strict=True):
        positions.other.check(positions.shards[shards])
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
