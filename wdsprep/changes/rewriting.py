"""A unit of a dataset becomes one without some of its samples, all under one hold.

1. The shards that stay are written anew, without names. The bytes that stay are copied as they lie
   there, between the offsets of the index; all that is read goes into the digest of the old tar.
2. The receipt is written: it says what the unit will be.
3. The files become what it says: each is compared with it, and made where it is another. So whoever
   was killed is followed by one who does the same again, from whatever is there; and what comes out
   otherwise than the receipt says was damaged, and is named.

Which samples go is written down in the dataset before (`wdsprep.dataset.removed`), with the size
and digest that each shard has then.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from io import BytesIO

import numpy as np

from wdsprep.dataset.coarse_histograms import count_sample
from wdsprep.dataset.damage import UNLIKE_RECEIPT, naming_place
from wdsprep.dataset.digests import DigestKind
from wdsprep.dataset.edition import Edition
from wdsprep.dataset.keys import offsets_of
from wdsprep.dataset.names import (
    index_name,
    inputs_name,
    receipt_name,
    rejects_name,
    rows_name,
)
from wdsprep.dataset.receipts import Receipt, Shard
from wdsprep.dataset.records import read_lines
from wdsprep.dataset.reindex import write_index, write_rows
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject, RejectsFile, hide_source, read_rejects
from wdsprep.dataset.removed import Removed, ShardRemoval, UnitRemoval
from wdsprep.dataset.rows import ImagePositions, may_have_rows
from wdsprep.dataset.samples import key_order, parse_json, parse_object
from wdsprep.dataset.scores import counted_as
from wdsprep.dataset.shapes import shape_ranges
from wdsprep.dataset.spans import offsets_without, spans
from wdsprep.dataset.state import read_receipt
from wdsprep.dataset.tar.index import encode_index
from wdsprep.dataset.tar.read import members_of
from wdsprep.errors import DamageError, FormatError, NotFoundError
from wdsprep.packing.changed_sources import without_facts
from wdsprep.sources import Item, ItemLine
from wdsprep.store.base import Chunks, FileSink, Store, write_bytes

Fields = dict[str, bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewritten:
    """A shard without some of its samples, which has no name yet, and what these were."""

    removal: ShardRemoval
    shard: Shard
    index: bytes
    gone: tuple[Fields, ...]


class UnitChange:
    """`image` is the digest that the image shard of a unit of latents has now, if it has one."""

    def __init__(
        self, edition: Edition, removal: UnitRemoval, removed: Removed, image: str = ""
    ) -> None:
        self._edition, self._store = edition, edition.store
        self._removal, self._removed, self._image = removal, removed, image

    def rewrite(self) -> Receipt | None:
        """Change the unit, and return its new receipt; None where nothing is left of it."""
        unit = self._removal.unit
        with self._edition.holding(unit), ExitStack() as naming:
            try:
                receipt = read_receipt(self._store, unit)
            except NotFoundError:  # a repair has taken it out, or an earlier run did
                self._delete_all()
                return None
            made = [
                self._rewritten(shard, receipt, naming)
                for shard in self._removal.shards
                if not shard.is_all and self._is_as_before(shard, receipt)
            ]
            after = self._after(receipt, made)
            if not after.inputs and self._removal.made_of:
                self._store.delete(receipt_name(unit))
                self._delete_all()
                return None
            if after != receipt:
                write_bytes(self._store, receipt_name(unit), after.to_bytes())
            self._settle(after)
            naming.close()
            for one in made:
                write_bytes(self._store, index_name(one.shard.name), one.index)
            self._settle_shards(after)
            return after

    # --- the receipt
    def _is_as_before(self, shard: ShardRemoval, receipt: Receipt) -> bool:
        """Return whether the tar still has the samples to remove.

        A run that was killed after it wrote the receipt has left it so.
        """
        now = {one.name: one for one in receipt.shards}.get(shard.name)
        there = (e.nbytes for e in self._store.list(shard.name) if e.name == shard.name)
        if next(there, 0) != shard.nbytes:
            return False
        return now is None or now.digest == shard.digest or now.nbytes != shard.nbytes

    def _after(self, receipt: Receipt, made: Sequence[Rewritten]) -> Receipt:
        """Return the new receipt, or the present one if it is new already."""
        digests = {shard.name: shard.digest for shard in receipt.shards}
        is_before = all(digests.get(each.name) == each.digest for each in self._removal.shards)
        if not is_before or not self._is_first(receipt):
            for one in made:
                if digests.get(one.shard.name) != one.shard.digest:
                    raise self._unlike_receipt(one.shard.name)
            return receipt
        new = {one.shard.name: one.shard for one in made}
        emptied = {each.name for each in self._removal.shards if each.is_all}
        shards = [new.get(s.name, s) for s in receipt.shards if s.name not in emptied]
        gone = self._counted(receipt, made, emptied)
        # Which samples a table of captions has named is not known where it has not named all.
        gone["named"] = max(0, receipt.counts.get("named", 0) - sum(s.samples for s in shards))
        counts = {
            name: count - gone[name]
            for name, count in receipt.counts.items()
            if count != gone[name] or not count
        }
        after = replace(receipt, shards=tuple(shards), counts=counts)
        after = self._with_rejects(after)
        if receipt.dataset == "images":
            return self._with_inputs(after)
        return self._with_rows(receipt, self._made_of_now(after))

    def _is_first(self, receipt: Receipt) -> bool:
        """Return whether nothing has been done yet to a unit that loses rejects, but no sample."""
        if self._removal.shards:
            return True
        if self._removal.made_of:
            return receipt.input.partition(":")[0] == self._removal.made_of
        data = self._read(rejects_name(receipt.unit))
        return (
            DigestKind.from_settings(receipt.settings).hex(data)
            == receipt.files[rejects_name(receipt.unit)]
        )

    def _counted(
        self, receipt: Receipt, made: Sequence[Rewritten], emptied: set[str]
    ) -> Counter[str]:
        """Return what was counted of the samples that go."""
        gone = {one.shard.name: one.gone for one in made}
        shapes = shape_ranges(receipt.settings, receipt.counts)
        counts: Counter[str] = Counter()
        for each in self._removal.shards:
            if each.name in emptied:
                gone[each.name] = self._read_gone(each)
            if each.name not in gone:
                raise self._unlike_receipt(each.name)
            for row, fields in zip(each.rows, gone[each.name], strict=True):
                shape = next((name for name, rows in shapes.items() if row in rows), "")
                kind = counted_as(receipt.dataset, receipt.settings)
                count_sample(counts, kind, parse_json(fields["json"]), shape)
        return counts

    def _made_of_now(self, receipt: Receipt) -> Receipt:
        """Make the receipt name the new image shard, so that the next encode finds it up to date.

        Of a shard that a --limit has cut, it counts fewer samples by as many as have gone.
        """
        whole, _, first = receipt.input.partition(":")
        if not self._removal.made_of or whole != self._removal.made_of or not self._image:
            return receipt
        cut = f":{int(first) - self._removal.inputs}" if first else ""
        return replace(receipt, input=f"{self._image}{cut}")

    # --- what the files are to hold
    def _with_rejects(self, receipt: Receipt) -> Receipt:
        name = rejects_name(receipt.unit)
        data = self._read(name)
        kind = DigestKind.from_settings(receipt.settings)
        if kind.hex(data) != receipt.files[name]:
            raise self._unlike_receipt(name)
        rejects = self._rejects(data, kind)[1]
        return replace(
            receipt,
            inputs=sum(shard.samples for shard in receipt.shards) + rejects.counts.total(),
            rejects=dict(rejects.counts),
            files={**receipt.files, name: rejects.digest},
        )

    def _rejects(self, data: bytes, kind: DigestKind) -> tuple[bytes, RejectsFile]:
        """Remove what can be read of removed samples from the rejects.

        Latents lose these rejects where the images do not have them any more either.
        """
        gone = dict.fromkeys((key for shard in self._removal.shards for key in shard.keys), "")
        gone |= dict.fromkeys(self._removal.rejects, "")
        kept = []
        for reject in read_rejects(data, rejects_name(self._removal.unit)):
            if reject.key not in gone:
                kept.append(reject)
            elif reject.source:  # a slice that tries the row again takes it from here by that
                gone[reject.key] = hide_source(reject.source)
        if not self._removal.made_of:
            kept += [Reject(key=key, source=of, code=Code.REMOVED) for key, of in gone.items()]
            kept.sort(key=lambda reject: key_order(reject.key))
        out = BytesIO()
        rejects = RejectsFile(out, kind)
        for reject in kept:
            rejects.add(reject)
        return out.getvalue(), rejects

    def _with_inputs(self, receipt: Receipt) -> Receipt:
        data = self._read(inputs_name(receipt.unit), b"")
        kind = DigestKind.from_settings(receipt.settings)
        if kind.hex(data) != receipt.input:  # lost, or damaged: no captions are in it
            return receipt
        return replace(receipt, input=kind.hex(self._inputs(data)))

    def _inputs(self, data: bytes) -> bytes:
        """Remove the metadata of removed samples, which a folder's table may have given."""
        lines = data.splitlines(keepends=True)
        return b"".join(self._without_facts(line) if b'"{' in line else line for line in lines)

    def _without_facts(self, line: bytes) -> bytes:
        (said,) = read_lines(ItemLine, line, inputs_name(self._removal.unit))
        item = Item.from_line(said)
        if not self._removed.has("source", item.name):
            return line
        return without_facts(item).to_json().encode()

    def _with_rows(self, before: Receipt, receipt: Receipt) -> Receipt:
        """Write the positions of the samples that stay, in their image shard as it is now.

        Of an old dataset whose positions nobody can tell, that stays so.
        """
        kind, files = DigestKind.from_settings(receipt.settings), dict(receipt.files)
        for shard in before.shards:
            name = rows_name(shard.name)
            stated = files.pop(name, "")
            if stated and kind.hex(self._read(name)) != stated:
                raise self._unlike_receipt(name)
            if may_have_rows(before) and not stated and write_rows(self._store, before) is None:
                continue
            if data := self._rows(shard, self._read(name, b"")):
                files[name] = kind.hex(data)
        return replace(receipt, files=files)

    def _rows(self, shard: Shard, data: bytes) -> bytes:
        """Return the positions of the samples that stay; empty where they are 0, 1, 2 and so on."""
        going = {each.name: each for each in self._removal.shards}.get(shard.name)
        count = going.samples if going else shard.samples
        rows = (
            ImagePositions.from_bytes(data, rows_name(shard.name))
            if data
            else ImagePositions.plain(count)
        )
        left = rows.without(going.rows if going else (), self._removal.lost_rows)
        return b"" if left.is_plain else left.to_bytes()

    # --- the files become that
    def _settle(self, receipt: Receipt) -> None:
        kind, unit = DigestKind.from_settings(receipt.settings), receipt.unit
        rejects = rejects_name(unit)
        self._make(kind, rejects, receipt.files[rejects], lambda data: self._rejects(data, kind)[0])
        if receipt.dataset == "images":
            name = inputs_name(unit)
            if kind.hex(self._inputs(self._read(name, b""))) == receipt.input:
                self._make(kind, name, receipt.input, self._inputs)
            return
        for shard in receipt.shards:
            name = rows_name(shard.name)
            if name in receipt.files:
                make = lambda data, shard=shard: self._rows(shard, data)  # noqa: E731
                self._make(kind, name, receipt.files[name], make)
            else:
                self._store.delete(name)

    def _make(
        self, kind: DigestKind, name: str, digest: str, make: Callable[[bytes], bytes]
    ) -> None:
        there = self._read(name, b"")
        if kind.hex(there) == digest and (there or name.startswith("rejects/")):
            return
        data = make(there)
        if kind.hex(data) != digest:
            raise self._unlike_receipt(name)
        write_bytes(self._store, name, data)

    def _settle_shards(self, receipt: Receipt) -> None:
        """Write the index of each changed shard that lacks one, and delete the emptied shards.

        An index of another size than the shard's samples need counts as lacking.
        """
        now = {shard.name: shard for shard in receipt.shards}
        for each in self._removal.shards:
            if each.name not in now:
                self._delete(each.name)
                continue
            name, nbytes = index_name(each.name), 8 * (now[each.name].samples + 1)
            if not any(e.nbytes == nbytes for e in self._store.list(name) if e.name == name):
                write_index(self._store, each.name)

    def _delete_all(self) -> None:
        """Delete the shards and rejects of a unit that has lost its receipt."""
        for shard in self._removal.shards:
            self._delete(shard.name)
        self._store.delete(rejects_name(self._removal.unit))

    def _delete(self, tar: str) -> None:
        for name in (tar, index_name(tar), rows_name(tar)):
            self._store.delete(name)

    def _read(self, name: str, missing: bytes | None = None) -> bytes:
        try:
            return self._store.read(name)
        except NotFoundError:
            if missing is None:
                raise self._unlike_receipt(name) from None
            return missing

    def _unlike_receipt(self, name: str) -> DamageError:
        return DamageError(f"{self._store.url}/{name}", UNLIKE_RECEIPT)

    # --- shards
    def _rewritten(self, shard: ShardRemoval, receipt: Receipt, naming: ExitStack) -> Rewritten:
        sink = naming.enter_context(self._store.write(shard.name))
        return self._copied(shard, DigestKind.from_settings(receipt.settings), sink)

    def _copied(self, removal: ShardRemoval, kind: DigestKind, sink: FileSink) -> Rewritten:
        offsets = self._offsets(removal)
        gone = _Taken(removal, offsets)
        before, after = kind.new(), kind.new()
        nbytes = 0
        chunks = Chunks(
            self._store,
            removal.name,
            watch=before.update,
            expected=removal.nbytes,
        )
        with closing(chunks):
            position = 0
            while chunk := chunks.next():
                for piece in gone.pieces(position, chunk):
                    sink.write(piece)
                    after.update(piece)
                    nbytes += len(piece)
                position += len(chunk)
        if before.hexdigest() != removal.digest:
            raise self._unlike_receipt(removal.name)
        sink.end()
        shard = Shard(removal.name, removal.samples - len(removal.rows), nbytes, after.hexdigest())
        return Rewritten(
            removal=removal, shard=shard, index=gone.index(), gone=tuple(gone.samples(self._store))
        )

    def _offsets(self, removal: ShardRemoval) -> Sequence[int]:
        """One that was killed may have left the index of what comes after."""
        try:
            return offsets_of(self._store, removal)
        except FormatError:
            write_index(self._store, removal.name)
            return offsets_of(self._store, removal)

    def _read_gone(self, removal: ShardRemoval) -> tuple[Fields, ...]:
        """Read the samples of a shard that loses all."""
        offsets = self._offsets(removal)
        gone = _Taken(removal, offsets)
        list(gone.pieces(0, self._store.read(removal.name)))
        return tuple(gone.samples(self._store))


class _Taken:
    """Parts the bytes of a tar: those of samples that go, and the rest."""

    def __init__(self, removal: ShardRemoval, offsets: Sequence[int]) -> None:
        self._removal, self._offsets = removal, np.array(offsets, np.int64)
        going = spans(self._offsets, np.array(removal.rows, np.uint32))
        # where what stays and what goes begin, in turn
        self._cuts = [edge for span in going for edge in (span.start, span.end)]
        self._gone: list[bytes] = []

    def pieces(self, position: int, chunk: bytes) -> Iterator[bytes]:
        """Yield what stays of a chunk of the tar at `position`."""
        start, end = position, position + len(chunk)
        at = bisect_right(self._cuts, position)
        while start < end:
            stop = min(end, self._cuts[at]) if at < len(self._cuts) else end
            piece = (
                chunk if stop - start == len(chunk) else chunk[start - position : stop - position]
            )
            if at % 2:
                self._gone.append(piece)
            elif piece:
                yield piece
            start, at = stop, at + 1

    def index(self) -> bytes:
        return encode_index(offsets_without(self._offsets, self._removal.rows))

    def samples(self, store: Store) -> Iterator[Fields]:
        """Yield the samples that go. Refuse them where the index has led to others."""
        what = f"{store.url}/{index_name(self._removal.name)}"
        data, at = b"".join(self._gone), 0
        sizes = np.diff(self._offsets)[list(self._removal.rows)].tolist()
        for nbytes, key in zip(sizes, self._removal.keys, strict=True):
            sample, at = data[at : at + nbytes], at + nbytes
            with naming_place(what):
                fields = dict(members_of(sample))
            if (parse_object(fields.get("json", b"")) or {}).get("key") != key:
                raise DamageError(what, "it leads to other samples", key)
            yield fields
