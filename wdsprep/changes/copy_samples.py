"""The work of `select`: write one shard of a selection, with samples copied from other shards.

Neighbouring samples are read and written together. Their rows are copied from table to table, and
are counted. The index says where the bytes of each end; its headers are parsed on the way, to know
that they are those of the sample with its key. A thread reads ahead of the writer, and another
makes the digest.
"""

from array import array
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from wdsprep.changes.find_samples import image_digests
from wdsprep.changes.selected_samples import CopyUnit, SamplesToCopy, list_pieces
from wdsprep.dataset.coarse_histograms import count_sample, counted_columns
from wdsprep.dataset.damage import naming_repair
from wdsprep.dataset.draft import Draft, DraftShard
from wdsprep.dataset.file_names import inputs_name, is_table, latent_unit, rejects_name
from wdsprep.dataset.manifest import Receipt, Shard
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject, rejects_in
from wdsprep.dataset.sample_table import KEY, ROW, table_columns
from wdsprep.dataset.samples import facts_bytes, key_order, parse_object, roles_of
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
from wdsprep.runners.base import Call
from wdsprep.runners.run import RunProgress
from wdsprep.store import open_store, shared_store
from wdsprep.tables.stored_tables import read_positions, read_sound_columns

READ_NBYTES = 8 << 20  # of one read
GAP_NBYTES = 64 << 10  # a smaller gap is read too: a second read costs more
GAP_NBYTES_S3 = 1 << 20
AHEAD, AHEAD_S3 = 1, 8  # the reads, and the parsing of what they return


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyJob:
    """The picklable description of what a worker that copies samples does.

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


def open_worker(job: CopyJob) -> Call:
    return partial(copy_unit, job, Edition(store=open_store(job.out), mark=job.edition))


def copy_unit(
    job: CopyJob, edition: Edition, unit: CopyUnit
) -> Generator[RunProgress, None, Receipt]:
    """Write one shard, and its receipt last. Yield progress, and return the receipt.

    A shard that has a receipt already is not written again. Raise FingerprintError if a source
    shard has changed.
    """
    if done := find_receipt(edition.store, unit.name, unit.input, job.settings):
        return done
    sources = [_Source(job, piece) for piece in unit.pieces]
    with Draft(edition, unit.name) as draft:
        shard = _NewShard(draft, unit, job)
        try:
            yield from shard.fill(sources)
        except (FormatError, StoreError, TarError):
            for source in sources:
                source.read_receipt(as_before=source.receipt)
            raise
        receipt = shard.receipt()
        for source in sources:
            source.read_receipt(as_before=source.receipt)
        inputs = {inputs_name(unit.name): list_pieces(unit.pieces)}
        return draft.finish(receipt, inputs if receipt.dataset == "images" else {})


# --- the samples to copy
class _Source:
    """A shard that samples are copied from, with the receipt of its unit."""

    def __init__(self, job: CopyJob, piece: SamplesToCopy) -> None:
        self.store, self.piece = shared_store(job.origins[piece.origin]), piece
        self.prefix, self._by_images = job.prefixes[piece.origin], job.by_images
        self.receipt = self.read_receipt()
        unit = latent_unit(piece.shard.name)
        # It has no samples if all were rejected.
        self.shard = next(
            (shard for shard in self.receipt.shards if latent_unit(shard.name) == unit),
            Shard(piece.shard.name, samples=0, nbytes=0, digest=""),
        )
        self._place = f"{self.store.url}/{self.shard.name}"

    def read_receipt(self, *, as_before: Receipt | None = None) -> Receipt:
        """Return the receipt of the unit.

        Raise FingerprintError if the shard has changed, or if the receipt is not `as_before`.
        """
        name, digest = self.piece.shard.name, self.piece.shard.digest
        with suppress(NotFoundError):
            receipt = read_receipt(self.store, self.piece.unit)
            digests = {shard.name: shard.digest for shard in receipt.shards}
            is_same = digest == (receipt.input if self._by_images else digests.get(name, ""))
            if is_same and as_before in (None, receipt):
                return receipt
        raise FingerprintError(
            f"{self.store.url} has changed while samples were copied ({name}): let the run that "
            "changes it finish, then run the same command again"
        )

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        return np.array(ShardReader(self.store, self.shard).offsets, np.int64)

    @cached_property
    def _rows(self) -> pa.Table:
        columns = table_columns(self.receipt.dataset, self.receipt.settings)
        return read_sound_columns(self.store, self.receipt, self.shard, columns)

    @cached_property
    def _rejects(self) -> list[Reject]:
        """Return the rejects of the unit, in the order of their keys."""
        rejects = rejects_in(self.store, self.receipt.unit) if self.receipt.rejects else []
        return sorted(rejects, key=lambda reject: key_order(reject.key))

    @cached_property
    def _positions(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the positions of the samples in the image shard, and those of the rejects.

        Without `by_images` samples have the positions 0, 1, 2 and so on, and rejects have none.
        Raise DamageError if samples and rejects do not add up to the inputs of the unit.
        """
        samples, none = self.shard.samples, np.empty(0, np.int64)
        if not self._by_images:
            return np.arange(samples), none
        if self.receipt.inputs != samples + len(self._rejects):  # which may be any number
            raise index_damage(self._place)
        stored = read_positions(self.store, self.receipt) if samples else none
        rest = np.setdiff1d(np.arange(self.receipt.inputs), stored)
        if len(rest) != len(self._rejects):
            raise index_damage(self._place)
        return stored.astype(np.int64), rest

    def rejects(self) -> list[Reject]:
        """Return the rejects among the selected samples.

        There are none unless latents are selected together with their images.
        """
        if not self._by_images:
            return []
        selected = np.flatnonzero(np.isin(self._positions[1], self.piece.numbers)).tolist()
        rejects = (self._rejects[at] for at in selected)
        return [replace(reject, key=f"{self.prefix}{reject.key}") for reject in rejects]

    def read(self, before: int, among: range | None) -> Iterator["CopiedSamples"]:
        """Yield the selected samples in their order, several at a time, with their new rows.

        With `among`, only those whose numbers here are in that range. `before` is the number of
        positions that earlier shards take in the new image shard.
        """
        positions, _ = self._positions
        numbers = np.flatnonzero(np.isin(positions, self.piece.numbers))
        if among is not None:
            numbers = numbers[(among.start <= numbers) & (numbers < among.stop)]
        if not len(numbers):
            return
        rows = self._rows.take(numbers)
        if self.receipt.dataset == "latents":
            ranks = np.searchsorted(self.piece.numbers, positions[numbers]) + before
            rows = rows.drop_columns([ROW]).append_column(ROW, pa.array(ranks))
        if is_table(self.shard.name):
            yield CopiedSamples(self._place, rows)
            return
        starts, ends = (self._offsets[which].tolist() for which in (numbers, numbers + 1))

        def bring(first: int, last: int) -> CopiedSamples:
            start, nbytes = starts[first], ends[last - 1] - starts[first]
            data = self.store.read(self.shard.name, start=start, nbytes=nbytes)
            if len(data) < nbytes:
                raise index_damage(self._place)
            reach = [(starts[at] - start, ends[at] - start) for at in range(first, last)]
            return CopiedSamples(self._place, rows.slice(first, last - first), data, reach)

        most = AHEAD if self.store.root else AHEAD_S3
        gap_nbytes = GAP_NBYTES if self.store.root else GAP_NBYTES_S3
        runs = find_neighbours(starts, ends, gap_nbytes)
        yield from map_ahead(lambda run: bring(*run), runs, most, most=most)


def order_sources(
    sources: Sequence[_Source], settings: Settings
) -> Iterator[tuple[_Source, int, range | None, str]]:
    """Yield sources in the order in which their samples stand in the shard.

    Samples stand by shape, as `shape_ranges` sorts these, then by source. Each source comes with
    the number of positions that those before it take, and with the numbers and the name of a shape.
    """
    befores = [0, *accumulate(len(source.piece.numbers) for source in sources)]
    ranges = [shape_ranges(settings, source.receipt.counts) for source in sources]
    names = list(shape_ranges(settings, Counter(chain.from_iterable(ranges))))
    for name in names or [""]:
        for source, before, by_shape in zip(sources, befores, ranges, strict=False):
            if not names or name in by_shape:
                yield source, before, by_shape.get(name), name


def find_neighbours(
    starts: Sequence[int], ends: Sequence[int], gap_nbytes: int
) -> Iterator[tuple[int, int]]:
    """Yield the runs of samples to read at once: the place of the first, and the one behind.

    `starts` and `ends` say where samples lie in a tar. Samples share a run if the gap between them
    has at most `gap_nbytes`. No run has more than READ_NBYTES, unless a single sample has more.
    """
    first = 0
    for at in range(1, len(starts)):
        if starts[at] - ends[at - 1] > gap_nbytes or ends[at] - starts[first] > READ_NBYTES:
            yield first, at
            first = at
    if starts:
        yield first, len(starts)


def offsets_without(offsets: NDArray[np.int64], numbers: Sequence[int]) -> "array[int]":
    """Return the offsets that a tar has after the samples with these numbers are taken out."""
    sizes = np.delete(np.diff(offsets), np.asarray(numbers, np.int64))
    left = np.concatenate([offsets[:1], sizes]).cumsum()
    return array("Q", left.astype("u8").tobytes())


def index_damage(place: str) -> DamageError:
    return DamageError(place, "no sample is where its index says")


class CopiedSamples:
    """Several samples of a shard: their rows, and of a tar the piece in which they are.

    `reach` has the first byte of each sample and the byte after its last.
    """

    def __init__(
        self, place: str, rows: pa.Table, data: bytes = b"", reach: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.place, self.rows, self.data, self.reach = place, rows, data, reach
        self.keys: list[str] = rows.column(KEY).to_pylist()
        self._members = [
            self._read_members(key, *span) for key, span in zip(self.keys, reach, strict=False)
        ]

    def fields(self, number: int) -> dict[str, bytes]:
        """Return the members of a sample with their bytes."""
        members = self._members[number] if self._members else ()
        return {name: self.data[start:end] for name, start, end in members}

    def renamed(self, number: int, key: str) -> dict[str, bytes]:
        """Return the members of a sample with another key in its json, if it has one."""
        fields = self.fields(number)
        if "json" in fields:
            facts = parse_object(fields["json"])
            if facts is None:
                raise DamageError(self.place, "its json is no object", self.keys[number])
            fields["json"] = facts_bytes({**facts, KEY: key})
        return fields

    def keep(self, numbers: Sequence[int]) -> None:
        """Keep the samples with these numbers, and drop the others."""
        self.rows = self.rows.take(np.array(numbers, np.int64))
        self.keys = [self.keys[n] for n in numbers]
        if self.reach:
            self.reach = [self.reach[n] for n in numbers]
            self._members = [self._members[n] for n in numbers]

    def blocks(self) -> list[bytes | memoryview]:
        """Return the bytes of the samples, in one piece if no byte between them is left out."""
        if len(self.data) == sum(end - begin for begin, end in self.reach):
            return [self.data]
        view = memoryview(self.data)
        return [view[begin:end] for begin, end in self.reach]

    def _read_members(self, key: str, at: int, end: int) -> list[tuple[str, int, int]]:
        """Return the name, first byte and end of each member of a sample, from its tar headers.

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
                raise index_damage(self.place)
            at += BLOCK
            members.append((split[1], at, at + nbytes))
            at += padded(nbytes)
        if at != end or not members:
            raise index_damage(self.place)
        return members


class _NewShard:
    """A new shard that is being written. Its tar opens with its first sample, so none is empty."""

    def __init__(self, draft: Draft, unit: CopyUnit, job: CopyJob) -> None:
        self._draft, self._unit, self._job = draft, unit, job
        self._tar: DraftShard | None = None
        self._samples = self._nbytes = 0
        self._counts = Counter[str]()

    def fill(self, sources: Sequence[_Source]) -> Iterator[RunProgress]:
        """Add the samples and rejects of the sources, and yield progress."""
        rejects = self._draft.rejects
        for source in sources:
            with naming_repair(source.store):
                for reject in source.rejects():
                    rejects.add(reject)
        settings = self._job.settings
        kind, roles = counted_as(self._job.dataset, settings), roles_of(settings)
        for source, before, among, shape in order_sources(sources, settings):
            with naming_repair(source.store):
                for samples in source.read(before, among):
                    self._leave_out_removed(samples, source.prefix)
                    if samples.keys:
                        self._add(samples, source.prefix)
                    self._samples += len(samples.keys)
                    self._nbytes += sum(end - begin for begin, end in samples.reach)
                    there = samples.rows.column_names
                    names = [name for name in counted_columns(roles) if name in there]
                    for facts in samples.rows.select(names).to_pylist():
                        count_sample(self._counts, kind, facts, shape, roles=roles)
                    yield RunProgress(
                        samples=self._samples,
                        nbytes=self._nbytes,
                        share=min(1.0, self._nbytes / max(1, self._unit.nbytes)),
                        rejects=dict(rejects.counts),
                    )

    def receipt(self) -> Receipt:
        """End the tar, and return the receipt of the unit."""
        rejects, name = self._draft.rejects, self._unit.name
        return Receipt(
            dataset=self._job.dataset,
            unit=name,
            generation=0,
            settings=self._job.settings,
            input=self._unit.input,
            inputs=self._samples + rejects.counts.total(),
            shards=(self._tar.finish(),) if self._tar else (),
            rejects=dict(rejects.counts),
            counts=dict(self._counts),
            files={rejects_name(name): rejects.digest, **self._job.empty},
        )

    def _leave_out_removed(self, samples: CopiedSamples, prefix: str) -> None:
        """Make rejects of samples that were removed from the new dataset before.

        They have the source, the URL or an image digest of a removed sample.
        """
        if not (removed := self._draft.removed):
            return
        kept: list[int] = []
        for number, facts in enumerate(samples.rows.to_pylist()):
            is_removed = any(removed.has(kind, facts.get(kind) or "") for kind in ("source", "url"))
            digests = image_digests(samples.fields(number), facts)
            if is_removed or any(removed.has("sha256", digest) for digest in digests):
                key = f"{prefix}{samples.keys[number]}"
                self._draft.rejects.add(Reject(key=key, source="", code=Code.REMOVED))
            else:
                kept.append(number)
        samples.keep(kept)

    def _add(self, samples: CopiedSamples, prefix: str) -> None:
        """Add samples of a part. A prefix is put before their keys, in their json too."""
        job = self._job
        if not self._tar:
            columns = table_columns(job.dataset, job.settings)
            self._tar = self._draft.shard(self._unit.shard, columns)
        if not prefix:
            sizes = [end - begin for begin, end in samples.reach]
            self._tar.add_tarred(samples.keys, sizes, samples.blocks())
            self._tar.add_rows(samples.rows)
            return
        keys = pc.binary_join_element_wise(prefix, samples.rows.column(KEY), "")
        for number, key in enumerate(keys.to_pylist()):
            self._tar.add(key, [*samples.renamed(number, key).items()])
        self._tar.add_rows(samples.rows.drop_columns([KEY]).append_column(KEY, keys))
