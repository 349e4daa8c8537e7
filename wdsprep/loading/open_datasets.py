"""Open the datasets that a loader is given: by their manifests, or other tars by a listing.

A dataset with shapes becomes several datasets, one for each shape. Receipts count how many samples
of each shape a shard holds.

Samples of a dataset are selected: those of a shape, of a condition, or of some shards. To the
order, each selection is a dataset of its own. Its digest says which samples it has and what they
were made of, not where they lie. So stored latents and latents made on the fly have the same order.

Which latents images will become on the fly is known before any image is opened. Squares of a
bucket's size are easy: every image of the bucket is large enough for one, so the samples are those
of the image shards. If squares are larger, if there are shapes, or if a crop may lose only so much,
the widths and heights in the tables of samples decide. They say which shape an image gets, or that
it is rejected, as `encode` would decide (`Shapes.fit`). They are read once, and two things are
kept: how many samples of each shard have which shape, and which samples these are. From there on
everything is as with stored latents.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsprep.dataset.damage import verify_step
from wdsprep.dataset.file_names import MANIFEST, index_name, latent_unit, maker_of
from wdsprep.dataset.kept_file import KeptWriter, open_or_make
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.random_numbers import Ints
from wdsprep.dataset.reindex import is_older, is_whole
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.sample_selection import (
    SampleSelection,
    ShardSamples,
    digest_of_selected,
    digest_of_shape,
    digest_of_shards,
    keep_selection,
)
from wdsprep.dataset.shapes import Size, buckets_encoded, shape_name, shapes_of
from wdsprep.dataset.stored_dataset import check_place, no_dataset_error, read_manifest
from wdsprep.errors import FormatError, UsageError
from wdsprep.images.nearest_shape import Shapes, cut_of
from wdsprep.loading.options import Places, Stream, Streams
from wdsprep.loading.order.mixing import StreamAmount
from wdsprep.loading.served_datasets import Dataset
from wdsprep.store import open_store
from wdsprep.store.base import RemoteStore, Store
from wdsprep.store.schemes import ANY_PLACE
from wdsprep.text import brief, command, plural

SIDES = ("width", "height")
NO_GROUP = -1
"""The number that stands for no group, as an image that is rejected has no shape."""
_log = logging.getLogger("wdsprep")


def join_places(join: Places) -> tuple[str, ...]:
    """Return the paths and URLs that `join` lists, as texts; raise UsageError for anything else."""
    places: list[Any] = [] if join is None else [join]
    if isinstance(join, Iterable) and not isinstance(join, str | os.PathLike):
        places = [*join]
    if wrong := [e for e in places if not isinstance(e, str | os.PathLike) or not os.fspath(e)]:
        raise UsageError(f"join={wrong[0]!r} is not a dataset: give paths or URLs")
    return tuple(str(os.fspath(place)) for place in places)


def as_streams(streams: Streams) -> list[Stream]:
    listed: list[Any] = [streams]
    if isinstance(streams, Iterable) and not isinstance(streams, str | bytes | Mapping):
        listed = list(streams)
    if not listed or not all(isinstance(s, str | os.PathLike | Stream) for s in listed):
        raise UsageError(
            f"{brief(streams)}: give datasets to load, as paths, URLs, or Stream(url, weight=...)"
        )
    return [stream if isinstance(stream, Stream) else Stream(stream) for stream in listed]


def open_place(place: "str | os.PathLike[str]") -> Store:
    """Open a place to load from. Raise UsageError for the web, which gives single files alone."""
    store = open_store(os.fspath(place))
    if store.root is None and not isinstance(store, RemoteStore):
        raise UsageError(f"{store.url} cannot be loaded: give {ANY_PLACE}")
    return store


def open_stream(
    stream: Stream, join: Places = (), *, has_states: bool = True
) -> tuple[Dataset, ...]:
    """Open the dataset of a stream. A dataset with shapes becomes one dataset for each shape.

    `join` lists what is to be joined to it beside what the stream lists.
    This takes one GET if there is a manifest, and a listing for tars of another program. Log a
    warning if the dataset is not complete, and a loader of it `has_states` to go on from.
    """
    store = open_place(stream.url)
    amount = StreamAmount(weight=stream.weight, repeat=stream.repeat, count=stream.count)
    chosen = [stream.buckets] if isinstance(stream.buckets, str | int) else stream.buckets
    buckets = None if chosen is None else frozenset(map(str, chosen))
    asked: dict[str, Any] = {
        "where": stream.where or "",
        "join": (*join_places(stream.join), *join_places(join)),
    }
    manifest = read_manifest(store)
    if manifest is None:
        return (replace(_dataset_from_tars(store, amount, buckets), **asked),)
    if has_states and not manifest.complete:
        later = "checkpoints made now will not resume once the dataset is complete"
        _log.warning("%s is not complete: %s", store.url, later)
    dataset = dataset_from_manifest(store, manifest, amount, buckets)
    if asked["join"]:
        inputs = image_counts(dataset, manifest) if dataset.kind == "latents" else dataset.sizes
        dataset = replace(dataset, inputs=inputs, **asked)
    else:
        dataset = replace(dataset, made_of=(), **asked)  # of many shards it takes much memory
    shapes = shapes_of(manifest.settings)
    if not shapes:
        return (dataset,)
    counts = counts_by_shape(dataset, manifest)
    del manifest  # of many shards it takes more memory than what follows
    return split_by_shape(dataset, shapes, counts)


def dataset_from_manifest(
    store: Store, manifest: Manifest, amount: StreamAmount, buckets: "frozenset[str] | None" = None
) -> Dataset:
    """Return the dataset that a manifest describes, or only its shards in these buckets.

    Raise UsageError if a bucket does not exist, or if there are no samples.
    """
    folders = {shard.name.partition("/")[0] for shard in manifest.shards}
    # For image shards, and if a receipt does not say it, the shard's own digest:
    made_of = {shard.name: shard.digest for shard in manifest.shards}
    if manifest.dataset == "latents":
        inputs = dict(zip(*map(manifest.ledger.column, ("unit", "input")), strict=True))
        made_of = {n: inputs.get(latent_unit(n)) or digest for n, digest in made_of.items()}
    shards = [s for s in manifest.shards if buckets is None or s.name.partition("/")[0] in buckets]
    if folders and buckets is not None and (not shards or buckets - folders):
        wrong = ", ".join(sorted(buckets - folders)) or "none"
        raise UsageError(
            f"{store.url} has the buckets {', '.join(sorted(folders))}: choose from these instead "
            f"of {wrong}"
        )
    if not any(shard.samples for shard in shards):
        maker = maker_of(manifest.dataset, manifest.settings)
        raise UsageError(
            f'{store.url} holds no samples: run the same "{maker}" again, to its end; if all were '
            f"rejected, {store.url}/rejects/ says why"
        )
    known = ((shard.name, shard.samples, made_of[shard.name]) for shard in shards)
    digest = digest_of_shards(known)  # before all else is made: of many shards it takes most memory
    sizes = np.array([shard.samples for shard in shards], np.int64)
    return Dataset(
        store=store,
        kind=manifest.dataset,
        names=tuple(shard.name for shard in shards),
        contents=tuple(shard.digest for shard in shards),
        selection=SampleSelection.all_of(sizes),
        nbytes=sum(shard.nbytes for shard in shards),
        digest=digest,
        amount=amount,
        settings=manifest.settings,
        made_of=tuple(made_of[shard.name] for shard in shards),
    )


def image_counts(latents: Dataset, manifest: Manifest) -> Ints:
    """Return the number of samples in the image shard of each shard of latents."""
    counts = dict(zip(*map(manifest.ledger.column, ("unit", "inputs")), strict=True))
    if strays := [name for name in latents.names if latent_unit(name) not in counts]:
        rebuild = command("rebuild", latents.store.url)
        raise FormatError(f"{latents.store.url} has no receipt of {strays[0]}: run {rebuild}")
    return np.array([counts[latent_unit(name)] for name in latents.names], np.int64)


def counts_by_shape(whole: Dataset, manifest: Manifest) -> "NDArray[np.int32]":
    """Return how many samples of each shape each shard has: one row for each shard.

    Raise FormatError if the counts of a shard do not add up to its samples.
    """
    shapes = [shape_name(size) for size in shapes_of(manifest.settings)]
    rows = {latent_unit(name): row for row, name in enumerate(whole.names)}
    counts = np.zeros((len(rows), len(shapes)), np.int32)
    columns = map(manifest.ledger.column, ("counts", "unit"))
    for counted, unit in zip(*columns, strict=True):
        if (row := rows.get(unit)) is not None:
            counts[row] = [counted.get(shape, 0) for shape in shapes]  # each is below 2^31
    del rows  # of many shards it takes more memory than what follows
    wrong = np.flatnonzero(counts.sum(axis=1) != whole.sizes)
    if len(wrong):
        raise FormatError(
            f"{whole.store.url}/{whole.names[wrong[0]]}: its shapes do not add up to its samples"
        ).with_next_step(verify_step(whole.store.url))
    return counts


def select_buckets(images: Dataset, buckets: Iterable[int], side: int) -> Dataset:
    """Return the images of these buckets, which are those for images of `side` pixels a side."""
    wanted = set(map(str, buckets))
    chosen = [n for n, name in enumerate(images.names) if name.partition("/")[0] in wanted]
    if not chosen:
        known = ", ".join(sorted({name.partition("/")[0] for name in images.names}))
        raise UsageError(
            f"{images.store.url}: no bucket to load ({known}) is for {side} pixels: give a smaller "
            "size, or load other buckets"
        )
    return select_shards(images, chosen)


def _dataset_from_tars(
    store: Store, amount: StreamAmount, buckets: "frozenset[str] | None"
) -> Dataset:
    """Return the dataset of tars without a manifest, from their listing alone.

    The length of an index says how many samples its tar holds. Raise UsageError if a tar has no
    complete index, and log a warning if a tar is newer than its index.
    """
    listed = {entry.name: entry for entry in store.list()}
    names = [n for n in listed if n.endswith(".tar")]
    check_place(store.url, listed)
    if not names:
        raise no_dataset_error(store.url, f"holds no dataset, neither {MANIFEST} nor tars")
    names = [n for n in names if buckets is None or n.partition("/")[0] in buckets]
    if not names:
        raise UsageError(f"{store.url} has no tars in {', '.join(sorted(buckets or ()))}")
    bare = [n for n in names if not is_whole(listed.get(index_name(n)))]
    if bare:
        raise UsageError(
            f"{store.url}/{bare[0]} has no complete index: run {command('index', store.url)} first"
        )
    old = [n for n in names if is_older(listed[index_name(n)], listed[n])]
    if old:
        what = f"{store.url}/{old[0]} is newer than its index"
        _log.warning("%s; if it was written again, run %s", what, command("index", store.url))
    sizes = [listed[index_name(name)].nbytes // 8 - 1 for name in names]
    if not any(sizes):
        raise UsageError(f"{store.url} holds no samples, as its tars are empty: give another place")
    nbytes = [listed[name].nbytes for name in names]
    return Dataset(
        store=store,
        kind="tars",
        names=tuple(names),
        contents=tuple(f"{store.url}/{n} {listed[n].stamp} {listed[n].nbytes}" for n in names),
        selection=SampleSelection.all_of(np.array(sizes, np.int64)),
        nbytes=sum(nbytes),
        digest=digest_of_shards(zip(names, sizes, nbytes, strict=True)),
        amount=amount,
    )


def split_by_shape(
    whole: Dataset,
    shapes: Sequence[Size],
    counts: NDArray[np.int32],
    selection: SampleSelection | None = None,
) -> tuple[Dataset, ...]:
    """Return a dataset for each shape that has samples.

    `counts` has a row for each shard, or for each run of `selection`: how many samples of each
    shape stand in it, one shape after another.
    """
    parts = (selection or whole.selection).split(counts)
    return tuple(
        _with_selection(
            whole, part, digest_of_shape(whole.digest, shape_name(size), of_shape), size
        )
        for size, of_shape, part in zip(shapes, counts.T, parts, strict=True)
        if len(part.shards)
    )


def select_shards(dataset: Dataset, shards: Iterable[int]) -> Dataset:
    """Return a dataset of these shards only."""
    numbers = list(map(int, shards))
    names, contents = (
        tuple(column[n] for n in numbers) for column in (dataset.names, dataset.contents)
    )
    made_of = tuple(dataset.made_of[n] for n in numbers) if dataset.made_of else ()
    sizes = dataset.sizes[numbers]
    return replace(
        dataset,
        names=names,
        selection=SampleSelection.all_of(sizes),
        contents=contents,
        made_of=made_of,
        inputs=dataset.inputs[numbers] if len(dataset.inputs) else dataset.inputs,
        nbytes=round(dataset.nbytes * (int(sizes.sum()) / dataset.samples)),
        digest=digest_of_shards(zip(names, sizes.tolist(), contents, strict=True)),
    )


def select(dataset: Dataset, keep: SampleSelection) -> Dataset | None:
    """Return the samples of a dataset that `keep` selects, or None if there are none.

    `keep` has a run for each shard of `dataset.whole`, with the numbers of samples in the tar.
    """
    selection = dataset.selection
    left = selection.intersect(keep)
    if not left.samples:
        return None
    digest = digest_of_selected(dataset.digest, selection, left, len(dataset.names))
    return _with_selection(dataset, left, digest, dataset.size)


def _with_selection(
    dataset: Dataset, selection: SampleSelection, digest: str, size: Size | None = None
) -> Dataset:
    """Return the part of a dataset that a selection keeps, with the same part of its images."""
    images = dataset.images
    return replace(
        dataset,
        selection=selection,
        nbytes=round(dataset.nbytes * (selection.samples / dataset.samples)),
        digest=digest,
        size=size,
        part_of=dataset.whole,
        images=None if images is None else _with_selection(images, selection, digest, size),
    )


def find_latent_shapes(
    images: Dataset, settings: Mapping[str, Any], folder: Path | None
) -> tuple[Dataset, ...]:
    """Return the latents that images will become: a dataset for each of their shapes.

    If all are squares, that is a single dataset. Images whose size `encode` would reject are left
    out, and a warning counts them.
    """
    if images.kind != "images":
        raise UsageError(
            f"{images.store.url} holds {images.kind}: encode= is for image shards that "
            '"wdsprep pack" has made'
        )
    buckets = buckets_encoded(settings, images.settings["buckets"])
    chosen = select_buckets(images, buckets, settings["resolution"])
    shapes, cut = shapes_of(settings), cut_of(settings)
    smallest = min(int(name.partition("/")[0]) for name in chosen.names)
    if not shapes and settings.get("max_crop", 1.0) == 1 and smallest >= settings["resolution"]:
        # every image is large enough for the square
        return (replace(chosen, kind="latents", settings=settings, images=chosen),)
    what = "shapes", *chosen.names, *chosen.contents, repr(cut)
    kept = open_or_make(folder, what, lambda writer, path: _keep_shapes(chosen, cut, writer, path))
    counts = kept.arrays["counts"].reshape(len(chosen.names), -1)
    if not counts.any():
        raise UsageError(
            f"all images of {images.store.url} are too small or would lose too much: choose a "
            "lower resolution, other shapes, a greater max_crop or upscale"
        )
    if rejected := chosen.samples - int(counts.sum()):
        _log.warning(
            "%s: left out %s, too small (upscale= takes some) or to be cut by more than max_crop",
            *(images.store.url, plural(rejected, "image")),
        )
    left = np.flatnonzero(counts.any(axis=1)).astype(np.int32)
    counts, chosen = counts[left], select_shards(chosen, left)
    sizes = counts.sum(axis=1, dtype=np.int64)
    whole = replace(
        chosen,
        kind="latents",
        selection=SampleSelection.all_of(sizes),
        digest=digest_of_shards(zip(chosen.names, sizes.tolist(), chosen.contents, strict=True)),
        settings=settings,
        images=chosen,
    )
    fitting = SampleSelection.from_file(kept).pick(left)
    fitting = replace(fitting, shards=np.arange(len(left), dtype=np.int32))
    if shapes:
        return split_by_shape(whole, shapes[: counts.shape[1]], counts, fitting)
    return (_with_selection(whole, replace(fitting, counts=sizes), whole.digest),)


def _keep_shapes(images: Dataset, cut: Shapes, writer: KeptWriter, path: Path) -> None:
    """Write which images get which shape, shard by shard."""
    from wdsprep.loading.dataset_tables import open_tables  # pyarrow and DuckDB, which few need

    count, shapes = plural(images.samples, "image"), ", ".join(map(shape_name, cut.sizes))
    reading = "%s: reading the sizes of %s for %s; their shapes are kept in %s"
    _log.info(reading, images.store.url, count, shapes, path)

    @lru_cache(1 << 16)
    def shape_number(size: Size) -> int:
        try:
            fit = cut.fit(*size) if min(size) > 0 else None  # 0 if the table lacks it
        except RejectedError:
            fit = None
        return NO_GROUP if fit is None else cut.sizes.index((fit.width, fit.height))

    def find_shapes() -> Iterator[Iterator[int]]:
        for table in open_tables(images).read(lambda file: file.read(SIDES)):
            sides = ([length or 0 for length in table[side].to_pylist()] for side in SIDES)
            yield map(shape_number, zip(*sides, strict=True))

    keep_groups(writer, len(images.names), find_shapes())


def keep_groups(writer: KeptWriter, shards: int, groups: Iterable[Iterable[int]]) -> None:
    """Write the samples of each shard, one group after another, and the sizes of its groups.

    `groups` has for each shard the number of each sample's group; samples of NO_GROUP are left out.
    """
    counts: list[Ints] = []

    def sort_by_group() -> Iterator[ShardSamples]:
        for shard, of_samples in enumerate(groups):
            numbers = np.fromiter(of_samples, np.int64)
            by_group = np.argsort(numbers, kind="stable")[np.count_nonzero(numbers == NO_GROUP) :]
            counts.append(np.bincount(numbers[by_group]))
            yield ShardSamples(shard, by_group.astype(np.uint32))

    keep_selection(writer, shards, sort_by_group())
    most = max(map(len, counts), default=0)
    writer.add("counts", "<i4", (np.pad(row, (0, most - len(row))) for row in counts))
