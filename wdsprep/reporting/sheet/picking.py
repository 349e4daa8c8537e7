"""Samples picked by chance and read where they lie, so that no shard is read whole.

The pick is a function of the seed and the sizes of the shards. Every sample of those it is made
from is as likely as any other. A sample costs two or three small reads, found by its shard's index.

The latent sample of an image sample is found without a search, by the position of each in its image
shard (`wdsprep.dataset.rows`).
"""

import random
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from threading import Lock
from typing import Any

from wdsprep.dataset.names import index_name, latent_unit
from wdsprep.dataset.receipts import Receipt, Shard
from wdsprep.dataset.reindex import read_positions
from wdsprep.dataset.rejects import Reject, rejects_in
from wdsprep.dataset.samples import parse_object
from wdsprep.dataset.tar import BLOCK
from wdsprep.dataset.tar.members import members, name_of
from wdsprep.dataset.tar.read import members_of, split_member
from wdsprep.errors import (
    DamageError,
    FormatError,
    NotFoundError,
    ShortReadError,
    TarError,
    UsageError,
)
from wdsprep.reporting.facts.datasets import ReportDataset
from wdsprep.store.base import Store

AHEAD_NBYTES = 4096
DAMAGE = (FormatError, NotFoundError, ShortReadError, TarError)


@dataclass(frozen=True, kw_only=True, slots=True)
class SheetPlace:
    """The sample with this number in a shard."""

    shard: Shard
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SheetSample:
    """What was read of a sample, or the `problem` that kept it from being read."""

    place: SheetPlace
    key: str = ""
    members: tuple[tuple[str, bytes], ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    def member(self, name: str) -> bytes:
        return next((data for found, data in self.members if found == name), b"")


def pick(shards: Sequence[Shard], count: int, seed: str) -> list[SheetPlace]:
    """So many of the samples in these shards, or all there are, in their order."""
    ends = list(accumulate(shard.samples for shard in shards))
    total = ends[-1] if ends else 0
    chosen = random.Random(seed).sample(range(total), min(count, total))  # noqa: S311
    return [place_of(shards, ends, number) for number in sorted(chosen)]


def place_of(shards: Sequence[Shard], ends: Sequence[int], number: int) -> SheetPlace:
    at = bisect_right(ends, number)
    return SheetPlace(shard=shards[at], number=number - (ends[at - 1] if at else 0))


def read_sample(store: Store, place: SheetPlace) -> SheetSample:
    """All members of a sample."""
    try:
        start, end = _span(store, place)
        data = store.read(place.shard.name, start=start, nbytes=end - start)
        return _sample(place, data[:BLOCK], tuple(members_of(data)))
    except DAMAGE as error:
        return SheetSample(place=place, problem=str(error))


def read_facts(store: Store, place: SheetPlace, *, wanted: Sequence[str] = ()) -> SheetSample:
    """A sample's json, and of the members before it those that are wanted, by positioned reads."""
    try:
        start, end = _span(store, place)
        at = _tape(store, place.shard.name, start, end)
        found = tuple(_until_json(at, wanted))
        return _sample(place, at(0, BLOCK), found)
    except DAMAGE as error:
        return SheetSample(place=place, problem=str(error))


def _until_json(
    at: Callable[[int, int], bytes], wanted: Sequence[str]
) -> Iterator[tuple[str, bytes]]:
    for path, _header, start, nbytes, _target in members(at):
        name = (split_member(path) or ("", ""))[1]
        if name == "json" or name in wanted:
            yield name, at(start, nbytes)
        if name in ("json", ""):
            return


def _sample(place: SheetPlace, head: bytes, found: tuple[tuple[str, bytes], ...]) -> SheetSample:
    split = split_member(name_of(head)) if len(head) == BLOCK else None
    sample = SheetSample(place=place, key=split[0] if split else "", members=found)
    facts = parse_object(sample.member("json"))
    return sample if facts is None else replace(sample, facts=facts)


def _span(store: Store, place: SheetPlace) -> tuple[int, int]:
    name = index_name(place.shard.name)
    data = store.read(name, start=8 * place.number, nbytes=16)
    if len(data) == 16:
        start, end = struct.unpack("<2Q", data)
        if start % BLOCK == 0 and start < end <= place.shard.nbytes:
            return start, end
    raise DamageError(f"{store.url}/{name}", f"it has no sample {place.number:,}")


def _tape(store: Store, name: str, start: int, end: int) -> Callable[[int, int], bytes]:
    """The bytes of one sample as a tar walk asks for them, a little more fetched than was asked."""
    held, first = b"", 0

    def at(offset: int, nbytes: int) -> bytes:
        nonlocal held, first
        if not first <= offset <= offset + nbytes <= first + len(held):
            most = min(max(nbytes, AHEAD_NBYTES), end - start - offset)
            held, first = store.read(name, start=start + offset, nbytes=max(0, most)), offset
        return held[offset - first : offset - first + nbytes]

    return at


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedSample:
    """The latent sample of a key, or why there is none."""

    latents: ReportDataset
    sample: SheetSample | None
    reason: str = ""


class Joiner:
    """Finds samples of one dataset of latents; the rejects of a shard are read once."""

    def __init__(self, latents: ReportDataset) -> None:
        self._latents, self._lock = latents, Lock()
        self._rejects: dict[str, Mapping[str, Reject]] = {}
        self._numbers: dict[str, Mapping[int, int]] = {}

    def find(self, image: SheetSample) -> JoinedSample:
        try:
            return self._find(image)
        except (*DAMAGE, UsageError, ValueError) as error:
            return self._none(str(error))

    def _find(self, image: SheetSample) -> JoinedSample:
        unit = latent_unit(image.place.shard.name)
        receipt = self._latents.units.get(unit)
        if receipt is None:
            return self._none("its shard has not been encoded")
        made_of, _, taken = receipt.input.partition(":")
        if made_of != image.place.shard.digest:
            return self._none("these latents were made of another shard of that name")
        if taken and image.place.number >= int(taken):
            return self._none("left out by --limit")
        rejects = self._rejects_of(unit) if receipt.rejects else {}
        if reject := rejects.get(image.key):
            return self._none(f"rejected: {reject.code}")
        number = self._numbers_of(receipt).get(image.place.number)
        if number is None:
            return self._none("its latent shard has no such sample")
        (shard,) = receipt.shards
        found = read_sample(self._latents.store, SheetPlace(shard=shard, number=number))
        if found.problem or found.key != image.key:
            return self._none(found.problem or f"{shard.name} has {found.key} in its place")
        return JoinedSample(latents=self._latents, sample=found)

    def _numbers_of(self, receipt: Receipt) -> Mapping[int, int]:
        """The numbers of the samples of a latent shard by their positions in the image shard."""
        if not receipt.shards:
            return {}
        with self._lock:
            if receipt.unit not in self._numbers:
                found = read_positions(self._latents.store, receipt).positions.tolist()
                self._numbers[receipt.unit] = {at: number for number, at in enumerate(found)}
            return self._numbers[receipt.unit]

    def _none(self, reason: str) -> JoinedSample:
        return JoinedSample(latents=self._latents, sample=None, reason=reason)

    def _rejects_of(self, unit: str) -> Mapping[str, Reject]:
        with self._lock:
            if unit not in self._rejects:
                found = rejects_in(self._latents.store, unit)
                self._rejects[unit] = {reject.key: reject for reject in found}
            return self._rejects[unit]
