"""The datasets of a report or a card: at most one of images, and latents, text or scores of them.

`open_all` opens them and refuses what does not belong together, and `check_output` says where a
report may be written.

Samples are picked by chance, and each is read where it is, so that no shard is read whole. The pick
is a function of the seed and the sizes of the shards, and each sample is equally likely. A sample
costs two or three small reads, which the index of its shard makes possible.

The latent sample of an image sample is found without a search, by its position in the image shard
(`wdsprep.dataset.image_positions`).
"""

import os
import random
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from wdsprep.dataset.file_names import latent_shard, latent_unit
from wdsprep.dataset.manifest import Manifest, Receipt, Shard
from wdsprep.dataset.rejects import Reject, rejects_in
from wdsprep.dataset.samples import parse_object
from wdsprep.dataset.settings import SCORES, columns_of
from wdsprep.dataset.shapes import buckets_encoded
from wdsprep.dataset.shard_reader import ShardReader, open_shard
from wdsprep.dataset.stored_dataset import open_dataset, refresh_manifest
from wdsprep.dataset.thread_map import read_each
from wdsprep.errors import (
    FormatError,
    NotAFileError,
    NotFoundError,
    ShortReadError,
    TarError,
    UsageError,
)
from wdsprep.reporting.options import CardOptions, ReportOptions
from wdsprep.reporting.overview import overview, shards_by_bucket
from wdsprep.store import open_store, split_url
from wdsprep.store.base import Store, absolute, is_web
from wdsprep.store.schemes import WRITABLE_PLACE
from wdsprep.tables.stored_tables import read_positions

START_NBYTES = 1 << 20
KEPT = 16
"""The shards whose readers are kept: samples are read in the order of shards."""


@dataclass(frozen=True, kw_only=True)
class ReportDataset:
    """One dataset of a report or a card. `shown` is its path as the user gave it.

    A card has a `name` for the dataset, and a `folder` for it in the repository.
    """

    shown: str
    store: Store
    manifest: Manifest
    name: str = ""
    folder: str = ""

    @property
    def is_of_images(self) -> bool:
        return self.manifest.dataset == "images"

    @property
    def has_latents(self) -> bool:
        return self.manifest.kind == "latents"

    @property
    def columns(self) -> dict[str, str]:
        """Return the columns of scores, with the kind of value that each holds."""
        return columns_of(self.manifest.settings)

    @property
    def label(self) -> str:
        """Return the name of latents, text or scores in a report, such as `latents 256`."""
        if self.manifest.is_scored:
            return SCORES
        if self.manifest.is_of_text:
            return "text"
        return f"latents {self.manifest.settings['resolution']}"

    @cached_property
    def overview(self) -> dict[str, Any]:
        """Return the facts that `inspect` shows too."""
        return overview(self.manifest)

    def encoded_buckets(self, images: "ReportDataset") -> tuple[int, ...]:
        """Return the buckets of a dataset of images that these latents are made of."""
        return buckets_encoded(self.manifest.settings, images.manifest.settings["buckets"])

    @cached_property
    def buckets(self) -> dict[str, list[Shard]]:
        return shards_by_bucket(self.manifest.shards)

    @cached_property
    def open(self) -> Callable[[Shard], ShardReader]:
        """Return a function that opens a shard; the last ones are kept, as tables are read whole.

        It may be called by many threads.
        """
        settings = self.manifest.settings
        return lru_cache(KEPT)(lambda shard: open_shard(self.store, shard, settings))

    @cached_property
    def units(self) -> dict[str, Receipt]:
        return {receipt.unit: receipt for receipt in self.manifest.receipts}

    @cached_property
    def rejects(self) -> Callable[[str], Sequence[Reject]]:
        """Return a function that returns the rejects of a unit; each file is read once."""
        return lru_cache(None)(lambda unit: rejects_in(self.store, unit))

    @cached_property
    def positions(self) -> Callable[[str], Any]:
        """Return a function that returns the image positions of a unit; each file is read once."""
        return lru_cache(None)(lambda unit: read_positions(self.store, self.units[unit]))


class Datasets(NamedTuple):
    """The datasets of a report, sorted by kind. All but the images count as latents."""

    images: ReportDataset | None
    latents: tuple[ReportDataset, ...]

    @property
    def every(self) -> tuple[ReportDataset, ...]:
        return (*((self.images,) if self.images else ()), *self.latents)

    @property
    def title(self) -> str:
        """Return the paths of the datasets as the user gave them: `a, b and c`."""
        *names, last = [dataset.shown for dataset in self.every]
        return " and ".join(filter(None, (", ".join(names), last)))


def open_all(urls: Sequence[str]) -> Datasets:
    """Open the datasets of a report. An unfinished dataset is read as far as it has come.

    Raise UsageError if there is no dataset, if two are of images, or if one was made of other
    images than those of the report: keys may be the same in these, and the report would show the
    wrong pictures.
    """
    every = open_each(urls)
    images = [dataset for dataset in every if dataset.is_of_images]
    if not every:
        raise UsageError("nothing to report on: give the path or URL of a dataset")
    if len(images) > 1:
        names = " and ".join(dataset.shown for dataset in images)
        raise UsageError(f"{names} are both datasets of images: give a report one of them")
    latents = tuple(dataset for dataset in every if not dataset.is_of_images)
    for dataset in latents if images else ():
        made_of = dataset.manifest.image_digests()
        if made_of and made_of.isdisjoint(images[0].manifest.image_digests()):
            raise UsageError(
                f"{dataset.shown} was not made of {images[0].shown} as it is now: give it the "
                "images that it was made of, or a report of its own"
            )
    return Datasets(images[0] if images else None, latents)


def open_each(urls: Sequence[str]) -> tuple[ReportDataset, ...]:
    opened = ((url, *open_dataset(url)) for url in dict.fromkeys(urls))
    return tuple(
        ReportDataset(shown=url, store=store, manifest=refresh_manifest(store, manifest))
        for url, store, manifest in opened
    )


def check_output(
    options: ReportOptions | CardOptions,
    datasets: Sequence[ReportDataset],
    what: str,
    *,
    is_ours: Callable[[bytes], bool],
    endings: tuple[str, ...],
    besides: Sequence[str] = (),
) -> None:
    """Raise UsageError if nothing must be written to the output of the options.

    The name has to have one of the endings, and the place must be neither a web address nor within
    a dataset, where `verify` would find the file foreign. Names in `besides` are allowed inside.
    `what` is the noun for the output in messages. If there is a file whose start `is_ours` denies,
    the options or the listener have to agree to its replacement.
    """
    output = os.fspath(options.output)
    if not output.lower().endswith(endings):
        such = "".join(f", as {name}" for name in besides)
        raise UsageError(f"-o {output}: give the {what} a name that ends in {endings[0]}{such}")
    if is_web(output):
        raise UsageError(f"-o {output}: a web address is only read: give {WRITABLE_PLACE}")
    place = _folder(output)
    for dataset in datasets:
        folder = _folder(dataset.store.url)
        if f"{place}/".startswith(f"{folder}/") and place[len(folder) + 1 :] not in besides:
            raise UsageError(
                f"{output} is inside the dataset {dataset.shown}: write the {what} somewhere else"
            )
    store, name = split_url(output)
    start = b""
    with suppress(NotFoundError):
        start = store.read(name, nbytes=START_NBYTES)
    is_free = not start or is_ours(start) or options.yes
    if not (is_free or options.listener_or_mute.confirm(output)):
        raise UsageError(
            f"{output} exists already, and is not a {what} or was changed since: give another -o, "
            "or --yes to replace it"
        )


def _folder(url: str) -> str:
    return absolute(open_store(url).url).rstrip("/")


DAMAGE = (FormatError, NotAFileError, NotFoundError, ShortReadError, TarError)


class SamplePlace(NamedTuple):
    """The place of a sample: its shard, and its number in the shard."""

    shard: Shard
    number: int


class ReadSample(NamedTuple):
    """A sample that was read for a report, or the `problem` that kept it from being read.

    `facts` is its json.
    """

    place: SamplePlace
    key: str = ""
    members: Mapping[str, bytes] = {}
    facts: Mapping[str, Any] = {}
    problem: str = ""

    @property
    def caption(self) -> str:
        return self.members.get("txt", b"").decode("utf-8", "replace")


def pick(shards: Sequence[Shard], count: int, seed: str) -> list[SamplePlace]:
    """Pick `count` samples of the shards by chance, or all if they have fewer, in their order."""
    total = sum(shard.samples for shard in shards)
    chosen = random.Random(seed).sample(range(total), min(count, total))  # noqa: S311
    return places_of(shards, sorted(chosen))


def places_of(shards: Sequence[Shard], numbers: Sequence[int]) -> list[SamplePlace]:
    """Return the places of samples by their numbers among all samples of the shards."""
    starts = list(accumulate((shard.samples for shard in shards), initial=0))
    found = ((bisect_right(starts, number) - 1, number) for number in numbers)
    return [SamplePlace(shards[at], number - starts[at]) for at, number in found]


def read_sample(
    dataset: ReportDataset, place: SamplePlace, *, only: Collection[str] = ()
) -> ReadSample:
    """Return a sample with all its members, or with the members in `only`.

    A sample that is damaged or missing raises nothing, but has a `problem`.
    """
    try:
        sample = dataset.open(place.shard).sample(place.number, only=only)
    except DAMAGE as error:
        return ReadSample(place, problem=str(error))
    facts = parse_object(sample.fields.get("json", b"")) or {}
    return ReadSample(place, sample.key, sample.fields, facts)


def read_samples(
    dataset: ReportDataset,
    places: Sequence[SamplePlace],
    *,
    only: Collection[str] = (),
    done: Callable[[int], None] = lambda _count: None,
) -> list[ReadSample]:
    """Return samples as `read_sample` does, in the order of their places.

    `done` is called with the number of samples that have been read.
    """
    read = partial(read_sample, dataset, only=only)
    return read_each(read, places, dataset.store.readers, done)


def find_latent(latents: ReportDataset, image: ReadSample) -> ReadSample:
    """Return the latent sample of an image, with a `problem` if there is none.

    A damaged file is such a problem, and raises nothing.
    """
    try:
        return _find_latent(latents, image)
    except (*DAMAGE, UsageError, ValueError) as error:
        return ReadSample(image.place, problem=str(error))


def _find_latent(latents: ReportDataset, image: ReadSample) -> ReadSample:
    """Return the latent sample of an image. Raise ValueError if there is none."""
    number = image.place.number
    receipt = latents.units.get(latent_unit(image.place.shard.name))
    if receipt is None:
        raise ValueError("its shard has not been encoded")
    made_of, _, taken = receipt.input.partition(":")
    if made_of != image.place.shard.digest:
        raise ValueError("these latents were made of another shard of that name")
    if taken and number >= int(taken):
        raise ValueError("left out by --limit")
    if receipt.rejects:
        rejects = latents.rejects(receipt.unit)
        if codes := [reject.code for reject in rejects if reject.key == image.key]:
            raise ValueError(f"rejected: {codes[0]}")
    rows = latents.positions(receipt.unit) if receipt.shards else ()
    at = np.flatnonzero(np.asarray(rows) == number)
    if not len(at):
        raise ValueError("its latent shard has no such sample")
    (shard,) = receipt.shards
    sample = read_sample(latents, SamplePlace(shard, int(at[0])))
    if not sample.problem and sample.key != image.key:
        raise ValueError(f"{shard.name} has {sample.key} in its place")
    return sample


def find_image(images: ReportDataset, scores: ReportDataset, sample: ReadSample) -> ReadSample:
    """Return the image of a sample of scores, with a `problem` if it cannot be read."""
    unit = latent_unit(sample.place.shard.name)
    name, receipt = latent_shard(unit), scores.units.get(unit)
    shard = next((shard for shard in images.manifest.shards if shard.name == name), None)
    if shard is None or receipt is None:
        return ReadSample(sample.place, problem=f"there is no image shard {name}")
    try:
        number = int(scores.positions(unit)[sample.place.number])
    except DAMAGE as error:
        return ReadSample(sample.place, problem=str(error))
    image = read_sample(images, SamplePlace(shard, number))
    if not image.problem and image.key != sample.key:
        return ReadSample(sample.place, problem=f"{name} has {image.key} in its place")
    return image
