"""Read the rows of a table that others made, for `join_columns`: a name, numbers and texts.

Numbers become whole numbers of 64 bits, floats or booleans. Parquet says what types its columns
have. In a table that is text, all values together decide: a column is one of whole numbers until
the first value that is none. So its cells are kept as texts, and parsed once all are known.
"""

import logging
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Any

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
Types = dict[str, str | None]
"""The dtype of each column of a table so far: None of texts, "" without a value."""
Wanted = tuple[Collection[str], bool]
"""The columns that are read, by their names, and whether all others of numbers are read too."""
Batches = Iterator[tuple[pa.Array, dict[str, pa.Array]]]
"""The names of rows, as bytes, and columns of them."""
_log = logging.getLogger("wdsprep")


def add_rows(
    join: KeyJoin, place: str, table: Table, by: str, wanted: Wanted
) -> tuple[dict[str, str], list[str], str]:
    """Add the rows of a table to a join, whose names are in the column `by`.

    Return the dtypes of the columns of numbers that were read, the columns of texts, and a digest
    of names and columns in the order of the rows.
    """
    types: Types = {}
    if isinstance(table, ParquetTable):
        batches = _read_parquet(place, table, by, types, wanted)
    else:
        batches = _read_text(place, table, by, types, wanted)
    digests: dict[tuple[str, str], blake3] = {}
    for names, columns in batches:
        for name, column in {"": names, **columns}.items():
            for part, data in _parts(column):
                new = blake3(f"{join.rows}".encode())  # rows before the column began
                digests.setdefault((name, part), new).update(data.data)
        join.add(names, columns)
    numbers = {n: dtype for n, dtype in types.items() if dtype and is_wanted(n, dtype, wanted)}
    texts = sorted(name for name, dtype in types.items() if not dtype and name in wanted[0])
    read = {"": "", **numbers, **dict.fromkeys(texts, "")}
    parts = sorted(part for part in digests if part[0] in read)
    lines = [(read[part[0]], *part, digests[part].hexdigest()) for part in parts]
    return numbers, texts, blake3(repr(lines).encode()).hexdigest()


def is_wanted(name: str, dtype: str | None, wanted: Wanted) -> bool:
    named, for_batches = wanted
    return name in named or (for_batches and dtype is not None)


def _read_parquet(
    place: str, table: ParquetTable, by: str, types: Types, wanted: Wanted
) -> Batches:
    (named, for_batches), kinds = wanted, table.kinds()
    if kinds[by] != "text":
        raise _names_error(place, by, kinds[by] or "something else")
    if other := next((name for name in sorted(named) if not kinds[name]), ""):
        raise UsageError(
            f"the column {other} of {place} holds {table.schema.field(other).type}, neither "
            "numbers nor texts: write it as one of these"
        )
    types |= {name: NUMBERS.get(kind) for name, kind in kinds.items() if kind and name != by}
    if for_batches:  # tensors of unsigned numbers are of little use
        types |= {name: dtype.replace("u", "i") for name, dtype in types.items() if dtype}
    columns = [name for name, dtype in types.items() if is_wanted(name, dtype, wanted)]

    def cast(name: str, column: pa.Array) -> pa.Array:
        if (dtype := types[name]) is None:
            return _valid_texts(column)
        try:
            return column.cast(pa.from_numpy_dtype(dtype))
        except pa.ArrowInvalid:
            raise UsageError(
                f"the column {name} of {place} has numbers beyond 2^63, which batches cannot hold: "
                "write them as texts, or leave the column out"
            ) from None

    for batch in table.batches([by, *columns], ROWS_AT_ONCE):
        yield (
            batch[by].cast(TEXT).cast(NAMES),
            {name: cast(name, batch[name]) for name in columns},
        )


def _valid_texts(column: pa.Array) -> pa.Array:
    """Return the texts of a column; null in place of those that are not UTF-8."""
    try:
        column.validate(full=True)
    except pa.ArrowException:
        column = _text_array(
            [text if isinstance(text, str) else None for text in values_in(column)]
        )
    return column.cast(TEXT)


def _read_text(place: str, table: Table, by: str, types: Types, wanted: Wanted) -> Batches:
    unreadable = 0
    for where, _ in table.parts(sys.maxsize):
        every = (row for _, row in table.rows(where))
        while batch := list(islice(every, ROWS_AT_ONCE)):
            rows = [row for row in batch if isinstance(row, dict)]
            unreadable += len(batch) - len(rows)
            names = [row.get(by) or "" for row in rows]
            if wrong := next((name for name in names if not isinstance(name, str)), None):
                raise _names_error(place, by, f"{wrong!r:.40}")
            columns = {}
            for name in dict.fromkeys(name for row in rows for name in row if name != by):
                cells, kinds = _cells_of([row.get(name) for row in rows])
                trimmed = pc.utf8_trim_whitespace(cells)
                types[name] = _widen_type(types.get(name, ""), kinds, trimmed)
                if is_wanted(name, types[name], wanted):
                    columns[name] = cells
            yield encode_names(names), columns
    if unreadable:
        _log.warning("%s: left out %s that cannot be read", place, plural(unreadable, "row"))


def _cells_of(values: Sequence[Any]) -> tuple[pa.Array, set[type]]:
    """Return values as a CSV would have them, with truths as 1 and 0, and their types."""
    types = {*map(type, values)} - {type(None)}
    if not types <= {str}:
        wholes = (int(value) if isinstance(value, bool) else value for value in values)
        values = [None if value is None else str(value) for value in wholes]
    return _text_array(values), types


def _widen_type(dtype: str | None, types: AbstractSet[type], cells: pa.Array) -> str | None:
    """Return the dtype of a column that had a `dtype`, after `cells` were added to it.

    A dtype of "" means that there was no value yet, and None that the column has texts. `types` are
    those of the new values: numbers and booleans, or cells of a CSV that read as numbers.
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
        yield "numbers", numbers_of(filled).view(np.uint8)


def _names_error(place: str, by: str, holds: str) -> UsageError:
    example = ", such as '000000000012'" if by == "key" else ""
    return UsageError(
        f"the column {by} of {place} holds {holds}: write its values as texts, as the samples have "
        f"them{example}"
    )
