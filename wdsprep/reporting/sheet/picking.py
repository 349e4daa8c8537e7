"""Pick samples by chance and read each where it is, so that no shard is read whole.

The pick is a function of the seed and the sizes of the shards, and each sample is equally likely. A
sample costs two or three small reads, which the index of its shard makes possible.

The latent sample of an image sample is found without a search, by its position in the image shard
(`wdsprep.dataset.image_positions`).
"""

import random
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from threading import Lock
from typing import Any

from wdsprep.dataset.file_names import latent_unit
from wdsprep.dataset.receipts import Receipt, Shard
from wdsprep.dataset.reindex import read_positions
from wdsprep.dataset.rejects import Reject, rejects_in
from wdsprep.dataset.samples import parse_object
from wdsprep.dataset.shard_reader import ShardReader
from wdsprep.errors import (
    FormatError,
    NotAFileError,
    NotFoundError,
    ShortReadError,
    TarError,
    UsageError,
)
from wdsprep.reporting.facts.datasets import ReportDataset
from wdsprep.store.base import Store

DAMAGE = (FormatError, NotAFileError, NotFoundError, ShortReadError, TarError)


@dataclass(frozen=True, kw_only=True, slots=True)
class SheetPlace:
    """The place of a sample: its shard, and its number in the shard."""

    shard: Shard
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SheetSample:
    """A sample that was read for the sheet, or the `problem` that kept it from being read."""

    place: SheetPlace
    key: str = ""
    members: tuple[tuple[str, bytes], ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    def member(self, name: str) -> bytes:
        """Return the bytes of a member, or b"" if the sample has no such member."""
        return next((data for found, data in self.members if found == name), b"")


def pick(shards: Sequence[Shard], count: int, seed: str) -> list[SheetPlace]:
    """Pick `count` samples of the shards by chance, or all if they have fewer, in their order."""
    ends = list(accumulate(shard.samples for shard in shards))
    total = ends[-1] if ends else 0
    chosen = random.Random(seed).sample(range(total), min(count, total))  # noqa: S311
    return [place_of(shards, ends, number) for number in sorted(chosen)]


def place_of(shards: Sequence[Shard], ends: Sequence[int], number: int) -> SheetPlace:
    """Return the place of a sample by its number among all samples.

    `ends` has for each shard the number of samples up to its end.
    """
    at = bisect_right(ends, number)
    return SheetPlace(shard=shards[at], number=number - (ends[at - 1] if at else 0))


def read_sample(store: Store, place: SheetPlace, *, only: Collection[str] = ()) -> SheetSample:
    """Return a sample with all its members, or with the members in `only`.

    A sample that is damaged or missing raises nothing, but has a `problem`.
    """
    try:
        sample = ShardReader(store, place.shard).sample(place.number, only=only)
    except DAMAGE as error:
        return SheetSample(place=place, problem=str(error))
    facts = parse_object(sample.fields.get("json", b"")) or {}
    members = tuple(sample.fields.items())
    return SheetSample(place=place, key=sample.key, members=members, facts=facts)


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedSample:
    """The latent sample of an image, or the reason why there is none."""

    latents: ReportDataset
    sample: SheetSample | None
    reason: str = ""


class Joiner:
    """A finder of latent samples in one dataset. It reads the rejects of each shard once."""

    def __init__(self, latents: ReportDataset) -> None:
        self._latents, self._lock = latents, Lock()
        self._rejects: dict[str, Mapping[str, Reject]] = {}
        self._numbers: dict[str, Mapping[int, int]] = {}

    def find(self, image: SheetSample) -> JoinedSample:
        """Find the latent sample of an image sample, or the reason why there is none.

        A damaged file is such a reason, and raises nothing.
        """
        try:
            return self._find(image)
        except (*DAMAGE, UsageError, ValueError) as error:
            return self._missing(str(error))

    def _find(self, image: SheetSample) -> JoinedSample:
        unit = latent_unit(image.place.shard.name)
        receipt = self._latents.units.get(unit)
        if receipt is None:
            return self._missing("its shard has not been encoded")
        made_of, _, taken = receipt.input.partition(":")
        if made_of != image.place.shard.digest:
            return self._missing("these latents were made of another shard of that name")
        if taken and image.place.number >= int(taken):
            return self._missing("left out by --limit")
        rejects = self._rejects_of(unit) if receipt.rejects else {}
        if reject := rejects.get(image.key):
            return self._missing(f"rejected: {reject.code}")
        number = self._numbers_of(receipt).get(image.place.number)
        if number is None:
            return self._missing("its latent shard has no such sample")
        (shard,) = receipt.shards
        found = read_sample(self._latents.store, SheetPlace(shard=shard, number=number))
        if found.problem or found.key != image.key:
            return self._missing(found.problem or f"{shard.name} has {found.key} in its place")
        return JoinedSample(latents=self._latents, sample=found)

    def _numbers_of(self, receipt: Receipt) -> Mapping[int, int]:
        """Return the number of each latent sample, by its position in the image shard."""
        if not receipt.shards:
            return {}
        with self._lock:
            if receipt.unit not in self._numbers:
                found = read_positions(self._latents.store, receipt).positions.tolist()
                self._numbers[receipt.unit] = {at: number for number, at in enumerate(found)}
            return self._numbers[receipt.unit]

    def _missing(self, reason: str) -> JoinedSample:
        return JoinedSample(latents=self._latents, sample=None, reason=reason)

    def _rejects_of(self, unit: str) -> Mapping[str, Reject]:
        with self._lock:
            if unit not in self._rejects:
                found = rejects_in(self._latents.store, unit)
                self._rejects[unit] = {reject.key: reject for reject in found}
            return self._rejects[unit]
