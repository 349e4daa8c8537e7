"""Rewrite a unit of work of a dataset without some of its samples, while the unit is held.

1. The shards that stay are written again, without names yet. The bytes that stay are copied between
   the offsets of the index; all bytes that are read go into the digest of the old tar.
2. The receipt is written: it says what the unit will be.
3. The files become what the receipt says: each is compared with it, and written if it differs. So
   after a kill the next run does the same again, from whatever it finds; and a file that still
   differs from the receipt was damaged, and is named.

The samples to remove are listed in the dataset before (`wdsprep.dataset.removed_samples`), with the
size and digest that each shard has then.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

import numpy as np
from blake3 import blake3

from wdsprep.changes.copy_samples import offsets_without
from wdsprep.dataset.coarse_histograms import count_sample, counted_columns
from wdsprep.dataset.damage import UNLIKE_RECEIPT, naming_place
from wdsprep.dataset.file_names import (
    captions_name,
    index_name,
    inputs_name,
    is_table,
    names_beside,
    receipt_name,
    rejects_name,
    table_name,
    tar_of,
)
from wdsprep.dataset.manifest import Receipt, Shard
from wdsprep.dataset.reindex import can_make_table, make_index, write_index, write_table
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject, hide_source, read_rejects, rejects_file
from wdsprep.dataset.removed_samples import Removed, ShardRemoval, UnitRemoval
from wdsprep.dataset.sample_table import table_columns, table_without
from wdsprep.dataset.samples import key_order, roles_of
from wdsprep.dataset.sealed_json import hex_digest, read_lines
from wdsprep.dataset.settings import SCORES, counted_as
from wdsprep.dataset.shapes import shape_ranges
from wdsprep.dataset.shard_reader import HashedTape, ShardReader
from wdsprep.dataset.stored_dataset import read_receipt
from wdsprep.dataset.tar import END
from wdsprep.dataset.tar.members import decode_index, encode_index
from wdsprep.dataset.tar.read import TarSample, scan
from wdsprep.dataset.unit_locks import Edition
from wdsprep.errors import DamageError, FormatError, NotFoundError
from wdsprep.packing.slices import without_facts
from wdsprep.sources.base import Item, ItemLine
from wdsprep.store.base import write_bytes
from wdsprep.tables.stored_tables import read_sound_columns

PIECE_NBYTES = 1 << 20
Files = dict[str, bytes]
"""The new contents of files by their names."""
Rewritten = tuple[Shard, bytes]
"""A shard without some of its samples, which has no name yet, and its index."""


class UnitChange:
    """The removal of samples from one unit of work.

    `image` is the digest that the removal has given the image shard of a unit of latents, or "" if
    that shard has lost all samples. It is None if the removal has not changed that shard, because
    its images have been packed over or are not there: then the unit stays one of the old shard.
    """

    def __init__(
        self, edition: Edition, removal: UnitRemoval, removed: Removed, image: str | None = None
    ) -> None:
        self._edition, self._store = edition, edition.store
        self._removal, self._removed, self._image = removal, removed, image
        self._rows = {shard.name: shard.rows for shard in removal.shards}

    def rewrite(self) -> Receipt | None:
        """Change the unit, and return its new receipt, or None if nothing is left of it."""
        unit = self._removal.unit
        with self._edition.holding(unit), ExitStack() as naming:
            try:
                receipt = read_receipt(self._store, unit)
            except NotFoundError:  # a repair has removed it, or an earlier run
                self._delete_all()
                return None
            if self._image is None and self._removal.is_ahead_of(receipt):
                self._removal = replace(self._removal, made_of="", lost_rows=())
            rewritten = []
            for shard in self._unchanged_shards(receipt):
                sink = naming.enter_context(self._store.write(shard.name))
                rewritten.append(self._copy_rest(shard, sink.write))
                sink.end()
            after, files = self._plan(receipt, rewritten)
            if not after.inputs and self._removal.made_of:
                self._store.delete(receipt_name(unit))
                self._delete_all()
                return None
            if after != receipt:
                write_bytes(self._store, receipt_name(unit), after.to_bytes())
            for name, data in files.items():
                if not is_table(name):
                    self._write(name, data)
            if receipt.dataset != "images":  # encode has taken captions of a table by now
                self._store.delete(captions_name(unit))
            naming.close()
            for new, index in rewritten:
                write_bytes(self._store, index_name(new.name), index)
            self._finish_shards(after)
            for name, data in files.items():
                if not is_table(name):
                    continue
                if data:
                    self._write(name, data)
                elif changed := write_table(self._store, after, tar_of(name)):
                    after = changed
                else:
                    raise self._unlike_receipt(name)
            return after

    def check_begun(self) -> None:
        """Raise DamageError if a file keeps `rewrite` from finishing what a killed run began.

        Nothing is written.
        """
        receipt = read_receipt(self._store, self._removal.unit)
        shards = self._unchanged_shards(receipt)
        self._plan(receipt, [self._copy_rest(shard, lambda _piece: None) for shard in shards])

    # --- the receipt
    def _unchanged_shards(self, receipt: Receipt) -> Iterator[ShardRemoval]:
        """Yield the tars that keep some samples, and still have those to remove.

        A tar has them too if a run was killed after it wrote the receipt. Raise DamageError if its
        size is neither the one before nor the one after.
        """
        stated = {shard.name: shard for shard in receipt.shards}
        for shard in self._removal.shards:
            if shard.is_all or is_table(shard.name):
                continue
            now = stated.get(shard.name)
            sizes = (e.nbytes for e in self._store.list(shard.name) if e.name == shard.name)
            nbytes = next(sizes, 0)
            if now and nbytes not in (shard.nbytes, now.nbytes):
                raise self._unlike_receipt(shard.name)
            is_new = now and now.digest != shard.digest and now.nbytes == shard.nbytes
            if nbytes == shard.nbytes and not is_new:
                yield shard

    def _plan(self, receipt: Receipt, rewritten: Sequence[Rewritten]) -> tuple[Receipt, Files]:
        """Return the new receipt, or the present one if that is the new one already, and the files.

        These are the new contents of rejects, inputs and tables by name. That of a table is empty
        if the table has to be made of its tar; a list of inputs that is lost or damaged is left
        out. Raise DamageError for a file that is neither as it was nor as it will be.
        """
        removal, new = self._removal, {shard.name: shard for shard, _ in rewritten}
        rejects, inputs = rejects_name(receipt.unit), inputs_name(receipt.unit)
        if removal.shards or removal.made_of:
            is_ahead = removal.is_ahead_of(receipt)
        else:  # the receipt shows nothing of rejects alone
            is_ahead = hex_digest(self._read(rejects)) == receipt.files[rejects]
        after = self._with_new_shards(receipt, new) if is_ahead else receipt
        present = {shard.name: shard.digest for shard in after.shards}
        for shard in new.values():
            if present.get(shard.name) != shard.digest:
                raise self._unlike_receipt(shard.name)
        # The digest of each file in the present receipt, and what makes its new content of the old.
        makers: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
            rejects: (receipt.files[rejects], self._make_rejects)
        }
        if receipt.dataset == "images":
            makers[inputs] = receipt.input, self._make_inputs
        for shard in after.shards:  # that lose samples, or some of whose positions become lower
            if shard.name in self._rows or removal.lost_rows:
                name = table_name(shard.name)
                make_table = partial(
                    table_without,
                    columns=table_columns(receipt.dataset, receipt.settings),
                    rows=self._rows.get(shard.name, ()),
                    what=f"{self._store.url}/{name}",
                    lost=removal.lost_rows,
                )
                makers[name] = receipt.table_digest(shard), make_table
        files: Files = {}
        for name, (stated, make) in makers.items():
            before = self._read(name)
            data: bytes | None = before
            if is_ahead or hex_digest(before) != stated:
                data = None
                with suppress(DamageError):
                    changed = make(before)
                    if hex_digest(before if is_ahead else changed) == stated:
                        data = changed
            if data is None and is_table(name) and can_make_table(receipt):
                data = b""
            if data is not None:
                files[name] = data
            elif name != inputs:
                raise self._unlike_receipt(name)
        return (self._with_files(after, files) if is_ahead else receipt), files

    def _with_new_shards(self, receipt: Receipt, new: Mapping[str, Shard]) -> Receipt:
        """Return a receipt with the new shards, their counts, and no shard that loses all.

        Raise DamageError for a tar that keeps some samples, and is not among the `new` shards.
        """
        emptied = {shard.name for shard in self._removal.shards if shard.is_all}
        shards = [new.get(s.name, s) for s in receipt.shards if s.name not in emptied]
        stated = {shard.name: shard for shard in receipt.shards}
        shapes = shape_ranges(receipt.settings, receipt.counts)
        kind, roles = counted_as(receipt.dataset, receipt.settings), roles_of(receipt.settings)
        gone: Counter[str] = Counter()  # the removed samples' share of each count
        for removal in self._removal.shards if kind != SCORES else ():
            if not removal.is_all and removal.name not in new:
                raise self._unlike_receipt(removal.name)
            names = counted_columns(roles)
            table = read_sound_columns(self._store, receipt, stated[removal.name], names)
            samples = table.take(np.array(removal.rows)).to_pylist()
            for row, facts in zip(removal.rows, samples, strict=True):
                shape = next((name for name, rows in shapes.items() if row in rows), "")
                count_sample(gone, kind, facts, shape, roles=roles)
        # If a table of captions has named only some samples, nobody knows which.
        gone["named"] = max(0, receipt.counts.get("named", 0) - sum(s.samples for s in shards))
        counts = {
            name: count - gone[name]
            for name, count in receipt.counts.items()
            if count != gone[name] or not count
        }
        gone_files = {captions_name(receipt.unit), *map(table_name, emptied)}
        files = {n: d for n, d in receipt.files.items() if n not in gone_files}
        return replace(receipt, shards=tuple(shards), counts=counts, files=files)

    def _with_files(self, receipt: Receipt, files: Files) -> Receipt:
        """Return a receipt with the digests of new files; "" for a table that is to be made.

        The input of latents becomes the new image shard, so that encode finds them up to date,
        unless the removal has not changed that shard, or has deleted it. After `encode --limit` the
        input also states how many samples of the image shard were encoded: those removed are taken
        off that number.
        """
        digests = {n: hex_digest(d) if d or not is_table(n) else "" for n, d in files.items()}
        shards = [  # of scores, which are tables
            Shard(s.name, s.samples - len(self._rows.get(s.name, ())), len(data), digests[s.name])
            if (data := files.get(s.name)) is not None
            else s
            for s in receipt.shards
        ]
        rejects, inputs = rejects_name(receipt.unit), inputs_name(receipt.unit)
        counts = Counter(r.code.value for r in read_rejects(files[rejects], rejects))
        elsewhere = {inputs, *(shard.name for shard in shards)}  # in the receipt
        input = digests.get(inputs, receipt.input)
        image, _, first = input.partition(":")
        if self._image and image == self._removal.made_of:  # which is "" for images
            input = self._image + (f":{int(first) - len(self._removal.keys)}" if first else "")
        return replace(
            receipt,
            input=input,
            inputs=sum(shard.samples for shard in shards) + counts.total(),
            shards=tuple(shards),
            rejects=dict(counts),
            files={**receipt.files, **{n: d for n, d in digests.items() if n not in elsewhere}},
        )

    # --- the content of the files
    def _make_rejects(self, data: bytes) -> bytes:
        """Return the new bytes of the file of rejects.

        Removed samples become rejects `removed`, with nothing that identifies them. Latents get no
        such rejects if their image shard loses these samples too. A reject whose record a repair
        could not read has another key by now, and nothing that identifies it.
        """
        gone = dict.fromkeys((key for shard in self._removal.shards for key in shard.keys), "")
        wanted, kept = frozenset(self._removal.rejects), []
        for reject in read_rejects(data, rejects_name(self._removal.unit)):
            if reject.key not in gone and reject.key not in wanted:
                kept.append(reject)
            else:  # by its source a slice that tries the row again finds the reject
                gone[reject.key] = hide_source(reject.source) if reject.source else ""
        if not self._removal.made_of:
            kept += [Reject(key=key, source=of, code=Code.REMOVED) for key, of in gone.items()]
            kept.sort(key=lambda reject: key_order(reject.key))
        return rejects_file(kept)[0]

    def _make_inputs(self, data: bytes) -> bytes:
        """Return the list of inputs without the metadata of removed samples."""
        lines = []
        for line in data.splitlines(keepends=True):
            if b'"{' in line:
                (record,) = read_lines(ItemLine, line, inputs_name(self._removal.unit))
                item = Item.from_line(record)
                if self._removed.has("source", item.name):
                    line = without_facts(item).to_json().encode()
            lines.append(line)
        return b"".join(lines)

    # --- writing the files
    def _write(self, name: str, data: bytes) -> None:
        if self._read(name) != data:
            write_bytes(self._store, name, data)

    def _finish_shards(self, receipt: Receipt) -> None:
        """Write what is missing beside each changed shard, and delete empty shards.

        An index whose size does not fit the samples of the shard counts as missing.
        """
        now = {shard.name: shard for shard in receipt.shards}
        for removal in self._removal.shards:
            if removal.name not in now:
                self._delete(removal.name)
            elif not is_table(removal.name):
                name, nbytes = index_name(removal.name), 8 * (now[removal.name].samples + 1)
                if not any(e.nbytes == nbytes for e in self._store.list(name) if e.name == name):
                    write_index(self._store, removal.name)

    def _delete_all(self) -> None:
        """Delete the shards and rejects of a unit that has no receipt any more."""
        for shard in self._removal.shards:
            self._delete(shard.name)
        self._store.delete(rejects_name(self._removal.unit))
        self._store.delete(captions_name(self._removal.unit))

    def _delete(self, tar: str) -> None:
        for name in (tar, *names_beside(tar)):
            self._store.delete(name)

    def _read(self, name: str) -> bytes:
        """Return the content of a file, or b"" if there is none."""
        with suppress(NotFoundError):
            return self._store.read(name)
        return b""

    def _unlike_receipt(self, name: str) -> DamageError:
        return DamageError(f"{self._store.url}/{name}", UNLIKE_RECEIPT)

    # --- shards
    def _copy_rest(self, removal: ShardRemoval, write: Callable[[bytes], object]) -> Rewritten:
        """Copy the samples of a shard that stay, check its digest, and return the new shard.

        Where samples begin is read from the tar if the index does not fit.
        """
        place = f"{self._store.url}/{removal.name}"
        try:
            index = ShardReader(self._store, removal).offsets
        except FormatError:
            with naming_place(place):
                index = decode_index(make_index(self._store, removal.name), place)
        offsets = np.array(index, np.int64)
        rows = np.array(removal.rows)
        starts = [*offsets[rows].tolist(), removal.nbytes]
        ends = [*offsets[rows + 1].tolist(), removal.nbytes]
        after, gone = blake3(), list[bytes]()
        with HashedTape(self._store, removal) as tape:
            for position, start, end in zip([0, *ends[:-1]], starts, ends, strict=True):
                while piece := tape.at(position, min(PIECE_NBYTES, start - position)):
                    write(piece)
                    after.update(piece)
                    position += len(piece)
                gone.append(tape.at(start, end - start))
            tape.check(removal.digest)
        for key, sample in zip(removal.keys, gone, strict=False):
            if _keys_in(sample) != [key]:
                what = f"{self._store.url}/{index_name(removal.name)}"
                raise DamageError(what, "it leads to other samples", key)
        samples, nbytes = removal.samples - len(rows), removal.nbytes - sum(map(len, gone))
        shard = Shard(removal.name, samples, nbytes, after.hexdigest())
        return shard, encode_index(offsets_without(offsets, removal.rows))


def _keys_in(data: bytes) -> list[str]:
    """Return the keys of the samples in a part of a tar, with "" for one that is not whole."""
    tar = data + END
    samples = scan(lambda at, nbytes: tar[at : at + nbytes], wants=lambda *_: False)
    return [sample.key if isinstance(sample, TarSample) else "" for sample in samples]
