"""Read a shard for an export, sample after sample, with what is joined to each.

The bytes are hashed as they are read, and a shard that is not what its receipt says ends the
export, so damage is never passed on. Metadata needs only the tar headers and the texts: then a
local tar is not read whole, and its digest is not checked.

A joined dataset was made of the same image shards, so its samples are found by their positions
(`wdsprep.dataset.image_positions`); keys must agree. They are read by ranges, many at a time from a
remote store.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsprep.dataset.damage import (
    UNLIKE_RECEIPT,
    naming_place,
    naming_repair,
    repair_step,
    verify_step,
)
from wdsprep.dataset.file_names import is_table
from wdsprep.dataset.image_positions import NOWHERE, numbers_at, plain_positions
from wdsprep.dataset.manifest import Receipt, Shard
from wdsprep.dataset.sample_table import KEY
from wdsprep.dataset.samples import facts_bytes, names_in_roles, parse_object
from wdsprep.dataset.settings import Settings
from wdsprep.dataset.shard_reader import HashedTape, ScoreReader, open_shard
from wdsprep.dataset.stored_dataset import read_shard
from wdsprep.dataset.tar.members import Tape, members, split_member, truncated
from wdsprep.dataset.tar.read import TarSample, open_tape
from wdsprep.dataset.tar.write import LARGE_NBYTES, Buffer
from wdsprep.errors import DamageError, UsageError
from wdsprep.exporting.layout import ExportSample
from wdsprep.store import shared_store
from wdsprep.store.base import Store
from wdsprep.tables.stored_tables import read_positions

TEXTS = frozenset(("json", "txt"))


@dataclass(slots=True)
class ReadSample:
    """A sample of a shard: the fields that were read, and of a tar the places of all members."""

    key: str
    fields: dict[str, Buffer]
    places: dict[str, tuple[int, int]] = field(default_factory=dict)


Samples = Iterator[ReadSample]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSource:
    """A shard of a dataset, and what is taken from it."""

    url: str
    shard: Shard
    arrays: tuple[str, ...] | None = None
    """The arrays that are read; None for all arrays."""
    roles: tuple[str, ...] = ()
    """The roles whose arrays are read, too."""
    gives_caption: bool = True
    scores: Settings | None = None
    """The settings of a dataset of scores, whose columns are added to the sample."""
    receipt: Receipt | None = None
    """The receipt, if samples may have other positions than in the image shard."""

    @property
    def store(self) -> Store:
        return shared_store(self.url)

    def damage(self, cause: str, key: str = "") -> DamageError:
        return DamageError(f"{self.url}/{self.shard.name}", cause, key)

    def wants(self, name: str) -> bool:
        is_named = self.arrays is None or name in self.arrays or name in TEXTS
        return is_named or bool(names_in_roles([name], self.roles))

    def read(self, *, heads: bool) -> Samples:
        """Yield the samples of the shard; with `heads` their json and caption alone.

        Raise DamageError at the end if its receipt has another number of samples.
        """
        tar = self._read_headers() if heads else self._read_hashed()
        samples = tar if self.scores is None else self._read_scores(tar)
        count = 0
        for count, sample in enumerate(samples, 1):  # noqa: B007  counts them
            yield sample
        if count != self.shard.samples:
            raise self.damage(UNLIKE_RECEIPT)

    def _read_hashed(self) -> Samples:
        """Yield the samples of the tar, and read every byte of it.

        Raise DamageError at the end if its receipt has another digest.
        """
        with HashedTape(self.store, self.shard) as tape:
            yield from self._read_tar(tape.at, tape.view, self.wants)
            tape.check(self.shard.digest)

    def _read_headers(self) -> Samples:
        """Yield the samples of the tar with their json and caption, and the places of all members.

        A tar in a remote store is read whole: many small ranges would take longer.
        """
        with open_tape(self.store, self.shard.name) as at:
            yield from self._read_tar(at, at, TEXTS.__contains__)

    def _read_tar(
        self, at: Tape, view: Callable[[int, int], Buffer], wants: Callable[[str], bool]
    ) -> Samples:
        """Yield the samples of a tar with the members that `wants` accepts.

        Large members are views: to copy them takes as long as to hash them.
        """
        with naming_place(f"{self.url}/{self.shard.name}"):
            files = (
                (*split, start, nbytes)
                for path, _, start, nbytes, target in members(at)
                if (split := split_member(path)) and not target
            )
            for key, adjacent in groupby(files, itemgetter(0)):
                sample = ReadSample(key, {})
                for _, name, start, nbytes in adjacent:
                    sample.places[name] = (start, nbytes)
                    if wants(name):
                        read = view if nbytes >= LARGE_NBYTES else at
                        content = sample.fields[name] = read(start, nbytes)
                        if len(content) < nbytes:
                            raise truncated(start, f"{key}.{name}")
                yield sample

    def _read_scores(self, tar: Samples) -> Samples:
        """Yield the samples of a shard of scores, with their rows as json.

        Arrays come from `tar`, the samples of its tar, if it has one. Raise DamageError if that has
        other keys than the table.
        """
        rows = ScoreReader(self.store, self.shard, self.scores or {}).facts()
        if is_table(self.shard.name):
            tar = (ReadSample(row[KEY], {}) for row in rows)
        for sample, row in zip(tar, rows, strict=True):
            if sample.key != row[KEY]:
                raise self.damage(UNLIKE_RECEIPT)
            sample.fields["json"] = facts_bytes(row)
            yield sample

    def read_joined(self, first: "UnitSource") -> Iterator[TarSample | None]:
        """Yield the sample for each sample of the first shard, or None if it has none."""
        positions = first.positions()
        numbers = numbers_at(self.positions(), int(positions.max(initial=0)) + 1)[positions]
        with open_shard(self.store, self.shard, self.scores or {}) as shard:
            samples = shard.samples(numbers[numbers != NOWHERE].tolist())
            for number in numbers.tolist():
                yield None if number == NOWHERE else next(samples)

    def positions(self) -> NDArray[np.uint32]:
        """Return the positions of the samples of the shard in its image shard."""
        if self.receipt is None:
            return plain_positions(self.shard.samples)
        with naming_repair(self.store):  # an error in the first dataset would name another
            return read_positions(self.store, self.receipt)

    def facts(self, sample: ReadSample | TarSample) -> Mapping[str, Any]:
        facts = parse_object(bytes(sample.fields.get("json", b"{}")))
        if facts is None:
            damage = self.damage("its json is not an object", sample.key)
            raise damage.with_next_step(repair_step(self.url))
        return facts


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

    def read(self, *, heads: bool) -> Iterator[ExportSample]:
        """Yield the samples that all sources have; with `heads` with their texts alone."""
        first, *joined = self.sources
        readers = [
            read_shard(source.store, source.shard, source.read_joined(first)) for source in joined
        ]
        for sample in read_shard(first.store, first.shard, first.read(heads=heads)):
            others = [other for other in map(next, readers) if other is not None]
            if len(others) == len(joined):
                yield self._join(sample, others)

    def _join(self, sample: ReadSample, others: Sequence[TarSample]) -> ExportSample:
        """Join a sample with those of other datasets.

        Its caption is that of the last dataset with arrays made of captions, or its own if there is
        none. Its facts win over those of joined scores. Raise UsageError if the keys differ.
        """
        first, *joined = self.sources
        files = {name: data for name, data in sample.fields.items() if name not in TEXTS}
        facts = first.facts(sample)
        caption = sample.fields.get("txt", b"")
        for other, source in zip(others, joined, strict=True):
            if other.key != sample.key:
                raise UsageError(
                    f"{source.url}/{source.shard.name} has {other.key} where {first.url} has "
                    f"{sample.key}: {verify_step(source.url, first.url)}"
                )
            wanted = (name for name in other.fields if source.wants(name) and name not in TEXTS)
            files |= {name: other.fields[name] for name in wanted}
            if source.scores is not None:
                facts = {**source.facts(other), **facts}
            if source.gives_caption:
                caption = other.fields.get("txt", caption)
        return ExportSample(
            key=sample.key,
            members=files,
            facts=facts,
            caption=bytes(caption).decode("utf-8", "replace"),
            places=sample.places,
        )
