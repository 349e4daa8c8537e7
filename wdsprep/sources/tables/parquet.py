"""Parquet files of a store, read batch by batch.

So no file, and no row group, is ever in memory as a whole. Footers alone tell how many rows there
are.
"""

import io
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.sample_table import is_marked
from wdsprep.errors import SourceError
from wdsprep.sources.parsing import (
    check_columns,
    check_rows,
    check_unpacked,
    parsing_file,
    parsing_sample,
)
from wdsprep.sources.tables import TableRow
from wdsprep.store.base import Store

BATCH_ROWS = 1_000
READ_ROWS, READ_NBYTES, FEW_ROWS = 1 << 16, 16 << 20, 16
"""The most rows that are read at once, about how many bytes of them, and how many rows are read
at least, and of bytes and nested values."""
BUFFER_NBYTES = 1 << 20
TEXTS = frozenset({pa.string(), pa.large_string()})
BYTES = frozenset({pa.binary(), pa.large_binary(), pa.binary_view()})
NUMBERS = {"bool": "|b1", "int": "<i8", "uint64": "<u8", "float": "<f4", "double": "<f8"}
"""Kinds of columns of numbers, and how NumPy may hold them."""


class ParquetTable:
    """A Parquet file that is read as a table whose rows are small.

    A part of it is a run of row groups, or some rows of a group that has more than a slice takes.
    Only the part that is read is ever decoded at once.
    """

    has_schema = True

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name

    @cached_property
    def _footer(self) -> "OpenParquet":
        """Return the file as its footer describes it. It is closed."""
        with open_parquet(self.store, self.name) as file:
            return file

    @property
    def schema(self) -> pa.Schema:
        return self._footer.schema

    def columns(self) -> list[str]:
        return list(self.schema.names)

    def kinds(self) -> dict[str, str]:
        """Return the kind of each column: "text", a key of NUMBERS, or "" for any other type.

        Decimals count as doubles, which hold them but for rounding.
        """
        return {field.name: _kind(field.type) for field in self.schema}

    def batches(self, columns: Sequence[str], rows: int) -> Iterator[dict[str, Any]]:
        """Yield some columns as Arrow arrays by their names, up to `rows` rows at a time."""
        with open_parquet(self.store, self.name) as file:
            for batch in file.batches(rows, columns=columns):
                yield {name: batch.column(name) for name in columns}

    def values(self, columns: Sequence[str], rows: int) -> Iterator[list[list[Any]]]:
        for batch in self.batches(list(dict.fromkeys(columns)), rows):
            yield [values_in(batch[name]) for name in columns]

    def texts(self) -> list[str]:
        """Return the columns that may hold URLs."""
        return [field.name for field in self.schema if _is_text_type(field.type)]

    def parts(self, rows: int, *, cuts_groups: bool = True) -> Iterator[tuple[str, int]]:
        """Cut the table into parts of up to `rows` rows. Yield each one's place and number of rows.

        The place is what the method `rows` takes. A row group that has more rows is a part as a
        whole, unless `cuts_groups`.
        """
        for first, last, count in self._footer.runs(rows):
            most = rows if cuts_groups else count
            for skipped in range(0, count, most):
                taken = min(most, count - skipped)
                yield f"{first}:{last}:{skipped}:{taken}", taken

    def rows(self, where: str, only: Collection[str] = ()) -> Iterator[tuple[int, TableRow]]:
        """Yield the rows of a part, each after its number in the table, which counts from 0.

        `where` is the place of the part. A row that cannot be read is a RejectedError. If `only`
        names columns, no others are read.
        """
        first, last, skipped, taken = map(int, where.split(":"))
        with open_parquet(self.store, self.name) as file:
            before, at = sum(file.groups[:first]), 0
            for batch in file.batches(BATCH_ROWS, groups=range(first, last), columns=only):
                start, end = max(skipped - at, 0), min(skipped + taken - at, batch.num_rows)
                if start < end:
                    rows = rows_in(batch.slice(start, end - start))
                    yield from enumerate(rows, before + at + start)
                at += batch.num_rows
                if at >= skipped + taken:
                    return


def _kind(kind: pa.DataType) -> str:
    if _is_text_type(kind):
        return "text"
    if pa.types.is_boolean(kind):
        return "bool"
    if pa.types.is_integer(kind):
        return "uint64" if pa.types.is_uint64(kind) else "int"
    if pa.types.is_decimal(kind):
        return "double"
    if pa.types.is_floating(kind):
        return "double" if pa.types.is_float64(kind) else "float"
    return ""


def _is_text_type(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return kind in TEXTS or kind == pa.string_view()


def rows_in(
    batch: pa.RecordBatch,
    convert: Callable[[pa.RecordBatch], list[dict[str, Any]]] = pa.RecordBatch.to_pylist,
) -> list[TableRow]:
    """Return the rows of a batch, as `convert` makes them.

    A RejectedError replaces a row that is damaged or that Python cannot hold, such as one with a
    text that is not UTF-8, or with a date beyond the year 9999.
    """
    return _one_by_one(batch, lambda some: [*convert(some)])


def values_in(column: pa.Array) -> list[Any]:
    """Return the values of a column. A value that cannot be read is replaced by a RejectedError."""
    return _one_by_one(column, lambda some: [*some.to_pylist()])


def _one_by_one(some: Any, convert: Callable[[Any], list[Any]]) -> list[Any]:
    """Convert Arrow data to Python, one value at a time if not all can be converted.

    A value that cannot be converted is replaced by a RejectedError. Arrow reads out
    of bounds if its data is not valid, so the data is validated first.
    """
    try:
        with parsing_sample("the row"):
            some.validate(full=True)
            return convert(some)
    except RejectedError as refused:
        if len(some) == 1:
            return [refused]
        return [row for at in range(len(some)) for row in _one_by_one(some.slice(at, 1), convert)]


def read_rows(store: Store, name: str) -> Iterator[TableRow]:
    """Yield the rows of a small table, but none of a table of samples that wdsprep made."""
    with open_parquet(store, name) as file:
        for batch in () if is_marked(file.schema.metadata) else file.batches(1_000):
            yield from rows_in(batch)


@contextmanager
def open_parquet(store: Store, name: str) -> "Iterator[OpenParquet]":
    with closing(OpenParquet(store, name)) as file:
        yield file


class OpenParquet:
    """A Parquet file whose columns and rows have been checked, as its footer has them.

    A footer may lie, and what pages hold is not known before they are read: one that unpacks to
    2 GB does so, and so does a list of as many values, before they are refused. What a footer says
    of column chunks is not asked for: over damaged ones pyarrow ends the process.

    A page may name one long value of its dictionary a million times. So texts are read as their
    dictionaries, and a batch is made of these only once it is known how long it will be. Arrow does
    not do that for values in structs and lists, and of a column of bytes it would hold all
    dictionaries to the end of a row group. So of these few rows are read at once.
    """

    def __init__(self, store: Store, name: str, content: bytes | None = None) -> None:
        """Open a file. `content` are its bytes, if the caller has them."""
        self.what = f"{store.url}/{name}"
        stored = StoreFile(store, name) if content is None else None
        nbytes = stored.nbytes if stored else len(content or b"")
        with self._parsing():
            file = pa.PythonFile(stored, "r") if stored else pa.BufferReader(content)
            self._file = pq.ParquetFile(file, buffer_size=BUFFER_NBYTES, pre_buffer=False)
            schema = self._file.schema_arrow
            for at, field in enumerate(schema):
                if pa.types.is_dictionary(field.type):
                    schema = schema.set(at, field.with_type(field.type.value_type))
            self.schema: pa.Schema = schema
            about = self._file.metadata
            texts = [f.name for f in self.schema if f.type in TEXTS]
            self._file = pq.ParquetFile(
                file,
                metadata=about,
                read_dictionary=texts,
                buffer_size=BUFFER_NBYTES,
                pre_buffer=False,
                page_checksum_verification=is_marked(self.schema.metadata),  # as ours have sums
            )
            names = list(self.schema.names)
            groups = [about.row_group(group) for group in range(about.num_row_groups)]
            self.groups = [group.num_rows for group in groups]
            unpacked = [group.total_byte_size for group in groups]
        self._nbytes, self._unpacked = nbytes, unpacked
        check_columns(self.what, names)
        for rows in (*self.groups, sum(self.groups)):
            check_rows(self.what, rows, nbytes)
        for group_nbytes in unpacked:
            check_unpacked(self.what, group_nbytes, nbytes)

    @property
    def rows(self) -> int:
        return sum(self.groups)

    def batches(
        self, rows: int, *, groups: Sequence[int] | None = None, columns: Collection[str] = ()
    ) -> Iterator[pa.RecordBatch]:
        """Yield up to `rows` rows at a time, of these row groups and columns, or of all."""
        names = list(columns or self.schema.names)
        kinds = [self.schema.field(name).type for name in names]
        reads_few = any(pa.types.is_nested(kind) or kind in BYTES for kind in kinds)
        with self._parsing():
            for group in range(len(self.groups)) if groups is None else groups:
                mean_nbytes = max(1, self._unpacked[group] // max(1, self.groups[group]))
                some = FEW_ROWS if reads_few else max(FEW_ROWS, READ_NBYTES // mean_nbytes)
                batches = self._file.iter_batches(
                    min(some, READ_ROWS), row_groups=[group], columns=names, use_threads=False
                )
                for batch in batches:
                    for at in range(0, batch.num_rows, rows):
                        yield self._decode(batch.slice(at, rows))

    def read(self, columns: Collection[str]) -> pa.Table:
        """Return all rows, with those of these columns that the file has.

        If it has none of them, return its first column, so the rows are known at least.
        """
        names = [name for name in self.schema.names if name in columns] or self.schema.names[:1]
        schema = pa.schema([self.schema.field(name) for name in names])
        return pa.Table.from_batches(self.batches(READ_ROWS, columns=names), schema)

    def _decode(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return a batch without dictionaries. Raise SourceError if it would be too large."""
        check_unpacked(self.what, sum(map(_decoded_nbytes, batch.columns)), self._nbytes)
        schema = pa.schema([self.schema.field(name) for name in batch.schema.names])
        return batch.cast(schema)

    def runs(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """Yield runs of row groups: the first group, the one after the last, the number of rows.

        A run has up to `rows` rows, or is one group that has more.
        """
        first = taken = 0
        for group, here in enumerate(self.groups):
            if taken and taken + here > rows:
                yield first, group, taken
                first, taken = group, 0
            taken += here
        if taken:
            yield first, len(self.groups), taken

    def close(self) -> None:
        self._file.close()

    def _parsing(self) -> AbstractContextManager[None]:
        advice = "fetch it again, or move it away"
        return parsing_file(self.what, "is not a valid Parquet file", advice)


def _decoded_nbytes(column: pa.Array) -> int:
    """Return how many bytes the values of a column have without a dictionary."""
    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    column.validate()
    if column.type.value_type not in TEXTS | BYTES:
        return int(column.nbytes) + len(column) * 8
    lengths = pc.cast(pc.binary_length(column.dictionary), pa.int64())
    return int(pc.sum(lengths.take(column.indices)).as_py() or 0)  # which checks the indices


class StoreFile(io.RawIOBase):
    """A file of a store that can be read from any place, as readers of Parquet want it."""

    def __init__(self, store: Store, name: str) -> None:
        entry = next((e for e in store.list(name) if e.name == name), None)
        if entry is None:
            raise SourceError(f"{store.url}/{name} was listed, then gone: put it back")
        self._store, self._name, self.nbytes, self._position = store, name, entry.nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.nbytes}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self.nbytes - self._position)
        nbytes = left if size is None or size < 0 else min(size, left)
        data = self._store.read(self._name, start=self._position, nbytes=nbytes)
        self._position += len(data)
        return data
