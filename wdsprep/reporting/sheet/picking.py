"""Samples picked by chance and read where they lie, so that no shard is read whole.

The pick is a function of the seed and the sizes of the shards. Every sample of those it is made
from is as likely as any other. A sample costs two or three small reads, found by its shard's index.

The latent sample of an image sample is found without a search: a latent shard has the keys of its
image shard, in the same order, but for its rejects. So its number is the image's, less the rejects
before it. Where latents are of several shapes, that order is the order within each shape: there the
key is looked for among those of the shape that the image's size leads to.
"""

import random
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from threading import Lock
from typing import Any

from wdsprep.dataset.names import index_name, latent_unit
from wdsprep.dataset.receipts import Receipt, Shard
from wdsprep.dataset.rejects import Reject, rejects_in
from wdsprep.dataset.samples import key_order, parse_json
from wdsprep.dataset.shapes import Size, shape_name, shape_ranges, shapes_of
from wdsprep.dataset.tar import BLOCK
from wdsprep.dataset.tar.members import members, name_of
from wdsprep.dataset.tar.read import members_of, split_member
from wdsprep.errors import FormatError, NotFoundError, ShortReadError, TarError
from wdsprep.images.shapes import cut_of
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
    try:
        facts = parse_json(sample.member("json"))
    except (ValueError, RecursionError):
        return sample
    return replace(sample, facts=facts) if isinstance(facts, dict) else sample


def _size_of(image: SheetSample) -> Size:
    width, height = (image.facts.get(name) for name in ("width", "height"))
    if not (isinstance(width, int) and isinstance(height, int) and width > 0 < height):
        raise FormatError("the json of the image says no size")
    return width, height


def _span(store: Store, place: SheetPlace) -> tuple[int, int]:
    name = index_name(place.shard.name)
    data = store.read(name, start=8 * place.number, nbytes=16)
    if len(data) == 16:
        start, end = struct.unpack("<2Q", data)
        if start % BLOCK == 0 and start < end <= place.shard.nbytes:
            return start, end
    raise FormatError(f"{store.url}/{name} is damaged: it has no sample {place.number:,}")


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

    def find(self, image: SheetSample) -> JoinedSample:
        try:
            return self._find(image)
        except (*DAMAGE, ValueError) as error:
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
        number = self._number(image, receipt, rejects)
        shard = next((shard for shard in receipt.shards if number < shard.samples), None)
        if shard is None:
            return self._none("its latent shard has no such sample")
        found = read_sample(self._latents.store, SheetPlace(shard=shard, number=number))
        if found.problem or found.key != image.key:
            return self._none(found.problem or f"{shard.name} has {found.key} in its place")
        return JoinedSample(latents=self._latents, sample=found)

    def _number(self, image: SheetSample, receipt: Receipt, rejects: Iterable[str]) -> int:
        """Of the latent sample in its shard."""
        settings = self._latents.manifest.settings
        if shapes_of(settings):
            size = cut_of(settings).nearest(*_size_of(image))
            numbers = shape_ranges(settings, receipt.counts).get(shape_name(size), range(0))
            return numbers.start + bisect_left(
                numbers, key_order(image.key), key=lambda at: self._key_at(receipt.shards[0], at)
            )
        before = sum(key_order(key) < key_order(image.key) for key in rejects)
        return image.place.number - before

    def _key_at(self, shard: Shard, number: int) -> tuple[int, str]:
        """By its order."""
        store, place = self._latents.store, SheetPlace(shard=shard, number=number)
        head = store.read(shard.name, start=_span(store, place)[0], nbytes=BLOCK)
        return key_order((split_member(name_of(head)) or ("", ""))[0])

    def _none(self, reason: str) -> JoinedSample:
        return JoinedSample(latents=self._latents, sample=None, reason=reason)

    def _rejects_of(self, unit: str) -> Mapping[str, Reject]:
        with self._lock:
            if unit not in self._rejects:
                found = rejects_in(self._latents.store, unit)
                self._rejects[unit] = {reject.key: reject for reject in found}
            return self._rejects[unit]
