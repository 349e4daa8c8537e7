"""The table of a shard of images: `256/000000.parquet` beside `256/000000.tar`, one row a sample.

A tar that another program packed has it as `NAME.tar.parquet`, since img2dataset has a file of its
own under `NAME.parquet`.

A table is decided by the json and the keys of its tar: the same samples give the same rows, whoever
writes them. Writers make it of what they write, `index` and `repair` of what they read. Its rows
have the order of the shard. What was decided, so that questions to tables need no other rule:

- All tables of images have the columns `COLUMNS`, in this order and of these types, also those of
  tars that another program packed. So tables of any number of shards and datasets are one table.
- `key` is the key of the sample in the tar, and the only column without nulls.
- The other columns have the fields of the json by their names. A field that is missing or null, or
  whose value is not of the column's type, is null. Whole numbers are int64, and never bool.
- `meta` is the JSON text of the field `meta`, whatever that is, as `facts_bytes` writes it.
- `rest` is the JSON text of an object: all fields of the json that no column has, by their names,
  those with a value of another type included. It is null if there are none, as always in shards of
  wdsprep. So a name is looked up in its column, then in `rest`, and if neither has it, in `meta`.
- A sample whose json is missing, or is no JSON object, has a key and nothing else.

Parquet's bytes carry the version of pyarrow, so a receipt has the digest of the bytes as they were
written, and what is made again is compared by its rows.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence, Sized
from functools import cache
from io import BytesIO
from itertools import chain
from typing import TYPE_CHECKING, Any

from wdsprep.dataset.samples import META, facts_bytes
from wdsprep.errors import DamageError
from wdsprep.text import one_line

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray
    from pyarrow import parquet as pq

KEY, REST = "key", "rest"
TEXT, TEXTS, WHOLE = "text", "texts", "whole"
COLUMNS: Mapping[str, str] = {
    KEY: TEXT,
    "source": TEXT,
    "caption": TEXT,
    "captions": TEXTS,
    "width": WHOLE,
    "height": WHOLE,
    "source_width": WHOLE,
    "source_height": WHOLE,
    "bucket": WHOLE,
    "repeats": WHOLE,
    "changes": TEXTS,
    "url": TEXT,
    "sha256": TEXT,
    "md5": TEXT,
    "sha512": TEXT,
    META: TEXT,
    REST: TEXT,
}
"""The columns of a table of images, and what each holds: text, a list of texts, whole numbers."""
MARK = {"wdsprep": "table 1"}
"""What tells a table of ours from the file that another program has under such a name."""
BATCH_ROWS, BATCH_NBYTES = 1024, 8 << 20
"""The rows, or bytes of `meta`, that are held as objects of Python."""
GROUP_ROWS = 4096
"""The rows of each row group but the last. One is in memory while a table is written."""
LARGEST = 1 << 63
_FIELDS = tuple(name for name in COLUMNS if name not in (KEY, META, REST))
_KNOWN = {*_FIELDS, KEY, META}


class TableWriter:
    """A table that is being written, in memory."""

    def __init__(self) -> None:
        self._out = BytesIO()
        self._writer: pq.ParquetWriter | None = None
        self._batches: list[pa.RecordBatch] = []
        self._begin_batch()

    def _begin_batch(self) -> None:
        self._keys: list[str] = []
        self._values: list[Any] = []  # of the fields of all rows, for which a list each costs more
        self._metas: list[bytes | None] = []
        self._rests: dict[int, dict[str, Any]] = {}
        self._nbytes = 0

    def add(self, key: str, facts: Mapping[str, Any], meta: bytes | None = None) -> None:
        """Add the row of a sample, given the object in its json.

        A caller that has encoded `meta` gives its JSON text, and no fields that no column has.
        """
        if meta is None:
            if facts.get(META) is not None:
                meta = facts_bytes(facts[META])
            if not facts.keys() <= _KNOWN or facts.get(KEY, key) != key:
                self._rests[len(self._keys)] = _find_rest(key, facts)
        self._keys.append(key)
        self._values += map(facts.get, _FIELDS)
        self._metas.append(meta)
        self._nbytes += len(meta or b"")
        if len(self._keys) == BATCH_ROWS or self._nbytes >= BATCH_NBYTES:
            self._end_batch()

    def finish(self) -> bytes:
        """Return the bytes of the table."""
        if self._keys or not self._batches:
            self._end_batch()
        writer = self._open()
        writer.write_table(self._table())
        writer.close()
        return self._out.getvalue()

    def _end_batch(self) -> None:
        import pyarrow as pa

        columns: dict[str, Sequence[Any]] = {KEY: self._keys}
        for number, name in enumerate(_FIELDS):
            columns[name] = self._find_unfit(name, self._values[number :: len(_FIELDS)])
        columns[META] = self._metas
        rests = map(self._rests.get, range(len(self._keys)))
        columns[REST] = [facts_bytes(rest) if rest else None for rest in rests]
        arrays = [_make_array(COLUMNS[name], values) for name, values in columns.items()]
        self._batches.append(pa.record_batch(arrays, schema=table_schema()))
        self._begin_batch()
        if sum(map(len, self._batches)) >= GROUP_ROWS:
            table = self._table()
            self._open().write_table(table[:GROUP_ROWS])
            self._batches = table[GROUP_ROWS:].to_batches()

    def _find_unfit(self, name: str, values: list[Any]) -> list[Any]:
        """Return the values of a field that its column can hold; others go to the rest."""
        kind = COLUMNS[name]
        if values.count(None) == len(values) or _are_fit(kind, values):
            return values
        for row, value in enumerate(values):
            if not _are_fit(kind, [value]):
                self._rests.setdefault(row, {})[name] = value
                values[row] = None
        return values

    def _table(self) -> "pa.Table":
        import pyarrow as pa

        return pa.Table.from_batches(self._batches, table_schema())

    def _open(self) -> "pq.ParquetWriter":
        self._writer = self._writer or _open_writer(self._out)
        return self._writer


def _open_writer(out: BytesIO) -> "pq.ParquetWriter":
    from pyarrow import parquet as pq

    writer = pq.ParquetWriter(
        out,
        table_schema(),
        compression="zstd",
        store_schema=False,
        use_dictionary=["bucket", "captions.list.element", "changes.list.element"],
        write_page_checksum=True,
        write_statistics=False,
    )
    writer.add_key_value_metadata(MARK)
    return writer


def read_table(data: bytes, what: str) -> "pa.Table":
    """Return the rows of a table. Raise DamageError, which names the file `what`, if it is none."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    try:
        table = pq.read_table(BytesIO(data), page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise DamageError(what, f"it is no Parquet file ({one_line(str(error))})") from None
    check_schema(table.schema, what)
    return table


def check_schema(schema: "pa.Schema", what: str) -> None:
    """Raise DamageError if a file has other columns than a table of samples, or other types."""
    if not schema.equals(table_schema().with_metadata(MARK), check_metadata=True):
        raise DamageError(what, "its columns are not those of a table of samples")


def is_marked(metadata: Mapping[bytes, bytes] | None) -> bool:
    """Return whether a Parquet file with this metadata is a table of samples of ours."""
    return {name.encode(): value.encode() for name, value in MARK.items()}.items() <= (
        metadata or {}
    ).items()


def have_same_rows(data: bytes, expected: bytes) -> bool:
    """Return whether two files are tables with the same rows.

    Rows are counted before any are unpacked.
    """
    import pyarrow as pa
    from pyarrow import parquet as pq

    try:
        counts = {pq.read_metadata(BytesIO(file)).num_rows for file in (data, expected)}
        tables = [read_table(file, "table") for file in (data, expected) if len(counts) == 1]
        return bool(tables) and bool(tables[0].equals(tables[1]))
    except (DamageError, pa.ArrowException, OSError):
        return False


def table_without(data: bytes, rows: Iterable[int], *, what: str) -> bytes:
    """Return the bytes of a table without the rows of these numbers."""
    import numpy as np

    table = read_table(data, what)
    stays = np.ones(len(table), np.bool_)
    stays[list(rows)] = False
    out = BytesIO()
    with _open_writer(out) as writer:
        writer.write_table(table.take(np.flatnonzero(stays)), row_group_size=GROUP_ROWS)
    return out.getvalue()


@cache
def table_schema() -> "pa.Schema":
    """Return the names and types of the columns of all tables of images."""
    import pyarrow as pa

    types = _types()
    return pa.schema(pa.field(name, types[kind], name != KEY) for name, kind in COLUMNS.items())


@cache
def _types() -> Mapping[str, "pa.DataType"]:
    import pyarrow as pa

    texts = pa.list_(pa.field("element", pa.string()))  # as Parquet calls it
    return {TEXT: pa.string(), TEXTS: texts, WHOLE: pa.int64()}


def _find_rest(key: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that no column has: a key that is not that of the sample is one."""
    rest = {n: value for n, value in facts.items() if n not in _KNOWN and value is not None}
    return rest if facts.get(KEY, key) == key else {**rest, KEY: facts[KEY]}


def _are_fit(kind: str, values: Sequence[Any]) -> bool:
    """Return whether a column of this kind can hold all these values."""
    given = [value for value in values if value is not None]
    types = {*map(type, given)}
    if kind == TEXT:
        return types <= {str}
    if kind == TEXTS:
        return types <= {list, tuple} and {*map(type, chain.from_iterable(given))} <= {str}
    return types <= {int} and min(given, default=0) >= -LARGEST and max(given, default=0) < LARGEST


# --- arrays of Arrow, made of buffers: `pa.array` of a list would import pandas
def _make_array(kind: str, values: Sequence[Any]) -> "pa.Array":
    import pyarrow as pa

    nulls = values.count(None)
    if nulls == len(values):
        return pa.nulls(len(values), _types()[kind])
    valid = _validity(values) if nulls else None
    if kind == WHOLE:
        numbers = array("q", [value or 0 for value in values] if nulls else values)
        return pa.Array.from_buffers(pa.int64(), len(values), [valid, pa.py_buffer(numbers)])
    if nulls:
        values = [value or () for value in values]
    if kind == TEXT:
        return _text_array(values, valid)
    offsets = pa.py_buffer(_offsets(values))
    items = _text_array([*chain.from_iterable(values)], None)
    return pa.Array.from_buffers(_types()[kind], len(values), [valid, offsets], children=[items])


def _text_array(values: Sequence[Any], valid: "pa.Buffer | None") -> "pa.Array":
    """Return texts, or bytes in UTF-8, as an array. An empty tuple stands for null."""
    import pyarrow as pa

    if not {*map(type, values)} <= {bytes, tuple}:
        values = [value.encode("utf-8", "replace") if value else b"" for value in values]
    buffers = [valid, pa.py_buffer(_offsets(values)), pa.py_buffer(b"".join(filter(None, values)))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


def _offsets(values: Sequence[Sized]) -> "NDArray[np.int32]":
    import numpy as np

    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, values), np.int64, len(values)), out=offsets[1:])
    return offsets


def _validity(values: Sequence[Any]) -> "pa.Buffer":
    """Return the bits that say which values are not None."""
    import numpy as np
    import pyarrow as pa

    valid = np.fromiter((value is not None for value in values), np.bool_, len(values))
    return pa.py_buffer(np.packbits(valid, bitorder="little"))
