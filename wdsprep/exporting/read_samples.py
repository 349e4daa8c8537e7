"""Read a shard for an export, sample after sample, with what is joined to each.

The bytes are hashed as they are read, and a shard that is not what its receipt says ends the
export, so damage is never passed on. Metadata needs only the tar headers and the texts: then a
local tar is not read whole, and its digest is not checked.

A joined dataset was made of the same image shards, so its samples are found by their positions
(`wdsprep.dataset.image_positions`); keys must agree. They are read by ranges, many at a time from a
remote store.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
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
from wdsprep.dataset.tar.members import members, split_member, truncated
from wdsprep.dataset.tar.read import TarSample, open_tape
from wdsprep.dataset.tar.write import LARGE_NBYTES, Buffer
from wdsprep.errors import DamageError, UsageError
from wdsprep.exporting.layout import ExportSample
from wdsprep.store import shared_store
from wdsprep.store.base import Store
from wdsprep.tables.stored_tables import read_positions

TEXTS = frozenset(("json", "txt"))


Places = dict[str, tuple[int, int]]
ReadSample = tuple[str, dict[str, Buffer], Places]
"""The key of a sample, the fields that were read, and of a tar the places of all members."""


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
        is_named = self.arrays is None or name in self.arrays
        return is_named or bool(names_in_roles([name], self.roles))

    def read(self, *, heads: bool) -> Iterator[ReadSample]:
        """Yield the samples of the shard; with `heads` their json and caption alone.

        Raise DamageError at the end if its receipt has another number of samples or another digest.
        """
        samples = self._read_tar(heads=heads)
        if self.scores is not None:
            samples = self._read_scores(samples)
        count = 0
        for count, sample in enumerate(samples, 1):  # noqa: B007  counts them
            yield sample
        if count != self.shard.samples:
            raise self.damage(UNLIKE_RECEIPT)

    def _read_tar(self, *, heads: bool) -> Iterator[ReadSample]:
        """Yield the samples of the tar, with `heads` with their json and caption alone.

        Without `heads` every byte is read and hashed, and large members are views: to copy them
        takes as long. With `heads` a tar in a remote store is read whole, too: many small ranges
        would take longer.
        """
        with ExitStack() as stack, naming_place(f"{self.url}/{self.shard.name}"):
            view: Callable[[int, int], Buffer]
            if heads:
                at = view = stack.enter_context(open_tape(self.store, self.shard.name))
            else:
                tape = stack.enter_context(HashedTape(self.store, self.shard))
                at, view = tape.at, tape.view
            files = (
                (*split, start, nbytes)
                for path, _, start, nbytes, target in members(at)
                if (split := split_member(path)) and not target
            )
            for key, adjacent in groupby(files, itemgetter(0)):
                fields: dict[str, Buffer] = {}
                places: Places = {}
                for _, name, start, nbytes in adjacent:
                    places[name] = (start, nbytes)
                    if name in TEXTS or (not heads and self.wants(name)):
                        read = view if nbytes >= LARGE_NBYTES else at
                        content = fields[name] = read(start, nbytes)
                        if len(content) < nbytes:
                            raise truncated(start, f"{key}.{name}")
                yield key, fields, places
            if not heads:
                tape.check(self.shard.digest)

    def _read_scores(self, tar: Iterator[ReadSample]) -> Iterator[ReadSample]:
        """Yield the samples of a shard of scores, with their rows as json.

        Arrays come from `tar`, the samples of its tar, if it has one. Raise DamageError if that has
        other keys than the table.
        """
        rows = ScoreReader(self.store, self.shard, self.scores or {}).facts()
        if is_table(self.shard.name):
            tar = ((row[KEY], {}, {}) for row in rows)
        for (key, fields, places), row in zip(tar, rows, strict=True):
            if key != row[KEY]:
                raise self.damage(UNLIKE_RECEIPT)
            yield key, {**fields, "json": facts_bytes(row)}, places

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

    def facts(self, key: str, fields: Mapping[str, Buffer]) -> Mapping[str, Any]:
        facts = parse_object(bytes(fields.get("json", b"{}")))
        if facts is None:
            damage = self.damage("its json is not an object", key)
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
    def inputs(self) -> tuple[str, ...]:
        """Return the digests of all source shards, which tell whether one has changed."""
        return tuple(source.shard.digest for source in self.sources)

    def read(self, *, heads: bool) -> Iterator[ExportSample]:
        """Yield the samples that all sources have; with `heads` with their texts alone.

        The caption of a sample is that of the last dataset with arrays made of captions, or its own
        if there is none. Its facts win over those of joined scores. Raise UsageError if keys
        differ.
        """
        first, *joined = self.sources
        readers = [
            read_shard(source.store, source.shard, source.read_joined(first)) for source in joined
        ]
        samples = read_shard(first.store, first.shard, first.read(heads=heads))
        for key, fields, places in samples:
            others = [other for other in map(next, readers) if other is not None]
            if len(others) < len(joined):
                continue
            files = {name: data for name, data in fields.items() if name not in TEXTS}
            facts, caption = first.facts(key, fields), fields.get("txt", b"")
            for other, source in zip(others, joined, strict=True):
                if other.key != key:
                    raise UsageError(
                        f"{source.url}/{source.shard.name} has {other.key} where {first.url} has "
                        f"{key}: {verify_step(source.url, first.url)}"
                    )
                wanted = (n for n in other.fields if source.wants(n) and n not in TEXTS)
                files |= {name: other.fields[name] for name in wanted}
                if source.scores is not None:
                    facts = {**source.facts(key, other.fields), **facts}
                if source.gives_caption:
                    caption = other.fields.get("txt", caption)
            yield ExportSample(
                key=key,
                members=files,
                facts=facts,
                caption=bytes(caption).decode("utf-8", "replace"),
                places=places,
            )
