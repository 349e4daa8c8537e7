"""Samples picked by chance and read where they lie, so that no shard is read whole.

The pick is a function of the seed and the sizes of the shards. Every sample of those it is made
from is as likely as any other. A sample costs two or three small reads, found by its shard's index.
"""

import random
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from wdsprep.errors import FormatError, NotFoundError, ShortReadError, TarError
from wdsprep.inspecting import members_of
from wdsprep.manifest import Shard
from wdsprep.samples import parse_json
from wdsprep.store import Store
from wdsprep.tar import BLOCK
from wdsprep.tar.members import members, name_of
from wdsprep.tar.read import split_member

AHEAD_NBYTES = 4096
DAMAGE = (FormatError, NotFoundError, ShortReadError, TarError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The sample with this number in a shard."""

    shard: Shard
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What was read of a sample, or the `problem` that kept it from being read."""

    place: Place
    key: str = ""
    members: tuple[tuple[str, bytes], ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    def member(self, name: str) -> bytes:
        return next((data for found, data in self.members if found == name), b"")


def pick(shards: Sequence[Shard], count: int, seed: str) -> list[Place]:
    """So many of the samples in these shards, or all there are, in their order."""
    ends = list(accumulate(shard.samples for shard in shards))
    total = ends[-1] if ends else 0
    chosen = random.Random(seed).sample(range(total), min(count, total))  # noqa: S311
    return [_place(shards, ends, number) for number in sorted(chosen)]


def _place(shards: Sequence[Shard], ends: Sequence[int], number: int) -> Place:
    at = bisect_right(ends, number)
    return Place(shard=shards[at], number=number - (ends[at - 1] if at else 0))


def read_sample(store: Store, place: Place) -> Sample:
    """All members of a sample."""
    try:
        start, end = _span(store, place)
        data = store.read(place.shard.name, start=start, nbytes=end - start)
        return _sample(place, data[:BLOCK], tuple(members_of(data)))
    except DAMAGE as error:
        return Sample(place=place, problem=str(error))


def read_facts(store: Store, place: Place, *, wanted: Sequence[str] = ()) -> Sample:
    """A sample's json, and of the members before it those that are wanted, by positioned reads."""
    try:
        start, end = _span(store, place)
        at = _tape(store, place.shard.name, start, end)
        found = tuple(_until_json(at, wanted))
        return _sample(place, at(0, BLOCK), found)
    except DAMAGE as error:
        return Sample(place=place, problem=str(error))


def _until_json(
    at: Callable[[int, int], bytes], wanted: Sequence[str]
) -> Iterator[tuple[str, bytes]]:
    for path, _header, start, nbytes, _target in members(at):
        name = (split_member(path) or ("", ""))[1]
        if name == "json" or name in wanted:
            yield name, at(start, nbytes)
        if name in ("json", ""):
            return


def _sample(place: Place, head: bytes, found: tuple[tuple[str, bytes], ...]) -> Sample:
    split = split_member(name_of(head)) if len(head) == BLOCK else None
    sample = Sample(place=place, key=split[0] if split else "", members=found)
    try:
        facts = parse_json(sample.member("json"))
    except (ValueError, RecursionError):
        return sample
    return replace(sample, facts=facts) if isinstance(facts, dict) else sample


def _span(store: Store, place: Place) -> tuple[int, int]:
    name = f"{place.shard.name}.idx"
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
