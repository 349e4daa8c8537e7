"""Read the rows of a table that others made, for `join_columns`: a name, numbers and texts.

Numbers become whole numbers of 64 bits, floats or booleans. Parquet says what types its columns
have. In a table that is text, all values together decide: a column is one of whole numbers until
the first value that is none. So its cells are kept as texts, and parsed once all are known.
"""

import logging
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3
from numpy.typing import NDArray

from wdsprep.errors import UsageError
from wdsprep.sources.tables.parquet import NUMBERS, ParquetTable, values_in
from wdsprep.sources.tables.text import Table
from wdsprep.tables.column_conditions import mask_of, numbers_of
from wdsprep.tables.key_join import NAMES, KeyJoin
from wdsprep.text import plural

ROWS_AT_ONCE = 1 << 16
TEXT = pa.large_string()
SCALARS = {int, float, bool, str}
SURROGATE = re.compile("[\ud800-\udfff]")
_log = logging.getLogger("wdsprep")


class WantedColumns(NamedTuple):
    """The columns of a table that are read: those that are `named`.

    `for_batches` all other columns of numbers are read, too.
    """

    named: AbstractSet[str]
    for_batches: bool

    @property
    def cache_key(self) -> tuple[str, ...]:
        return f"all numbers: {self.for_batches}", *sorted(self.named)

    def choose_numbers(self, columns: Mapping[str, str]) -> dict[str, str]:
        """Return those of a table's columns of numbers that are read."""
        return {n: dtype for n, dtype in columns.items() if self.for_batches or n in self.named}


class OtherTable:
    """A table whose rows have a name in the column `by`.

    After `add_to`, `numbers` has the dtypes of the columns of numbers that were read, `offered` the
    names of all of them, `texts` the columns of texts that were read. `digest` is that of what was
    read.
    """

    numbers: Mapping[str, str]
    offered: Collection[str]
    texts: Sequence[str]

    def __init__(self, place: str, by: str, wanted: WantedColumns) -> None:
        self.place, self.by, self.wanted = place, by, wanted
        self._digests: dict[tuple[str, str], blake3] = {}

    def add_to(self, join: KeyJoin) -> None:
        """Read all rows."""
        for names, columns in self._batches():
            for name, column in {"": names, **columns}.items():
                for part, data in _parts(column):
                    new = blake3(f"{join.rows}".encode())  # rows before the column began
                    self._digests.setdefault((name, part), new).update(data.data)
            join.add(names, columns)

    @property
    def digest(self) -> str:
        """The digest of the names and columns that were read, in the order of the rows."""
        read = {"": "", **self.numbers, **dict.fromkeys(self.texts, "")}
        parts = sorted(part for part in self._digests if part[0] in read)
        lines = [(read[part[0]], *part, self._digests[part].hexdigest()) for part in parts]
        return blake3(repr(lines).encode()).hexdigest()

    def _batches(self) -> Iterator[tuple[pa.Array, dict[str, pa.Array]]]:
        """Yield names, as bytes, and columns. At the end, what these are is set."""
        raise NotImplementedError


def open_other_table(place: str, table: Table, by: str, wanted: WantedColumns) -> OtherTable:
    if isinstance(table, ParquetTable):
        return _ParquetTable(place, table, by, wanted)
    return _TextTable(place, table, by, wanted)


class _ParquetTable(OtherTable):
    def __init__(self, place: str, table: ParquetTable, by: str, wanted: WantedColumns) -> None:
        super().__init__(place, by, wanted)
        kinds = table.kinds()
        if kinds[by] != "text":
            raise UsageError(
                f"the column {by} of {place} holds {kinds[by] or 'something else'}: write its "
                f"values {_as_texts(by)}"
            )
        if other := next((n for n in sorted(wanted.named) if not kinds[n]), ""):
            raise UsageError(
                f"the column {other} of {place} holds {table.schema.field(other).type}, neither "
                "numbers nor texts: write it as one of these"
            )
        self._table = table
        offered = {n: NUMBERS[kind] for n, kind in kinds.items() if kind in NUMBERS}
        if wanted.for_batches:  # tensors of unsigned numbers are of little use
            offered = {n: dtype.replace("u", "i") for n, dtype in offered.items()}
        self.offered = offered
        self.numbers = wanted.choose_numbers(offered)
        self.texts = [name for name in sorted(wanted.named) if kinds[name] == "text"]

    def _batches(self) -> Iterator[tuple[pa.Array, dict[str, pa.Array]]]:
        for batch in self._table.batches([self.by, *self.numbers, *self.texts], ROWS_AT_ONCE):
            numbers = {name: self._cast(name, batch[name]) for name in self.numbers}
            texts = {name: _valid_texts(batch[name]) for name in self.texts}
            yield batch[self.by].cast(TEXT).cast(NAMES), {**numbers, **texts}

    def _cast(self, name: str, column: pa.Array) -> pa.Array:
        try:
            return column.cast(pa.from_numpy_dtype(self.numbers[name]))
        except pa.ArrowInvalid:
            raise UsageError(
                f"the column {name} of {self.place} has numbers beyond 2^63, which batches cannot "
                "hold: write them as texts, or leave the column out"
            ) from None


def _valid_texts(column: pa.Array) -> pa.Array:
    """Return the texts of a column; null in place of those that are not UTF-8."""
    try:
        column.validate(full=True)
    except pa.ArrowException:
        column = _text_array(
            [text if isinstance(text, str) else None for text in values_in(column)]
        )
    return column.cast(TEXT)


class _TextTable(OtherTable):
    def __init__(self, place: str, table: Table, by: str, wanted: WantedColumns) -> None:
        super().__init__(place, by, wanted)
        self._table = table
        self._types: dict[str, str | None] = {}

    def _batches(self) -> Iterator[tuple[pa.Array, dict[str, pa.Array]]]:
        unreadable = 0
        for where, _ in self._table.parts(sys.maxsize):
            every = (row for _, row in self._table.rows(where))
            while some := list(islice(every, ROWS_AT_ONCE)):
                rows = [row for row in some if isinstance(row, dict)]
                unreadable += len(some) - len(rows)
                names = [row.get(self.by) or "" for row in rows]
                if wrong := next((name for name in names if not isinstance(name, str)), None):
                    raise UsageError(
                        f"the column {self.by} of {self.place} has other values than texts, such "
                        f"as {wrong!r:.40}: write them {_as_texts(self.by)}"
                    )
                yield encode_names(names), self._columns(rows)
        if unreadable:
            lines = plural(unreadable, "row")
            _log.warning("%s: left out %s that cannot be read", self.place, lines)
        self.offered = {name: dtype for name, dtype in self._types.items() if dtype}
        self.numbers = self.wanted.choose_numbers(self.offered)
        self.texts = [n for n, dtype in self._types.items() if not dtype and n in self.wanted.named]

    def _columns(self, rows: "list[dict[str, Any]]") -> dict[str, pa.Array]:
        columns = {}
        for name in dict.fromkeys(name for row in rows for name in row if name != self.by):
            values = [row.get(name) for row in rows]
            types = {*map(type, values)} - {type(None)}
            if not types <= {str}:  # as a CSV would have them, and truths as 1 and 0
                wholes = (int(value) if isinstance(value, bool) else value for value in values)
                values = [None if value is None else str(value) for value in wholes]
            cells = _text_array(values)
            trimmed = pc.utf8_trim_whitespace(cells)
            dtype = self._types[name] = _widen_type(self._types.get(name, ""), types, trimmed)
            if name in self.wanted.named or (self.wanted.for_batches and dtype is not None):
                columns[name] = cells
        return columns


def _widen_type(dtype: str | None, types: AbstractSet[type], cells: pa.Array) -> str | None:
    """Return the dtype of a column once it has these cells too, by the types of their values.

    It is "" before the first value, and None for texts. Values are numbers and booleans, or cells
    of a CSV that read as numbers.
    """
    if dtype is None or not types:
        return dtype
    if types <= {bool} and dtype in ("", "|b1"):
        return "|b1"
    if not types <= SCALARS or not _can_cast(cells, pa.float64()):  # Arrow takes 0x1F as whole
        return None
    return "<i8" if dtype != "<f8" and _can_cast(cells, pa.int64()) else "<f8"


def _can_cast(cells: pa.Array, kind: pa.DataType) -> bool:
    try:
        cells.cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


def encode_names(texts: Sequence[str | None]) -> pa.Array:
    """Return names as the bytes that they stand for; one that no file can have becomes null."""
    return pa.array(map(_encode, texts), NAMES)


def _encode(text: str | None) -> bytes | None:
    try:
        return None if text is None else text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half of a surrogate pair
        return None


def _text_array(texts: Sequence[str | None]) -> pa.Array:
    """Return texts as an array; null in place of those that UTF-8 cannot hold."""
    try:
        return pa.array(texts, TEXT)
    except UnicodeEncodeError:
        whole = [None if text and SURROGATE.search(text) else text for text in texts]
        return pa.array(whole, TEXT)


def text_bytes(column: pa.Array) -> memoryview:
    """Return the bytes of all values of large texts without nulls, one after another."""
    _, ends, data = column.buffers()
    if not len(column) or data is None:
        return memoryview(b"")
    edges = np.frombuffer(ends, np.int64)[[column.offset, column.offset + len(column)]]
    return memoryview(data)[edges[0] : edges[1]]


def _parts(column: pa.Array) -> "Iterator[tuple[str, NDArray[np.uint8]]]":
    """Yield the bytes that make up a column, in parts which any batches of it have together."""
    yield "nulls", mask_of(column.is_null()).view(np.uint8)
    if column.type in (TEXT, NAMES):
        filled = column.fill_null("" if column.type == TEXT else b"")
        yield "lengths", numbers_of(pc.binary_length(filled)).view(np.uint8)
        yield "texts", np.frombuffer(text_bytes(filled), np.uint8)
    else:
        filled = column.fill_null(pa.scalar(0, pa.int8()).cast(column.type))
        yield "numbers", numbers_of(filled, filled.type.to_pandas_dtype()).view(np.uint8)


def _as_texts(by: str) -> str:
    """Return how to write the names of rows, for a message."""
    example = ", such as '000000000012'" if by == "key" else ""
    return f"as texts, as the samples have them{example}"
