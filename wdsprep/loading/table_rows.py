"""Read the rows of a table, some at a time, for `sorted_table`.

Each batch has the keys first, as bytes; rows without a key are left out. Parquet says what types
its columns have. In a table that is text, all values together decide: a column is one of whole
numbers until the first value that is none. So its cells are sorted as texts, and parsed once all
are known.
"""

import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from wdsprep.errors import UsageError
from wdsprep.loading.table_keys import KEY, WantedColumns, encode_keys
from wdsprep.sources.tables.files import Table
from wdsprep.sources.tables.parquet import NUMBERS, ParquetTable, values_in
from wdsprep.text import plural

ROWS_AT_ONCE = 1 << 16
LONGEST_NBYTES = 4096
"""The limit on a key's length: all keys are held in rows as long as the longest."""
BYTES = pa.large_binary()
SCALARS = {int, float, bool, str}
_log = logging.getLogger("wdsprep")
Columns = dict[str, NDArray[Any]]


class TableRows:
    """The rows of a table, which are read in batches.

    Once all have been read, these are known: the `columns` of numbers that are wanted with their
    dtypes, the names of all that are `offered`, the names of the columns of `texts`, the `count` of
    rows, and the bytes of the longest key.
    """

    columns: Mapping[str, str]
    offered: Collection[str]
    texts: Sequence[str]

    def __init__(self, place: str, wanted: WantedColumns) -> None:
        self.place, self.wanted = place, wanted
        self.count, self.width = 0, 1

    def batches(self) -> Iterator[pa.RecordBatch]:
        raise NotImplementedError

    def values(
        self, batch: pa.RecordBatch
    ) -> tuple[Columns, dict[str, pa.Array], NDArray[np.bool_]]:
        """Return the numbers of a batch, its texts, and which rows lack no number.

        A missing number may also be NaN.
        """
        numbers = {n: batch.column(n).to_numpy(zero_copy_only=False) for n in self.columns}
        texts = {name: batch.column(name) for name in self.texts}
        return numbers, texts, np.ones(len(batch), np.bool_)

    def note_keys(self, keys: pa.Array) -> pa.Array:
        """Count keys and note the longest; return the keys as they are stored.

        Keys of more than LONGEST_NBYTES become empty, as no sample can have them. Zero bytes at
        the end of a key are removed.
        """
        self.count += len(keys)
        lengths = pc.binary_length(keys)
        if (pc.max(lengths).as_py() or 0) > LONGEST_NBYTES:
            keys = pc.if_else(pc.greater(lengths, LONGEST_NBYTES), pa.scalar(b"", BYTES), keys)
        self.width = max(self.width, pc.max(pc.binary_length(keys)).as_py() or 0)
        if pc.any(pc.ends_with(keys, pattern=b"\0")).as_py():  # rows of NumPy end without these
            keys = pa.array([key.rstrip(b"\0") for key in keys.to_pylist()], BYTES)
        return keys


def open_rows(place: str, table: Table, wanted: WantedColumns) -> TableRows:
    if isinstance(table, ParquetTable):
        return _ParquetRows(place, table, wanted)
    return _TextRows(place, table, wanted)


class _ParquetRows(TableRows):
    def __init__(self, place: str, table: ParquetTable, wanted: WantedColumns) -> None:
        super().__init__(place, wanted)
        kinds = table.kinds()
        if kinds[KEY] != "text":
            raise UsageError(
                f"the column {KEY} of {place} holds {kinds[KEY] or 'something else'}: write keys "
                "as texts, as the shards have them, such as '000000000012'"
            )
        self._table = table
        self.offered = {name: NUMBERS[kind] for name, kind in kinds.items() if kind in NUMBERS}
        if wanted.for_batches:  # tensors of unsigned numbers are of little use
            self.offered = {n: dtype.replace("u", "i") for n, dtype in self.offered.items()}
        self.columns = wanted.choose_numbers(self.offered)
        self.texts = [name for name in sorted(wanted.named) if kinds[name] == "text"]

    def batches(self) -> Iterator[pa.RecordBatch]:
        names = [KEY, *self.columns, *self.texts]
        for batch in self._table.batches(names, ROWS_AT_ONCE):
            keys = self.note_keys(_as_bytes(batch[KEY]))
            good = pc.not_equal(keys, b"").to_numpy(zero_copy_only=False)
            numbers = [pa.array(self._convert(name, batch[name], good)) for name in self.columns]
            arrays = [keys, *numbers, *(_as_bytes(batch[name]) for name in self.texts)]
            whole = pa.RecordBatch.from_arrays(arrays, names)
            yield whole if good.all() else whole.filter(pa.array(good))

    def _convert(self, name: str, column: Any, good: NDArray[np.bool_]) -> NDArray[Any]:
        """Return the numbers of a column, and clear `good` for rows that have none."""
        dtype = self.columns[name]
        if column.null_count:
            good &= ~column.is_null().to_numpy(zero_copy_only=False)
            column = column.fill_null(False if dtype == "|b1" else 0)
        numbers: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        if dtype == "<i8" and numbers.dtype == np.uint64 and (numbers >> 63).any():
            raise UsageError(
                f"the column {name} of {self.place} has numbers beyond 2^63, which batches cannot "
                "hold: write them as texts, or leave the column out"
            )
        return numbers.astype(dtype)


def _as_bytes(column: pa.Array) -> pa.Array:
    """Return the texts of a column as bytes; nulls and invalid UTF-8 become empty."""
    try:
        column.validate(full=True)
    except pa.ArrowException:
        values = values_in(column)
        return pa.array(
            encode_keys([text if isinstance(text, str) else "" for text in values]), BYTES
        )
    return column.cast(pa.large_string()).fill_null("").cast(BYTES)


class _TextRows(TableRows):
    def __init__(self, place: str, table: Table, wanted: WantedColumns) -> None:
        super().__init__(place, wanted)
        self._table = table
        self._kinds: dict[str, _ColumnType] = {}

    def batches(self) -> Iterator[pa.RecordBatch]:
        unreadable = 0
        for where, _ in self._table.parts(sys.maxsize):
            every = (row for _, row in self._table.rows(where))
            while some := list(islice(every, ROWS_AT_ONCE)):
                rows = [row for row in some if isinstance(row, dict)]
                unreadable += len(some) - len(rows)
                yield self._batch(rows)
        if unreadable:
            lines = plural(unreadable, "row")
            _log.warning("%s: left out %s that cannot be read", self.place, lines)
        kinds = {name: kind.dtype for name, kind in self._kinds.items()}
        self.offered = {name: dtype for name, dtype in kinds.items() if dtype}
        self.columns = self.wanted.choose_numbers(self.offered)
        self.texts = [n for n, dtype in kinds.items() if not dtype and n in self.wanted.named]

    def _batch(self, rows: "list[dict[str, Any]]") -> pa.RecordBatch:
        keys = [row.get(KEY) or "" for row in rows]
        _check_keys(self.place, keys)
        named = self.note_keys(pa.array(encode_keys(keys), BYTES))
        columns = {KEY: named}
        for name in dict.fromkeys(name for row in rows for name in row if name != KEY):
            values = [row.get(name) for row in rows]
            kind = self._kinds.setdefault(name, _ColumnType())
            kind.note([value for value in values if value is not None])
            if name in self.wanted.named or (self.wanted.for_batches and kind.is_number):
                columns[name] = _cells(values)
        batch = pa.RecordBatch.from_pydict(columns)
        return batch.filter(pc.not_equal(named, b""))

    def values(
        self, batch: pa.RecordBatch
    ) -> tuple[Columns, dict[str, pa.Array], NDArray[np.bool_]]:
        numbers: Columns = {}
        has_numbers = np.ones(len(batch), np.bool_)
        for name, dtype in self.columns.items():
            cells = _column(batch, name)
            has_numbers &= cells.is_valid().to_numpy(zero_copy_only=False)
            filled = cells.fill_null(b"False" if dtype == "|b1" else b"0")
            numbers[name] = _numbers_in(filled, dtype, self._kinds[name].types)
        texts = {name: _column(batch, name).fill_null(b"") for name in self.texts}
        return numbers, texts, has_numbers


def _cells(values: Sequence[Any]) -> pa.Array:
    """Return values of any type as the texts that a CSV would have for them."""
    if not {*map(type, values)} <= {str, type(None)}:
        values = [None if value is None else str(value) for value in values]
    try:
        return pa.array(values, pa.large_string()).cast(BYTES)
    except UnicodeEncodeError:
        return pa.array(
            [None if value is None else encode_keys([value])[0] for value in values], BYTES
        )


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    """Return the cells of a column; nulls if no row of the batch has the column."""
    place = batch.schema.get_field_index(name)
    return pa.nulls(len(batch), BYTES) if place < 0 else batch.column(place)


def _numbers_in(cells: pa.Array, dtype: str, types: Collection[type]) -> NDArray[Any]:
    """Return the cells of a column as numbers or booleans of this dtype.

    Python is known to parse all of them, and Arrow parses most. `types` are those of all values
    in the column.
    """
    if dtype == "|b1":
        truths: NDArray[np.bool_] = pc.equal(cells, b"True").to_numpy(zero_copy_only=False)
        return truths
    if bool in types:
        for truth, number in ((b"True", b"1"), (b"False", b"0")):
            cells = pc.if_else(pc.equal(cells, truth), pa.scalar(number, BYTES), cells)
    texts = cells.cast(pa.large_string())
    try:
        found = texts.cast(pa.from_numpy_dtype(dtype))
    except pa.ArrowInvalid:
        return _convert(texts.to_pylist(), dtype)
    numbers: NDArray[Any] = found.to_numpy(zero_copy_only=False)
    return numbers


@dataclass(slots=True)
class _ColumnType:
    """The type of a column, as known from the values so far.

    Values are numbers and booleans, or cells of a CSV that read as numbers.
    """

    types: set[type] = field(default_factory=set)
    is_int: bool = True
    is_number: bool = True

    def note(self, values: Sequence[Any]) -> None:
        self.types |= {*map(type, values)}
        self.is_number = self.is_number and self.types <= SCALARS
        if not self.is_number:
            return
        self.is_int = self.is_int and float not in self.types and _can_convert(values, "<i8")
        self.is_number = self.is_int or _can_convert(
            values, "<f8"
        )  # what reads as the one does as both

    @property
    def dtype(self) -> str:
        """The dtype of the column, or "" if it has no numbers."""
        if not self.types or not self.is_number:
            return ""
        if not self.is_int:
            return "<f8"
        return "|b1" if self.types == {bool} else "<i8"


def _can_convert(values: Sequence[Any], dtype: str) -> bool:
    try:
        _convert(values, dtype)
    except (ValueError, OverflowError):
        return False
    return True


def _convert(values: Sequence[Any], dtype: str) -> NDArray[Any]:
    if dtype == "<i8":
        values = [int(value) for value in values]
    elif dtype == "<f8":
        values = [float(value) for value in values]
    return np.array(values, dtype)


def _check_keys(place: str, keys: Sequence[Any]) -> None:
    if wrong := next((key for key in keys if not isinstance(key, str)), None):
        raise UsageError(
            f"{place} has keys that are not texts, such as {wrong!r:.40}: write them as the shards "
            "have them, such as '000000000012'"
        )
