"""The files of one unit of work in the making: all of them get their names at once, or none does.

`unit_locks` says why. Until then they lie under temporary names, or in uploads that nobody sees.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wdsprep.dataset.file_names import (
    index_name,
    inputs_name,
    is_index,
    is_table,
    receipt_name,
    rejects_name,
    table_name,
)
from wdsprep.dataset.manifest import Receipt, Shard
from wdsprep.dataset.rejects import RejectsFile
from wdsprep.dataset.removed_samples import removed_from
from wdsprep.dataset.sample_table import Columns, TableWriter
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.stored_dataset import check_same, find_receipt
from wdsprep.dataset.tar.write import Data, TarWriter
from wdsprep.dataset.unit_locks import Edition
from wdsprep.errors import BusyError, ExistsError, NotFoundError
from wdsprep.store.base import FileSink
from wdsprep.store.local import allow_files

if TYPE_CHECKING:
    import pyarrow as pa

OTHER_FILES = 512
TWICE = (
    "%s: another run or worker has finished %s first, so the same work was done twice: end one of "
    "the runs"
)
_log = logging.getLogger("wdsprep")


class Draft:
    """The files that a unit of work is writing. They are dropped unless `finish` is called."""

    def __init__(self, edition: Edition, unit: str) -> None:
        self.unit, self._edition, self.writers = unit, edition, ExitStack()
        self._files: list[FileSink] = []
        self._named, self._receipt = ExitStack(), ExitStack()
        self.beside: dict[str, bytes] = {}
        """The indexes and tables of shards that are complete."""

    def __enter__(self) -> "Draft":
        self.removed = removed_from(self._edition.store)
        self.rejects = RejectsFile(self.open(rejects_name(self.unit)))
        return self

    def __exit__(self, *raised: Any) -> None:
        error = raised[1] or RuntimeError("what was not finished gets no name")
        try:
            self.writers.close()  # waits for threads, where SIGTERM may find us
        finally:
            for names in (self._receipt, self._named):
                names.__exit__(type(error), error, raised[2])

    def shard(self, name: str, columns: Columns | None = None) -> "DraftShard":
        """Begin a tar with its index and, if that has columns, its table; or a table alone.

        The name tells which.
        """
        allow_files(len(self.beside) + OTHER_FILES)  # each stays open until all are whole
        return DraftShard(self, name, columns)

    def open(self, name: str) -> FileSink:
        """Begin a file that gets its name with all others."""
        self._files.append(self._named.enter_context(self._edition.store.write(name)))
        return self._files[-1]

    def finish(
        self,
        receipt: Receipt,
        beside: Mapping[str, bytes],
        check: Callable[[], object] = lambda: None,
    ) -> Receipt:
        """Give the files their names, the receipt last, and return the receipt of the unit.

        `beside` are more files of the unit, by name. Their digests and those of the tables are
        added to the receipt, but for inputs, whose digest it has as `input`. If another run has
        finished the unit meanwhile, all files are dropped, and the receipt of that run is returned.
        `check` is called before the names are given, and may raise an error. Raise BusyError if
        samples were removed from the dataset meanwhile, or if the unit was locked for too long.
        """
        digests: dict[str, str] = {}
        for name, data in {**self.beside, **beside}.items():
            self.open(name).write(data)
            if not is_index(name) and name != inputs_name(self.unit):
                digests[name] = hex_digest(data)
        receipt = replace(receipt, files={**receipt.files, **digests})
        name = receipt_name(self.unit)
        last = self._receipt.enter_context(self._edition.store.write(name, exclusive=True))
        last.write(receipt.to_bytes())
        files = [*self._files, last]
        for file in files:
            file.end()
        try:
            with self._edition.holding(self.unit, giving=files):
                if done := self._done(receipt):
                    if (url := self._edition.store.url) not in _warned:
                        _warned.add(url)
                        _log.warning(TWICE, url, self.unit)
                    return done
                check()
                if removed_from(self._edition.store).changes != self.removed.changes:
                    raise BusyError(
                        f"samples were removed while {self.unit} was made: it has to be done again"
                    )
                self._named.close()
                try:
                    self._receipt.close()
                except ExistsError:
                    check_same(self._edition.store, receipt)
                return receipt
        except NotFoundError as lost:  # they were taken away: this process was stopped for a while
            with self._edition.holding(self.unit):
                if done := self._done(receipt):
                    return done
            raise BusyError(f"{self.unit} was locked too long: it has to be done again") from lost

    def _done(self, receipt: Receipt) -> Receipt | None:
        return find_receipt(self._edition.store, self.unit, receipt.input, receipt.settings)


_warned = set[str]()
"""The datasets for which this process has warned of another run."""


class DraftShard:
    """A shard that is being written: a tar, its index and its table, or a table alone."""

    def __init__(self, draft: Draft, name: str, columns: Columns | None) -> None:
        self.name, self.samples, self._beside = name, 0, draft.beside
        self._sink = draft.open(name)
        self._table = TableWriter(columns) if columns else None
        self._closing = draft.writers.enter_context(ExitStack())  # ends the tar's thread
        self._writer: TarWriter | None = None
        if not is_table(name):
            self._writer = self._closing.enter_context(TarWriter(self._sink))

    @property
    def nbytes(self) -> int:
        return self._writer.nbytes if self._writer else 0

    def add(
        self,
        key: str,
        fields: Sequence[tuple[str, Data]],
        *,
        facts: Mapping[str, Any] | None = None,
        meta: bytes | None = None,
    ) -> None:
        """Add a sample.

        If the shard has a table, `facts` are the object in its json, and `meta` is the text of
        their `meta`, if that is known.
        """
        if self._writer:
            self._writer.add(key, fields)
        self.samples += 1
        if self._table and facts is not None:
            self._table.add(key, facts, meta)

    def add_tarred(
        self, keys: Sequence[str], sizes: Sequence[int], blocks: Iterable[bytes | memoryview]
    ) -> None:
        """Add samples that lie in another shard, without their rows."""
        if self._writer:
            self._writer.add_tarred(keys, sizes, blocks)
        self.samples += len(keys)

    def add_rows(self, rows: "pa.Table") -> None:
        """Add to the table the rows of samples that `add_tarred` has added to the tar."""
        if self._table:
            self._table.add_rows(rows)

    def reserve(self, key: str, names: Sequence[str]) -> None:
        """Reserve the key of a sample. Raise now the error that `add` would raise later."""
        if self._writer:
            self._writer.reserve(key, names)

    def finish(self, *, waits: bool = False) -> Shard:
        """Complete the shard, and return its entry for the receipt.

        The index and the table are kept for the draft to write. With `waits`, bytes of the tar that
        would stay in memory until the whole unit is finished are sent now.
        """
        table = self._table.finish() if self._table else b""
        if (tar := self._writer) is None:
            self._sink.write(table)
            return Shard(self.name, self.samples, len(table), hex_digest(table))
        tar.finish()
        self._closing.close()
        self._beside[index_name(self.name)] = tar.index
        if self._table:
            self._beside[table_name(self.name)] = table
        if waits:
            self._sink.end(waits=True)
        return Shard(self.name, tar.samples, tar.nbytes, tar.digest)
