"""What a loader is given, and what a dataset holds: its shards, their sizes, a digest, the layout.

A dataset is known by what its shards hold, never by where it lies, so a state of the loader
outlives a move to another disk or bucket. Tars without a manifest are known by names and sizes.

Latent shards are known by the image shards they were made of, and by how many samples these gave.
Both are known before anything is encoded, so latents that are made on the way to the trainer come
in the order of those that are stored, as long as encoding rejects nothing. How they were made, the
settings say: a state carries their fingerprint.

A dataset with shapes becomes several, one for each of its shapes, whose sizes say how many samples
of it each shard has: receipts count them. So the order knows nothing of shapes; a place in it is a
shard and a number among those of the shape, and `Dataset.located` says where that is in the tar.
The same holds for other parts of a dataset (`parts`).
"""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsprep.dataset.arrays import LATENT, Field, fields_of
from wdsprep.dataset.buckets import buckets_encoded
from wdsprep.dataset.chance import Ints
from wdsprep.dataset.damage import verify_step
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.names import MANIFEST, index_name, latent_shard, maker_of
from wdsprep.dataset.reindex import is_older, is_whole
from wdsprep.dataset.scores import columns_of
from wdsprep.dataset.shapes import Size, fields_in_shape, shape_name, shapes_of
from wdsprep.dataset.state import check_place, read_manifest
from wdsprep.errors import FormatError, NotFoundError, UsageError
from wdsprep.loading import order
from wdsprep.loading.grid import short
from wdsprep.loading.order.mixing import Want
from wdsprep.loading.parts import DatasetPart, digest_of_shards, in_shapes, of_shards
from wdsprep.loading.taking import givers
from wdsprep.options import Options, about, suggesting
from wdsprep.store import open_store
from wdsprep.store.base import Entry, Store
from wdsprep.text import command, plural

if TYPE_CHECKING:
    from wdsprep.loading.joining import Joined
    from wdsprep.loading.tables import KeyedTable

SHAPE = "shape"
"""What a batch calls the shape that its images have."""
_log = logging.getLogger("wdsprep")


Place = str | os.PathLike[str]
Places = Place | Sequence[Place] | None


@suggesting
@dataclass(frozen=True)
class Stream(Options):
    """One dataset among those a loader mixes.

        large = wdsprep.Stream("s3://bucket/latents-256", weight=3)
        small = wdsprep.Stream("shards/latents-256", weight=1)
        loader = wdsprep.load([large, small], global_batch=1024)

    At most one of `weight` (its proportion to the other streams), `repeat` (how often each sample
    comes in an epoch) and `count` (so many samples an epoch) says how much of it an epoch has; by
    default each sample comes once. `buckets` names the folders to take, by default all, and `where`
    is a condition that samples are to meet. `join` names datasets of the same images, whose arrays
    stand beside those of this one.
    """

    is_command: ClassVar[bool] = False

    url: "str | os.PathLike[str]" = field(metadata=about("The dataset.", is_place=True))
    weight: float | None = field(
        default=None, metadata=about("Its proportion to the other streams.")
    )
    repeat: float | None = field(
        default=None, metadata=about("How often each sample comes in an epoch.")
    )
    count: int | None = field(default=None, metadata=about("The samples of an epoch."))
    buckets: Sequence[str | int] | str | int | None = field(
        default=None, metadata=about("The folders to take.")
    )
    where: str | None = field(default=None, metadata=about("The condition on samples."))
    join: "Places" = field(
        default=(), metadata=about("Datasets of the same images, beside this one.")
    )

    def __repr__(self) -> str:
        """What was given, as it may be typed again."""
        named = ((one.name, getattr(self, one.name)) for one in fields(self)[1:])
        parts = [f"{name}={value!r}" for name, value in named if value not in (None, ())]
        return f"Stream({', '.join([repr(os.fspath(self.url)), *parts])})"


class ImageShape(NamedTuple):
    """The pixels of the images that a batch is of."""

    height: int
    width: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """An opened stream, or a part of it. `kind` is latents, images, or tars where there is no
    manifest. `sizes` are the samples of each shard; of a part, of each that has some."""

    store: Store
    kind: str
    names: tuple[str, ...]
    contents: tuple[str, ...]  # what changes when a shard's bytes do
    sizes: Ints
    nbytes: int
    digest: str
    want: Want
    settings: Mapping[str, Any] = field(default_factory=dict)
    images: "Dataset | None" = None
    """What the latents are made from on the way, where they are not stored."""
    where: str = ""
    """The condition that samples are to meet, or that these do."""
    part: DatasetPart | None = None
    """Where these are some samples of an opened stream, as those of one shape."""
    made_of: tuple[str, ...] = ()
    """Of each shard, the digest of the image shard that it is made of, or that it is."""
    inputs: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """Of each shard, the samples of that image shard that were looked at, where something is to be
    joined."""
    join: tuple[str, ...] = ()
    """Where the datasets are that are to stand beside it."""
    joined: "tuple[Joined, ...]" = ()
    """The datasets whose arrays stand beside these."""
    tables: "tuple[KeyedTable, ...]" = ()
    """The tables whose columns do."""

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """The arrays of a sample, the first members of it; none but in latent shards."""
        if self.kind != "latents":
            return ()
        if self.size is not None:
            return fields_in_shape(self.settings, self.size)
        return fields_of(self.settings["layout"])

    @property
    def beside(self) -> "tuple[Dataset, ...]":
        """The datasets that its samples are of: itself, and what is joined."""
        return self, *(joined.dataset for joined in self.joined)

    @cached_property
    def served(self) -> tuple[Field, ...]:
        """The arrays of a sample in a batch: its own, then those of what is joined. One of a name
        that is there already takes its place, and one of text that of all text beside it."""
        given, _ = givers(self, "")
        return tuple(
            field
            for slot, part in enumerate(self.beside)
            for field in part.fields
            if given.get(short(field.name)) == slot
        )

    @property
    def columns(self) -> dict[str, str]:
        """Those of the tables, with what they hold."""
        return {name: kind for table in self.tables for name, kind in table.columns.items()}

    @property
    def has_columns(self) -> bool:
        """Whether the json of its samples has columns of scores."""
        return bool(columns_of(self.settings))

    @property
    def latents(self) -> "Dataset":
        """The one of those whose latents a batch has."""
        names = [{field.name for field in part.fields} for part in self.beside]
        return next(
            (p for p, own in zip(self.beside[::-1], names[::-1], strict=True) if LATENT in own),
            self,
        )

    @property
    def whole(self) -> "Dataset":
        """All of the opened stream, whose files these are."""
        return self if self.part is None else self.part.whole

    @property
    def files(self) -> "Dataset":
        """What is read: the whole, or the images that its latents are made from on the way."""
        return self.whole.images or self.whole

    @property
    def size(self) -> Size | None:
        """The shape of all these samples, where the dataset has shapes."""
        return None if self.part is None else self.part.size

    @property
    def place(self) -> str:
        """Which samples these are, for messages."""
        url = self.store.url
        return url if self.size is None else f"{url} ({shape_name(self.size)})"

    @property
    def shape(self) -> ImageShape:
        """Of latents: that of all their images."""
        side = self.latents.settings["resolution"]
        width, height = self.size or (side, side)
        return ImageShape(height, width)

    def located(self, shards: Ints, indices: Ints) -> tuple[Ints, Ints]:
        """Where samples lie: the number of the shard, and of the sample in its tar."""
        return (shards, indices) if self.part is None else self.part.located(shards, indices)

    @cached_property
    def ends(self) -> Ints:
        """Where each shard ends, if the samples of all are counted through."""
        return np.cumsum(self.sizes)

    @cached_property
    def samples(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def filled(self) -> int:
        """The shards that hold samples."""
        return int(np.count_nonzero(self.sizes))

    @property
    def sample_nbytes(self) -> int:
        """The mean, so that reading ahead can be bounded in bytes."""
        return max(1, self.nbytes // self.samples)

    @property
    def served_nbytes(self) -> int:
        """The same with what stands beside."""
        return sum(part.sample_nbytes for part in self.beside)

    @property
    def has_moments(self) -> bool:
        return self.latents.settings.get("latents") == "moments"

    @property
    def patch(self) -> int:
        """The cells a side that latents have as channels."""
        return int(self.latents.settings.get("patch", 1))

    def urls(self) -> list[str]:
        """Of a folder from the root on, wherever the program goes."""
        place = self.store.root or self.store.url
        return [f"{place}/{name}" for name in self.names]


def order_streams(datasets: Sequence[Dataset]) -> tuple[order.OrderStream, ...]:
    """What the order is to know of them; the shapes of a dataset have its share together."""
    numbers = {whole: n for n, whole in enumerate(dict.fromkeys(d.whole for d in datasets))}
    return tuple(
        order.OrderStream(
            digest=dataset.digest,
            sizes=dataset.sizes,
            want=dataset.want,
            place=dataset.store.url,
            part_of=None if dataset.size is None else numbers[dataset.whole],
        )
        for dataset in datasets
    )


Streams = str | os.PathLike[str] | Stream | Iterable[str | os.PathLike[str] | Stream]


def open_all(streams: Streams, join: Places = ()) -> tuple[Dataset, ...]:
    """The datasets behind what `load` was given; of those with shapes, each shape's samples. All
    have these to be joined, beside their own."""
    found: list[Dataset] = []
    for each in as_streams(streams):
        both = (*places_of(each.join), *places_of(join))
        found += load_datasets(replace(each, join=both) if both else each)
    return tuple(found)


def places_of(join: Places) -> tuple[str, ...]:
    """Of what is to be joined."""
    given: list[Any] = [] if join is None else [join]
    if isinstance(join, Iterable) and not isinstance(join, str | os.PathLike):
        given = [*join]
    if wrong := [e for e in given if not isinstance(e, str | os.PathLike) or not os.fspath(e)]:
        raise UsageError(f"join: {wrong[0]!r} is no dataset: give paths or URLs")
    return tuple(str(os.fspath(each)) for each in given)


def as_streams(streams: Streams) -> list[Stream]:
    given: list[Any] = [streams]
    if isinstance(streams, Iterable) and not isinstance(streams, str | bytes | Mapping):
        given = list(streams)
    if not given:
        raise UsageError("nothing to load: give the path or URL of a dataset")
    for each in given:
        if not isinstance(each, str | os.PathLike | Stream):
            raise UsageError(
                f"{each!r} is no dataset: give paths, URLs, or Stream(url, weight=...)"
            )
    return [each if isinstance(each, Stream) else Stream(each) for each in given]


def load_datasets(stream: Stream) -> tuple[Dataset, ...]:
    """One GET where there is a manifest; a listing for tars that something else made."""
    store = open_store(os.fspath(stream.url))
    want = Want(weight=stream.weight, repeat=stream.repeat, count=stream.count)
    chosen = [stream.buckets] if isinstance(stream.buckets, str | int) else stream.buckets
    buckets = None if chosen is None else frozenset(map(str, chosen))
    manifest = read_manifest(store)
    if manifest is None:
        made = _of_tars(store, want, buckets)
        return (replace(made, where=stream.where or "", join=places_of(stream.join)),)
    if not manifest.complete:
        what = f"{store.url} is not complete"
        _log.warning("%s: once it is, its order is another and no state of now fits it", what)
    dataset = of_manifest(store, manifest, want, buckets)
    dataset = replace(dataset, where=stream.where or "", join=places_of(stream.join))
    if dataset.join:
        dataset = replace(dataset, inputs=inputs_of(dataset, manifest))
    shapes = shapes_of(manifest.settings)
    if not shapes:
        return (dataset,)
    counts = counts_by_shape(dataset, manifest)
    del manifest  # of many shards it takes more memory than what follows
    return in_shapes(dataset, shapes, counts)


def of_manifest(
    store: Store, manifest: Manifest, want: Want, buckets: "frozenset[str] | None" = None
) -> Dataset:
    """The dataset that the manifest in a store tells of."""
    there = {shard.name.partition("/")[0] for shard in manifest.shards}
    made_of = _sources(manifest)
    shards = [s for s in manifest.shards if buckets is None or s.name.partition("/")[0] in buckets]
    if not there:
        maker = f'the same "{maker_of(manifest.dataset, manifest.settings)}" again'
        if manifest.complete:
            rejected = f"holds no sample, as all were rejected: {store.url}/rejects/ says why"
            raise UsageError(f"{store.url} {rejected}; run {maker} with --overwrite")
        raise UsageError(f"{store.url} holds no shards yet: run {maker}, to its end")
    lacking = sorted((buckets or frozenset()) - there)
    if lacking or not shards:
        wrong = ", ".join(lacking) or "none"
        raise UsageError(f"{store.url} has the buckets {', '.join(sorted(there))}, not {wrong}")
    if not any(shard.samples for shard in shards):
        raise UsageError(
            f"{store.url} holds no samples: its shards are empty: see {store.url}/rejects/"
        )
    return Dataset(
        store=store,
        kind=manifest.dataset,
        names=tuple(shard.name for shard in shards),
        contents=tuple(shard.digest for shard in shards),
        sizes=np.array([shard.samples for shard in shards], np.int64),
        nbytes=sum(shard.nbytes for shard in shards),
        digest=digest_of_shards(
            (shard.name, shard.samples, made_of[shard.name]) for shard in shards
        ),
        want=want,
        settings=manifest.settings,
        made_of=tuple(made_of[shard.name] for shard in shards),
    )


def inputs_of(dataset: Dataset, manifest: Manifest) -> Ints:
    """Of each shard of a dataset, the samples of the image shard that receipts count."""
    if dataset.kind != "latents":
        return dataset.sizes
    columns = map(manifest.ledger.column, ("unit", "inputs"))
    found = {latent_shard(unit): count for unit, count in zip(*columns, strict=True)}
    if strays := [name for name in dataset.names if name not in found]:
        url = dataset.store.url
        raise FormatError(f"{url} has no unit of {strays[0]}: run {command('rebuild', url)}")
    return np.array([found[name] for name in dataset.names], np.int64)


def counts_by_shape(whole: Dataset, manifest: Manifest) -> "NDArray[np.int32]":
    """How many samples of each shape each shard has: a row for each shard."""
    shapes = [shape_name(size) for size in shapes_of(manifest.settings)]
    rows = {name: row for row, name in enumerate(whole.names)}
    counts = np.zeros((len(rows), len(shapes)), np.int32)
    columns = map(manifest.ledger.column, ("counts", "unit"))
    for counted, unit in zip(*columns, strict=True):
        if (row := rows.get(latent_shard(unit))) is not None:
            counts[row] = [counted.get(shape, 0) for shape in shapes]  # each is below 2^31
    wrong = np.flatnonzero(counts.sum(axis=1) != whole.sizes)
    if len(wrong):
        row = int(wrong[0])
        raise FormatError(
            f"{whole.store.url}/{whole.names[row]} has {plural(int(whole.sizes[row]), 'sample')}, "
            f"and {counts[row].sum():,} by its shapes"
        ).with_next_step(verify_step(whole.store.url))
    return counts


def _sources(manifest: Manifest) -> dict[str, str]:
    """By the shard's name, the digest of what it was made of; of images, and where a receipt does
    not say, its own."""
    found = {shard.name: shard.digest for shard in manifest.shards}
    if manifest.dataset == "latents":
        columns = map(manifest.ledger.column, ("input", "shards"))
        for source, shards in zip(*columns, strict=True):
            if source:
                found.update((shard["name"], source) for shard in shards)
    return found


def to_be_encoded(images: Dataset, settings: Mapping[str, Any]) -> Dataset:
    """The latents that images will be: those of the phase, in the order of the stored ones."""
    if images.kind != "images":
        raise UsageError(
            f"{images.store.url} holds {images.kind}: encode= is for image shards that "
            '"wdsprep pack" has made'
        )
    chosen = of_phase(images, settings)
    return replace(chosen, kind="latents", settings=settings, images=chosen)


def of_phase(images: Dataset, settings: Mapping[str, Any]) -> Dataset:
    """The images that may be large enough for latents of these settings."""
    phase = set(map(str, buckets_encoded(settings, images.settings["buckets"])))
    chosen = [n for n, name in enumerate(images.names) if name.partition("/")[0] in phase]
    if not chosen:
        there = ", ".join(sorted({name.partition("/")[0] for name in images.names}))
        raise UsageError(
            f"{images.store.url}: none of the buckets to load ({there}) is of "
            f"{settings['resolution']} pixels"
        )
    return of_shards(images, chosen)


def _of_tars(store: Store, want: Want, buckets: "frozenset[str] | None") -> Dataset:
    """An index tells the samples of its tar by its length, so nothing but the listing is read."""
    listed = {entry.name: entry for entry in store.list()}
    names = [n for n in listed if n.endswith(".tar")]
    _check_tars(store.url, listed, bool(names))
    names = [n for n in names if buckets is None or n.partition("/")[0] in buckets]
    if not names:
        raise UsageError(f"{store.url} has no tars in {', '.join(sorted(buckets or ()))}")
    bare = [n for n in names if not is_whole(listed.get(index_name(n)))]
    if bare:
        raise UsageError(
            f"{store.url}/{bare[0]} has no index, or a cut one ({len(bare):,} of "
            f"{plural(len(names), 'tar')}): run {command('index', store.url)} first"
        )
    old = [n for n in names if is_older(listed[index_name(n)], listed[n])]
    if old:
        many = plural(len(old), "tar is", "tars are")
        what = f"{store.url}: {many} newer than the index, as {old[0]}"
        _log.warning("%s: if written anew, run %s", what, command("index", store.url))
    sizes = [listed[index_name(name)].nbytes // 8 - 1 for name in names]
    if not any(sizes):
        raise UsageError(f"{store.url} holds no samples, its tars are empty: name another place")
    nbytes = [listed[name].nbytes for name in names]
    return Dataset(
        store=store,
        kind="tars",
        names=tuple(names),
        contents=tuple(f"{store.url}/{n} {listed[n].stamp} {listed[n].nbytes}" for n in names),
        sizes=np.array(sizes, np.int64),
        nbytes=sum(nbytes),
        digest=digest_of_shards(zip(names, sizes, nbytes, strict=True)),
        want=want,
    )


def _check_tars(url: str, listed: Mapping[str, Entry], has_tars: bool) -> None:
    """Without a manifest: whether these are tars of another program, or a dataset is elsewhere."""
    check_place(url, listed)
    if not has_tars:
        is_pattern = url.endswith(".tar") or any(sign in url for sign in "*?{")
        hint = ": give the folder that the tars are in" if is_pattern else ""
        raise NotFoundError(f"{url} holds no dataset: no {MANIFEST} and no tars{hint}")


def bring_back(dataset: Dataset) -> str:
    """What to do about a shard that is missing."""
    repair = command("repair", dataset.store.url)
    again = f" or make it again ({repair}, then the command it is from)"
    return f"bring it back{again if dataset.kind != 'tars' else ''}, or load with skip_missing=True"
