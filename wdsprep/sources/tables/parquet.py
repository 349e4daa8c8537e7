"""Parquet files of a store: their rows are read batch by batch, so that no file, and no row group,
is ever in memory as a whole. Footers alone tell how many rows there are.
"""

import io
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.errors import SourceError
from wdsprep.sources.tables import TableRow
from wdsprep.store.base import Store

BATCH_ROWS = 1_000
BUFFER_NBYTES = 1 << 20
NUMBERS = {"bool": "|b1", "int": "<i8", "float": "<f4", "double": "<f8"}
"""Kinds of columns of numbers, and how NumPy may hold them."""


class ParquetTable:
    """A table whose rows are small. A part of it is a run of row groups, or some rows of one group
    that has more than a slice takes; only what is read of a group is ever decoded at once."""

    has_schema = True

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name

    @cached_property
    def schema(self) -> pa.Schema:
        with open_parquet(self.store, self.name) as file:
            return file.schema_arrow

    def columns(self) -> list[str]:
        return list(self.schema.names)

    def kinds(self) -> dict[str, str]:
        """Of each column: text, one of NUMBERS, or nothing."""
        return {field.name: _kind(field.type) for field in self.schema}

    def batches(self, columns: Sequence[str], rows: int) -> Iterator[dict[str, Any]]:
        """Some columns as Arrow has them, so many rows at a time."""
        with open_parquet(self.store, self.name) as file:
            for batch in file.iter_batches(rows, columns=list(columns), use_threads=False):
                yield {name: batch.column(name) for name in columns}

    def values(self, columns: Sequence[str], rows: int) -> Iterator[list[list[Any]]]:
        for batch in self.batches(list(dict.fromkeys(columns)), rows):
            yield [_values(batch[name]) for name in columns]

    def texts(self) -> list[str]:
        """The columns that may hold URLs."""
        return [field.name for field in self.schema if _is_text(field.type)]

    def parts(self, rows: int) -> Iterator[tuple[str, int]]:
        """Up to `rows` rows each: where they are, and how many."""
        with open_parquet(self.store, self.name) as file:
            for first, last, count in runs(file.metadata, rows):
                for skipped in range(0, count, rows):
                    taken = min(rows, count - skipped)
                    yield f"{first}:{last}:{skipped}:{taken}", taken

    def rows(self, where: str, only: Collection[str] = ()) -> Iterator[tuple[int, TableRow]]:
        """The rows of a part with their numbers in the table; `only` those columns of them."""
        first, last, skipped, taken = map(int, where.split(":"))
        with open_parquet(self.store, self.name) as file:
            before = sum(file.metadata.row_group(group).num_rows for group in range(first))
            batches = file.iter_batches(
                BATCH_ROWS,
                row_groups=range(first, last),
                columns=list(only) or None,
                use_threads=False,
            )
            at = 0
            for batch in batches:
                start, end = max(skipped - at, 0), min(skipped + taken - at, batch.num_rows)
                if start < end:
                    rows = rows_in(batch.slice(start, end - start))
                    yield from enumerate(rows, before + at + start)
                at += batch.num_rows
                if at >= skipped + taken:
                    return


def _kind(kind: pa.DataType) -> str:
    if _is_text(kind):
        return "text"
    if pa.types.is_boolean(kind):
        return "bool"
    if pa.types.is_integer(kind):
        return "int"
    if pa.types.is_floating(kind):
        return "double" if pa.types.is_float64(kind) else "float"
    return ""


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def rows_in(batch: pa.RecordBatch) -> list[TableRow]:
    """The rows of a batch. One that Python cannot hold, as a text that is not UTF-8 or a date
    beyond the year 9999, is refused alone."""
    try:
        return list(batch.to_pylist())
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1:
            return [RejectedError(Code.UNREADABLE, f"{type(error).__name__}: {error}")]
        return [row for at in range(batch.num_rows) for row in rows_in(batch.slice(at, 1))]


def _values(column: pa.Array) -> list[Any]:
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError) as error:
        if len(column) == 1:
            return [RejectedError(Code.UNREADABLE, f"{type(error).__name__}: {error}")]
        return [value for at in range(len(column)) for value in _values(column.slice(at, 1))]


def read_rows(store: Store, name: str) -> Iterator[TableRow]:
    """The rows of a small table."""
    with open_parquet(store, name) as file:
        for batch in file.iter_batches(1_000, use_threads=False):
            yield from rows_in(batch)


def open_parquet(store: Store, name: str) -> pq.ParquetFile:
    try:
        file = StoreFile(store, name)
        return pq.ParquetFile(pa.PythonFile(file, "r"), buffer_size=BUFFER_NBYTES, pre_buffer=False)
    except pa.ArrowInvalid as error:
        why = str(error).partition(". ")[0].rstrip(".")
        raise SourceError(
            f"{store.url}/{name} is no sound Parquet file ({why}): fetch it again, or move it away"
        ) from error


def runs(metadata: pq.FileMetaData, rows: int) -> Iterator[tuple[int, int, int]]:
    """Runs of row groups with up to `rows` rows each, or of one group that has more: the first
    group, the one after the last, the rows."""
    first = taken = 0
    for group in range(metadata.num_row_groups):
        here = metadata.row_group(group).num_rows
        if taken and taken + here > rows:
            yield first, group, taken
            first, taken = group, 0
        taken += here
    if taken:
        yield first, metadata.num_row_groups, taken


class StoreFile(io.RawIOBase):
    """A file of a store that can be read anywhere, as Parquet's readers want it."""

    def __init__(self, store: Store, name: str) -> None:
        entry = next((e for e in store.list(name) if e.name == name), None)
        if entry is None:
            raise SourceError(f"{store.url}/{name} was listed, then gone: put it back")
        self._store, self._name, self._nbytes, self._position = store, name, entry.nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self._nbytes - self._position)
        nbytes = left if size is None or size < 0 else min(size, left)
        data = self._store.read(self._name, start=self._position, nbytes=nbytes)
        self._position += len(data)
        return data
