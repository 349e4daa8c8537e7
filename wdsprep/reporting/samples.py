"""Pick samples by chance and read each where it is, so that no shard is read whole.

The pick is a function of the seed and the sizes of the shards, and each sample is equally likely. A
sample costs two or three small reads, which the index of its shard makes possible.

The latent sample of an image sample is found without a search, by its position in the image shard
(`wdsprep.dataset.image_positions`).
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from wdsprep.dataset.file_names import latent_shard, latent_unit
from wdsprep.dataset.receipts import Shard
from wdsprep.dataset.rejects import rejects_in
from wdsprep.dataset.samples import parse_object
from wdsprep.errors import (
    FormatError,
    NotAFileError,
    NotFoundError,
    ShortReadError,
    TarError,
    UsageError,
)
from wdsprep.reporting.datasets import ReportDataset
from wdsprep.tables.read_positions import read_positions

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
    ends = list(accumulate(shard.samples for shard in shards))
    places = []
    for number in numbers:
        at = bisect_right(ends, number)
        places.append(SamplePlace(shards[at], number - (ends[at - 1] if at else 0)))
    return places


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


class LatentFinder:
    """A finder of latent samples in one dataset. It reads the files of each shard once."""

    def __init__(self, latents: ReportDataset) -> None:
        self._latents, self._lock = latents, Lock()
        self._files: dict[str, Any] = {}

    def find(self, image: ReadSample) -> ReadSample:
        """Return the latent sample of an image, with a `problem` if there is none.

        A damaged file is such a problem, and raises nothing.
        """
        try:
            sample = self._find(image)
        except (*DAMAGE, UsageError, ValueError) as error:
            sample = str(error)
        return sample if isinstance(sample, ReadSample) else ReadSample(image.place, problem=sample)

    def _find(self, image: ReadSample) -> ReadSample | str:
        """Return the latent sample of an image, or why there is none."""
        store, number = self._latents.store, image.place.number
        receipt = self._latents.units.get(latent_unit(image.place.shard.name))
        if receipt is None:
            return "its shard has not been encoded"
        made_of, _, taken = receipt.input.partition(":")
        if made_of != image.place.shard.digest:
            return "these latents were made of another shard of that name"
        if taken and number >= int(taken):
            return "left out by --limit"
        if receipt.rejects:
            rejects = self._once(
                f"rejects of {receipt.unit}", lambda: rejects_in(store, receipt.unit)
            )
            if codes := [reject.code for reject in rejects if reject.key == image.key]:
                return f"rejected: {codes[0]}"
        rows: Any = ()
        if receipt.shards:
            rows = self._once(receipt.unit, lambda: read_positions(store, receipt).positions)
        at = np.flatnonzero(np.asarray(rows) == number)
        if not len(at):
            return "its latent shard has no such sample"
        (shard,) = receipt.shards
        sample = read_sample(self._latents, SamplePlace(shard, int(at[0])))
        if sample.problem or sample.key != image.key:
            return sample.problem or f"{shard.name} has {sample.key} in its place"
        return sample

    def _once(self, name: str, read: Callable[[], Any]) -> Any:
        with self._lock:
            if name not in self._files:
                self._files[name] = read()
            return self._files[name]


def find_image(images: ReportDataset, scores: ReportDataset, sample: ReadSample) -> ReadSample:
    """Return the image of a sample of scores, with a `problem` if it cannot be read."""
    unit = latent_unit(sample.place.shard.name)
    name, receipt = latent_shard(unit), scores.units.get(unit)
    shard = next((shard for shard in images.manifest.shards if shard.name == name), None)
    if shard is None or receipt is None:
        return ReadSample(sample.place, problem=f"there is no image shard {name}")
    try:
        number = int(read_positions(scores.store, receipt).positions[sample.place.number])
    except DAMAGE as error:
        return ReadSample(sample.place, problem=str(error))
    image = read_sample(images, SamplePlace(shard, number))
    if not image.problem and image.key != sample.key:
        return ReadSample(sample.place, problem=f"{name} has {image.key} in its place")
    return image
