"""The work of `select`: write one shard of a selection, with samples copied from other shards.

Neighbouring samples are read and written together. Their rows are copied from table to table, and
are counted. The index says where the bytes of each end; its headers are parsed on the way, to know
that they are those of the sample with its key. A thread reads ahead of the writer, and another
makes the digest.
"""

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from wdsprep.changes.find_samples import image_digests
from wdsprep.changes.shard_plan import SamplesToCopy, Span, spans
from wdsprep.dataset.coarse_histograms import COUNTED, count_sample
from wdsprep.dataset.damage import naming_repair
from wdsprep.dataset.draft import Draft, DraftShard
from wdsprep.dataset.file_names import (
    inputs_name,
    is_table,
    latent_shard,
    latent_unit,
    rejects_name,
)
from wdsprep.dataset.receipts import Receipt, Shard
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject, rejects_in
from wdsprep.dataset.removed_samples import Removed
from wdsprep.dataset.sample_selection import Numbers
from wdsprep.dataset.sample_table import KEY, ROW, table_columns
from wdsprep.dataset.samples import facts_bytes, key_order, parse_object
from wdsprep.dataset.settings import Settings, counted_as
from wdsprep.dataset.shapes import shape_ranges
from wdsprep.dataset.shard_reader import ShardReader
from wdsprep.dataset.stored_dataset import find_receipt, read_receipt
from wdsprep.dataset.tar import BLOCK, padded
from wdsprep.dataset.tar.members import name_of, split_member
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.dataset.unit_locks import Edition
from wdsprep.errors import (
    DamageError,
    FingerprintError,
    FormatError,
    NotFoundError,
    StoreError,
    TarError,
)
from wdsprep.runners.run import RunProgress
from wdsprep.store import open_store, shared_store
from wdsprep.store.base import Store
from wdsprep.tables.read_positions import read_positions
from wdsprep.tables.stored_tables import read_sound_columns

READ_NBYTES = 8 << 20  # of one read
GAP_NBYTES = 64 << 10  # a smaller gap is read too: a second read costs more
GAP_NBYTES_S3 = 1 << 20
AHEAD, AHEAD_S3 = 1, 8  # the reads, and the parsing of what they return


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyUnit:
    """A shard to write.

    `input` is what its receipt states as its input; for images it is the digest of the list of
    `pieces`.
    """

    name: str
    shard: str
    pieces: tuple[SamplesToCopy, ...]
    input: str
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyWork:
    """The work of copying samples, as workers receive it.

    `origins` are the source datasets by number, and `prefixes` are put before their keys. With
    `by_images`, pieces are numbered as in the image shards that latents were made of. `empty` has
    the digests of the files for the empty caption.
    """

    dataset: str
    origins: tuple[str, ...]
    prefixes: tuple[str, ...]
    out: str
    edition: str
    settings: Settings
    by_images: bool = False
    empty: Mapping[str, str] = field(default_factory=dict)

    def open(self) -> "Copier":
        return Copier(self)


class PlacedPart(NamedTuple):
    """Samples of one source shard that stand together in the new shard, and their new rows."""

    origin: int
    shard: Shard
    offsets: NDArray[np.int64]
    numbers: Numbers
    rows: pa.Table
    shape: str = ""


class Copier:
    """A worker that copies samples into new shards, one shard after another."""

    def __init__(self, work: CopyWork) -> None:
        self._work = work
        self._edition = Edition(store=open_store(work.out), mark=work.edition)

    def __call__(self, unit: CopyUnit) -> Generator[RunProgress, None, Receipt]:
        """Write one shard, and its receipt last. Yield progress, and return the receipt.

        A shard that has a receipt already is not written again. Raise FingerprintError if a source
        shard has changed.
        """
        work, store = self._work, self._edition.store
        if done := find_receipt(store, unit.name, unit.input, work.settings):
            return done
        sources = [_Source(work, piece) for piece in unit.pieces]
        with Draft(self._edition, unit.name) as draft:
            name = unit.shard
            if work.dataset == "latents":
                name = latent_shard(unit.name, work.settings)
            made = _NewShard(draft, name, work)
            try:
                parts, rejects = place_parts(sources, self._work.settings)
                for reject in rejects:
                    draft.rejects.add(reject)
                for part in parts:
                    yield from self._copy(made, part, unit)
            except (FormatError, StoreError, TarError):
                for source in sources:
                    source.check_same()
                raise
            shards = (made.tar.finish(),) if made.tar else ()
            receipt = Receipt(
                dataset=work.dataset,
                unit=unit.name,
                generation=0,
                settings=work.settings,
                input=unit.input,
                inputs=made.samples + draft.rejects.counts.total(),
                shards=shards,
                rejects=dict(draft.rejects.counts),
                counts=dict(made.counts),
                files={rejects_name(unit.name): draft.rejects.digest, **work.empty},
            )
            for source in sources:
                source.check_same()
            inputs = {inputs_name(unit.name): b"".join(piece.line() for piece in unit.pieces)}
            return draft.finish(receipt, inputs if work.dataset == "images" else {})

    def _copy(
        self, made: "_NewShard", part: PlacedPart, unit: CopyUnit
    ) -> Generator[RunProgress, None, None]:
        store = shared_store(self._work.origins[part.origin])
        prefix = self._work.prefixes[part.origin]
        with naming_repair(store):
            for found in read_part(store, part):
                made.leave_out_removed(found, prefix)
                made.add(found, prefix)
                made.count(found, part.shape)
                yield RunProgress(
                    samples=made.samples,
                    nbytes=made.nbytes,
                    share=min(1.0, made.nbytes / max(1, unit.nbytes)),
                    rejects=dict(made.draft.rejects.counts),
                )


# --- the samples to copy
class _Source:
    """A shard that samples are copied from, with the receipt of its unit."""

    def __init__(self, work: CopyWork, piece: SamplesToCopy) -> None:
        self.store, self.piece = shared_store(work.origins[piece.origin]), piece
        self._by_images, self._prefix = work.by_images, work.prefixes[piece.origin]
        self.receipt = self._read()

    @property
    def shard(self) -> str:
        return self.piece.shard.name

    def _read(self) -> Receipt:
        """Return the receipt of the unit. Raise FingerprintError if the shard has changed."""
        try:
            receipt = read_receipt(self.store, self.piece.unit)
        except NotFoundError:
            raise self._changed() from None
        digests = {shard.name: shard.digest for shard in receipt.shards}
        made = receipt.input if self._by_images else digests.get(self.piece.shard.name, "")
        if made != self.piece.shard.digest:
            raise self._changed()
        return receipt

    def check_same(self) -> None:
        """Raise FingerprintError if the receipt has changed since it was first read."""
        if self._read() != self.receipt:
            raise self._changed()

    def _changed(self) -> FingerprintError:
        return FingerprintError(
            f"{self.store.url} has changed while samples were copied ({self.shard}): let the run "
            "that changes it finish, then run the same command again"
        )

    @cached_property
    def _own_shard(self) -> Shard:
        """Return the shard as the receipt states it: without samples if all were rejected."""
        unit, shards = latent_unit(self.shard), self.receipt.shards
        return next(
            (one for one in shards if latent_unit(one.name) == unit),
            Shard(self.shard, samples=0, nbytes=0, digest=""),
        )

    @property
    def samples(self) -> int:
        return self._own_shard.samples

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        if is_table(self._own_shard.name):
            return np.empty(0, np.int64)
        return np.array(ShardReader(self.store, self._own_shard).offsets, np.int64)

    @cached_property
    def _rows(self) -> pa.Table:
        columns = table_columns(self.receipt.dataset, self.receipt.settings)
        return read_sound_columns(self.store, self.receipt, self._own_shard, columns)

    @cached_property
    def _rejects(self) -> list[Reject]:
        """Return the rejects of the unit, in the order of their keys."""
        found = rejects_in(self.store, self.receipt.unit) if self.receipt.rejects else []
        return sorted(found, key=lambda reject: key_order(reject.key))

    @cached_property
    def _positions(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the positions of the samples in the image shard, and those of the rejects.

        Without `by_images` samples have the positions 0, 1, 2 and so on, and rejects have none.
        Raise DamageError if samples and rejects do not add up to the inputs of the unit.
        """
        if not self._by_images:
            return np.arange(self.samples), np.empty(0, np.int64)
        if self.receipt.inputs != self.samples + len(self._rejects):
            raise _index_damage(self.store, self.shard)
        if not self.samples:
            return np.empty(0, np.int64), np.arange(self.receipt.inputs)
        found = read_positions(self.store, self.receipt)
        rest = found.others(self.receipt.inputs)
        if len(rest) != len(self._rejects):
            raise _index_damage(self.store, self.shard)
        return found.positions.astype(np.int64), rest

    def rejects(self) -> list[Reject]:
        """Return the rejects among the selected samples.

        There are none unless latents are selected together with their images.
        """
        if not self._by_images:
            return []
        _, places = self._positions
        chosen = np.isin(places, self.piece.numbers).tolist()
        some = (one for one, is_in in zip(self._rejects, chosen, strict=True) if is_in)
        return [replace(one, key=f"{self._prefix}{one.key}") for one in some]

    def part(self, before: int, among: range | None = None, shape: str = "") -> PlacedPart:
        """Return the selected samples; with `among`, those whose numbers here are in that range.

        `before` is the number of positions that earlier shards take in the new image shard. `shape`
        is the name of the samples' shape, which is only noted.
        """
        positions, _ = self._positions
        numbers = np.flatnonzero(np.isin(positions, self.piece.numbers))
        if among is not None:
            numbers = numbers[(among.start <= numbers) & (numbers < among.stop)]
        rows = self._rows.take(numbers)
        if self.receipt.dataset == "latents":
            ranks = np.searchsorted(self.piece.numbers, positions[numbers]) + before
            columns = [column for column in rows.column_names if column != ROW]
            rows = rows.select(columns).append_column(ROW, pa.array(ranks))
        some = numbers.astype(np.uint32)
        return PlacedPart(self.piece.origin, self._own_shard, self._offsets, some, rows, shape)


def place_parts(
    sources: Sequence[_Source], settings: Settings
) -> tuple[list[PlacedPart], list[Reject]]:
    """Return what goes from each source into one shard, and the rejects of the sources.

    A part is the samples of one source and one shape. They are in the order of the shard: by shape,
    as `shape_ranges` sorts these, then by source.
    """
    before, ends = [], 0
    for source in sources:
        before.append(ends)
        ends += len(source.piece.numbers)
    ranges = [shape_ranges(settings, source.receipt.counts) for source in sources]
    names = list(shape_ranges(settings, Counter(chain.from_iterable(ranges))))
    parts = []
    for name in names or [""]:
        for source, start, among in zip(sources, before, ranges, strict=True):
            if source.samples and (not names or name in among):
                with naming_repair(source.store):
                    parts.append(source.part(start, among.get(name), name))
    rejects: list[Reject] = []
    for source in sources:
        with naming_repair(source.store):
            rejects += source.rejects()
    return [part for part in parts if len(part.numbers)], rejects


def _index_damage(store: Store, name: str) -> DamageError:
    """Return the error for a shard whose index leads to no sample."""
    return DamageError(f"{store.url}/{name}", "no sample is where its index says")


# --- the bytes of samples
def read_part(store: Store, part: PlacedPart) -> Iterator["CopiedSamples"]:
    """Yield the samples of a part in their order, several at a time."""
    most = AHEAD if store.root else AHEAD_S3
    name = part.shard.name
    if is_table(name):
        return iter([CopiedSamples(store, name, part.rows)])

    def bring(span: Span) -> CopiedSamples:
        data = store.read(name, start=span.start, nbytes=span.end - span.start)
        if len(data) < span.end - span.start:
            raise _index_damage(store, name)
        some = part.numbers[span.first : span.last]
        begin, end = ((part.offsets[n] - span.start).tolist() for n in (some, some + 1))
        rows = part.rows.slice(span.first, len(some))
        return CopiedSamples(store, name, rows, data, list(zip(begin, end, strict=True)))

    gap_nbytes = GAP_NBYTES if store.root else GAP_NBYTES_S3
    near = spans(part.offsets, part.numbers, gap_nbytes=gap_nbytes, most_nbytes=READ_NBYTES)
    return map_ahead(bring, near, most, most=most)


class Member(NamedTuple):
    """A member of a sample: its name, and where its bytes are."""

    name: str
    start: int
    end: int


class CopiedSamples:
    """Several samples of a shard: their rows, and of a tar the piece in which they are.

    `reach` has the first byte of each sample and the byte after its last.
    """

    def __init__(
        self,
        store: Store,
        shard: str,
        rows: pa.Table,
        data: bytes = b"",
        reach: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.rows, self.data, self.reach = rows, data, reach
        self._store, self._shard = store, shard
        self.keys = rows.column(KEY).to_pylist()
        self.members = [
            self._read_members(key, *span) for key, span in zip(self.keys, reach, strict=False)
        ]

    def fields(self, number: int) -> dict[str, bytes]:
        """Return the members of a sample with their bytes."""
        members = self.members[number] if self.members else ()
        return {name: self.data[start:end] for name, start, end in members}

    def renamed(self, number: int, key: str) -> dict[str, bytes]:
        """Return the members of a sample with another key in its json, if it has one."""
        fields = self.fields(number)
        if "json" in fields:
            facts = parse_object(fields["json"])
            if facts is None:
                what = f"{self._store.url}/{self._shard}"
                raise DamageError(what, "its json is no object", self.keys[number])
            fields["json"] = facts_bytes({**facts, KEY: key})
        return fields

    def keep(self, numbers: Sequence[int]) -> None:
        """Keep the samples with these numbers, and drop the others."""
        self.rows = self.rows.take(np.array(numbers, np.int64))
        self.keys = [self.keys[n] for n in numbers]
        if self.reach:
            self.reach = [self.reach[n] for n in numbers]
            self.members = [self.members[n] for n in numbers]

    def blocks(self) -> list[bytes | memoryview]:
        """Return the bytes of the samples, in one piece if no byte between them is left out."""
        if len(self.data) == sum(end - begin for begin, end in self.reach):
            return [self.data]
        view = memoryview(self.data)
        return [view[begin:end] for begin, end in self.reach]

    def _read_members(self, key: str, at: int, end: int) -> list[Member]:
        """Return the members of a sample, from its tar headers.

        Raise DamageError if these bytes are not those of exactly one sample with this key.
        """
        data, members = self.data, []
        while at < end:
            head = data[at : at + BLOCK]
            split = split_member(name_of(head))
            try:
                nbytes = int(head[124:135], 8)
            except ValueError:
                nbytes = -1
            if split is None or split[0] != key or nbytes < 0:
                raise _index_damage(self._store, self._shard)
            at += BLOCK
            members.append(Member(split[1], at, at + nbytes))
            at += padded(nbytes)
        if at != end or not members:
            raise _index_damage(self._store, self._shard)
        return members


@dataclass(slots=True)
class _NewShard:
    """A new shard that is being written. Its tar opens with its first sample, so none is empty."""

    draft: Draft
    name: str
    work: CopyWork
    tar: DraftShard | None = None
    samples: int = 0
    nbytes: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def leave_out_removed(self, found: CopiedSamples, prefix: str) -> None:
        """Leave out of `found` the samples that were removed from the new dataset before.

        They become rejects.
        """
        if not (removed := self.draft.removed):
            return
        kept = [n for n in range(len(found.keys)) if not _is_removed(removed, found, n)]
        for number in {*range(len(found.keys))} - {*kept}:
            key = f"{prefix}{found.keys[number]}"
            self.draft.rejects.add(Reject(key=key, source="", code=Code.REMOVED))
        found.keep(kept)

    def add(self, found: CopiedSamples, prefix: str) -> None:
        """Add samples of a part. A prefix is put before their keys, in their json too."""
        if not found.keys:
            return
        columns = table_columns(self.work.dataset, self.work.settings)
        tar = self.tar = self.tar or self.draft.shard(self.name, columns)
        if not prefix:
            sizes = [end - begin for begin, end in found.reach]
            tar.add_tarred(found.keys, sizes, found.blocks())
            tar.add_rows(found.rows)
            return
        keys = pc.binary_join_element_wise(prefix, found.rows.column(KEY), "")
        for number, key in enumerate(keys.to_pylist()):
            tar.add(key, [*found.renamed(number, key).items()])
        tar.add_rows(found.rows.drop_columns([KEY]).append_column(KEY, keys))

    def count(self, found: CopiedSamples, shape: str) -> None:
        """Add samples to the totals, and to the counts that a receipt states."""
        self.samples += len(found.keys)
        self.nbytes += sum(end - begin for begin, end in found.reach)
        kind = counted_as(self.work.dataset, self.work.settings)
        columns = [name for name in COUNTED if name in found.rows.column_names]
        for facts in found.rows.select(columns).to_pylist():
            count_sample(self.counts, kind, facts, shape)


def _is_removed(removed: Removed, found: CopiedSamples, number: int) -> bool:
    """Return whether a sample has the source, the URL or an image digest of a removed sample."""
    (facts,) = found.rows.slice(number, 1).to_pylist()
    known = any(removed.has(kind, facts.get(kind) or "") for kind in ("source", "url"))
    digests = image_digests(found.fields(number), facts)
    return known or any(removed.has("sha256", digest) for digest in digests)
