"""Read a shard for an export, sample after sample, with what is joined to each.

The bytes are hashed as they are read, and a shard that is not what its receipt says ends the
export, so damage is never passed on. Metadata needs only the tar headers and the texts: then a
local tar is not read whole, and its digest is not checked.

A joined dataset was made of the same image shards, so its samples are found by their positions
(`wdsprep.dataset.image_positions`); keys must agree. They are read by ranges, many at a time from a
remote store.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wdsprep.dataset.damage import (
    UNLIKE_RECEIPT,
    naming_place,
    naming_repair,
    repair_step,
    verify_step,
)
from wdsprep.dataset.file_names import is_table
from wdsprep.dataset.image_positions import NOWHERE, ImagePositions
from wdsprep.dataset.receipts import Receipt, Shard
from wdsprep.dataset.sample_table import KEY
from wdsprep.dataset.samples import facts_bytes, parse_object
from wdsprep.dataset.settings import Settings
from wdsprep.dataset.shard_reader import HashedTape, ScoreReader, open_shard
from wdsprep.dataset.stored_dataset import read_shard
from wdsprep.dataset.tar.members import Tape, members, split_member, truncated
from wdsprep.dataset.tar.read import open_tape
from wdsprep.dataset.tar.write import LARGE_NBYTES, Buffer
from wdsprep.errors import DamageError, UsageError
from wdsprep.exporting.layout import ExportSample
from wdsprep.store import shared_store
from wdsprep.tables.read_positions import read_positions


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSource:
    """A shard of a dataset, and what is taken from it."""

    url: str
    shard: Shard
    arrays: tuple[str, ...] | None = None
    """The arrays that are read; None for all arrays."""
    gives_caption: bool = True
    scores: Settings | None = None
    """The settings of a dataset of scores, whose columns are added to the sample."""
    receipt: Receipt | None = None
    """The receipt, if samples may have other positions than in the image shard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportUnit:
    """A shard to export: the source that decides which samples there are, then joined ones."""

    name: str
    sources: tuple[UnitSource, ...]

    @property
    def nbytes(self) -> int:
        return self.sources[0].shard.nbytes

    @property
    def inputs(self) -> list[str]:
        """Return the digests of all source shards, which tell whether one has changed."""
        return [source.shard.digest for source in self.sources]


class UnitReader:
    """A reader of the samples of a unit.

    `nbytes` counts the bytes that were read, and `left_out` the samples that joined datasets lack.
    With `heads` only tar headers and texts are read.
    """

    def __init__(self, unit: ExportUnit, *, heads: bool = False) -> None:
        self._first, *self._joined = unit.sources
        self._heads = heads
        self.nbytes = self.left_out = self.samples = 0

    def __iter__(self) -> Iterator[ExportSample]:
        found = _read_headers(self._first) if self._heads else self._read_hashed()
        if self._first.scores is not None:
            found = _read_scores(self._first, found)
        found = read_shard(shared_store(self._first.url), self._first.shard, found)
        joined = [
            read_shard(shared_store(source.url), source.shard, _read_joined(self._first, source))
            for source in self._joined
        ]
        for one in found:
            others = [next(each) for each in joined]
            if any(other is None for other in others):
                self.left_out += 1
                continue
            self.samples += 1
            yield _sample(one, [other for other in others if other], self._first, self._joined)
            self.nbytes = max(self.nbytes, one.end)

    def _read_hashed(self) -> Iterator["_TarSample"]:
        """Yield the samples of the first shard, and read every byte of it.

        Raise DamageError at the end if its receipt has another digest or number of samples.
        """
        source, count = self._first, 0
        with HashedTape(shared_store(source.url), source.shard) as tape:
            for one in _read_tar(tape.at, tape.view, source, _member_names(source)):
                count += 1
                yield one
            tape.check(source.shard.digest)
        if count != source.shard.samples:
            raise _unlike_receipt(source)


@dataclass(slots=True)
class _TarSample:
    """A sample as a tar has it: the members that were read, and the places of all members."""

    key: str
    members: dict[str, Buffer]
    places: dict[str, tuple[int, int]]
    end: int = 0


def _member_names(source: UnitSource) -> frozenset[str] | None:
    return None if source.arrays is None else frozenset((*source.arrays, "json", "txt"))


def _read_tar(
    at: Tape,
    view: Callable[[int, int], Buffer],
    source: UnitSource,
    wanted: frozenset[str] | None,
) -> Iterator[_TarSample]:
    """Yield the samples of a tar with the `wanted` members, or with all members if that is None.

    Large members are views: to copy them takes as long as to hash them.
    """
    with naming_place(f"{source.url}/{source.shard.name}"):
        one: _TarSample | None = None
        for path, _start, data, nbytes, target in members(at):
            split = split_member(path)
            if split is None or target:
                continue
            key, name = split
            if one is None or key != one.key:
                if one is not None:
                    yield one
                one = _TarSample(key, {}, {})
            one.places[name] = (data, nbytes)
            one.end = data + nbytes
            if wanted is None or name in wanted:
                read = view if nbytes >= LARGE_NBYTES else at
                found = one.members[name] = read(data, nbytes)
                if len(found) < nbytes:
                    raise truncated(data, path)
        if one is not None:
            yield one


def _read_scores(source: UnitSource, tar: Iterator[_TarSample]) -> Iterator[_TarSample]:
    """Yield the samples of a shard of scores, with their rows as json.

    Arrays come from `tar`, the samples of its tar, if it has one. Raise DamageError if that has
    other keys than the table.
    """
    rows = ScoreReader(shared_store(source.url), source.shard, source.scores or {}).facts()
    if is_table(source.shard.name):
        tar = (_TarSample(row[KEY], {}, {}) for row in rows)
    for one, row in zip(tar, rows, strict=True):
        if one.key != row[KEY]:
            raise _unlike_receipt(source)
        one.members["json"] = facts_bytes(row)
        yield one


def _read_headers(source: UnitSource) -> Iterator[_TarSample]:
    """Yield the samples of a shard with their json and caption, and the places of all members.

    A tar in a remote store is read whole: many small ranges would take longer.
    """
    store, name = shared_store(source.url), source.shard.name
    wanted = frozenset(("json", "txt"))
    with open_tape(store, name) as at:
        count = 0
        for one in _read_tar(at, at, source, wanted):
            count += 1
            yield one
    if count != source.shard.samples:
        raise _unlike_receipt(source)


def _sample(
    one: _TarSample,
    others: Sequence[_TarSample],
    source: UnitSource,
    joined: Sequence[UnitSource],
) -> ExportSample:
    """Join a sample with those of other datasets.

    Its caption is that of the last dataset with arrays made of captions. Raise UsageError if the
    keys differ.
    """
    found = {name: data for name, data in one.members.items() if name not in ("json", "txt")}
    facts = _facts(one, source)
    caption = one.members.get("txt", b"")
    for other, where in zip(others, joined, strict=True):
        if other.key != one.key:
            raise UsageError(
                f"{where.url}/{where.shard.name} has {other.key} where {source.url} has {one.key}: "
                f"{verify_step(where.url, source.url)}"
            )
        found |= {n: data for n, data in other.members.items() if n not in ("json", "txt")}
        if where.scores is not None:
            facts = {**_facts(other, where), **facts}
        if where.gives_caption:
            caption = other.members.get("txt", caption)
    return ExportSample(
        key=one.key,
        members=found,
        facts=facts,
        caption=bytes(caption).decode("utf-8", "replace"),
        places=one.places,
    )


def _facts(one: _TarSample, source: UnitSource) -> Mapping[str, Any]:
    facts = parse_object(bytes(one.members.get("json", b"{}")))
    if facts is None:
        damage = DamageError(
            f"{source.url}/{source.shard.name}", "its json is not an object", one.key
        )
        raise damage.with_next_step(repair_step(source.url))
    return facts


def _unlike_receipt(source: UnitSource) -> DamageError:
    return DamageError(f"{source.url}/{source.shard.name}", UNLIKE_RECEIPT)


# --- joined datasets
def _positions(source: UnitSource) -> ImagePositions:
    """Return the positions of the samples of a shard in its image shard."""
    if source.receipt is None:
        return ImagePositions.plain(source.shard.samples)
    store = shared_store(source.url)
    with naming_repair(store):  # an error in the first dataset would name another
        return read_positions(store, source.receipt)


def _read_joined(first: UnitSource, source: UnitSource) -> Iterator[_TarSample | None]:
    """Yield the sample of a joined dataset for each sample of the first, or None if it has none."""
    positions = _positions(first).positions
    numbers = _positions(source).numbers(int(positions.max(initial=0)) + 1)[positions]
    wanted = _member_names(source)
    with open_shard(shared_store(source.url), source.shard, source.scores or {}) as shard:
        found = shard.samples(numbers[numbers != NOWHERE].tolist())
        for number in numbers.tolist():
            if number == NOWHERE:
                yield None
                continue
            sample = next(found)
            members = sample.fields.items()
            yield _TarSample(
                sample.key, {n: d for n, d in members if wanted is None or n in wanted}, {}
            )
