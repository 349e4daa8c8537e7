"""The table of a shard: `256/000000.parquet` beside `256/000000.tar`, one row a sample.

A tar that another program packed has it as `NAME.tar.parquet`, since img2dataset has a file of its
own under `NAME.parquet`.

A table is decided by the json and the keys of its tar, and for what was made of images by their
positions: the same samples give the same rows, whoever writes them. Writers make it of what they
write, `index` and `repair` of what they read. Its rows have the order of the shard. What was
decided, so that questions to tables need no other rule:

- All tables of one kind of dataset have the same columns, in one order and of the same types.
  `IMAGE_COLUMNS` are also those of tars that another program packed, and `LATENT_COLUMNS` those of
  latents, of text alone and of imports. So tables of any number of shards and datasets of one kind
  are one table. Tables of scores have the columns of their settings, sorted
  by name.
- Each role has columns of its own behind these, with what the json says of the first image in that
  role (`role_columns`); of latents, its width and height as it was cut. What the json says of the
  next ones is in `rest`.
- `key` is the key of the sample in the tar. What was made of images has `row` too: the position of
  the sample in its image shard (`wdsprep.dataset.image_positions`). Neither is ever null.
- The other columns have the fields of the json by their names. A field that is missing or null, or
  whose value is not of the column's type, is null. Whole numbers are int64, and never bool.
- `meta` is the JSON text of the field `meta`, whatever that is, as `facts_bytes` writes it.
- `rest` is the JSON text of an object: all fields of the json that no column has, by their names,
  those with a value of another type included. It is null if there are none, as in shards of wdsprep
  whose samples have one image of each role at most. So a name is looked up in its column, then in
  `rest`, and if neither has it, in `meta`. Scores have neither of the two, and what no column has
  is left out.
- A sample whose json is missing, or is no JSON object, has a key, `null` as text in `rest`, and
  nothing else.

Parquet's bytes carry the version of pyarrow, so a receipt has the digest of the bytes as they were
written, and what is made again is compared by its rows.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence, Sized
from functools import cache
from io import BytesIO
from itertools import chain
from typing import TYPE_CHECKING, Any

from wdsprep.dataset.samples import META, facts_bytes, roles_of
from wdsprep.dataset.settings import NUMBER, TEXT, WHOLE, columns_of, is_scored
from wdsprep.errors import DamageError
from wdsprep.text import one_line

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray
    from pyarrow import parquet as pq

Columns = Mapping[str, str]
"""What each column of a table holds, in the order of the columns."""
KEY, ROW, REST = "key", "row", "rest"
TEXTS, FLAG, WHOLES = "texts", "flag", "wholes"
"""What a column may hold beside the kinds of scores: lists of texts or whole numbers, or bools."""
IMAGE_COLUMNS: Columns = {
    KEY: TEXT,
    "source": TEXT,
    "caption": TEXT,
    "captions": TEXTS,
    "width": WHOLE,
    "height": WHOLE,
    "original_width": WHOLE,
    "original_height": WHOLE,
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
PER_IMAGE = (
    *("width", "height", "original_width", "original_height"),
    *("changes", "url", "sha256", "md5", "sha512"),
)
"""The fields of the json that say something of one image."""
LATENT_COLUMNS: Columns = {
    KEY: TEXT,
    ROW: WHOLE,
    "source": TEXT,
    "caption": TEXT,
    "captions": TEXTS,
    "tokens": WHOLE,
    "cut": FLAG,
    "width": WHOLE,
    "height": WHOLE,
    "original_width": WHOLE,
    "original_height": WHOLE,
    "scaled_width": WHOLE,
    "scaled_height": WHOLE,
    "upscaled": NUMBER,
    "crop": WHOLES,
    "repeats": WHOLE,
    META: TEXT,
    REST: TEXT,
}
MARK = {"wdsprep": "table 1"}
"""What tells a table of ours from the file that another program has under such a name."""
BATCH_ROWS, BATCH_NBYTES = 1024, 8 << 20
"""The rows, or bytes of `meta`, that are held as objects of Python."""
NO_OBJECT = "null"
"""The `rest` of a sample without a JSON object."""
GROUP_ROWS = 4096
"""The rows of each row group but the last. One is in memory while a table is written."""
LARGEST, EXACT = 1 << 63, 1 << 53


def table_columns(dataset: str, settings: Mapping[str, Any]) -> Columns:
    """Return the columns of the tables of a dataset, by its kind and its settings."""
    if dataset == "images":
        return {**IMAGE_COLUMNS, **role_columns(roles_of(settings))}
    if is_scored(settings):
        columns = sorted(columns_of(settings).items())  # as stored settings have them
        return {KEY: TEXT, ROW: WHOLE, "source": TEXT, **dict(columns)}
    return {**LATENT_COLUMNS, **role_columns(roles_of(settings), ("width", "height"))}


def role_columns(roles: Iterable[str], names: Iterable[str] = PER_IMAGE) -> Columns:
    """Return the columns of the first image in each of these roles, such as `source_width`."""
    return {f"{role}_{name}": IMAGE_COLUMNS[name] for role in roles for name in names}


class TableWriter:
    """A table with these columns that is being written, in memory."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._fields = tuple(name for name in columns if name not in (KEY, META, REST))
        self._known = {*self._fields, KEY, META} if REST in columns else None
        self._out, self._schema = BytesIO(), table_schema(columns)
        self._writer = open_writer(self._out, self._schema)
        self._batches: list[pa.RecordBatch] = []
        self._begin_batch()

    def _begin_batch(self) -> None:
        self._keys: list[str] = []
        self._values: list[Any] = []  # of the fields of all rows, for which a list each costs more
        self._metas: list[bytes | None] = []
        self._rests: dict[int, dict[str, Any] | None] = {}
        self._nbytes = 0

    def add(self, key: str, facts: Mapping[str, Any] | None, meta: bytes | None = None) -> None:
        """Add the row of a sample, given the object in its json, and `row` if the table has that.

        `facts` are None if it has no such object. A caller that has encoded `meta` gives its JSON
        text.
        """
        if facts is None:
            facts, self._rests[len(self._keys)] = {}, None
        elif self._known:
            if meta is None and facts.get(META) is not None:
                meta = facts_bytes(facts[META])
            known = self._known if facts.get(KEY, key) == key else self._known - {KEY}
            if not facts.keys() <= known:
                rest = {n: v for n, v in facts.items() if n not in known and v is not None}
                self._rests[len(self._keys)] = rest
        self._keys.append(key)
        self._values += map(facts.get, self._fields)
        self._metas.append(meta)
        self._nbytes += len(meta or b"")
        if len(self._keys) == BATCH_ROWS or self._nbytes >= BATCH_NBYTES:
            self._end_batch()

    def finish(self) -> bytes:
        """Return the bytes of the table."""
        if self._keys or not self._batches:
            self._end_batch()
        self._write_groups(least=0)
        self._writer.close()
        return self._out.getvalue()

    def _end_batch(self) -> None:
        import pyarrow as pa

        values: dict[str, Sequence[Any]] = {KEY: self._keys, META: self._metas}
        for number, name in enumerate(self._fields):
            column, kind = self._values[number :: len(self._fields)], self._columns[name]
            if column.count(None) < len(column) and not _are_fit(kind, column):
                for row, value in enumerate(column):  # what it cannot hold goes to the rest
                    if not _are_fit(kind, [value]):
                        self._rests[row] = {**(self._rests.get(row) or {}), name: value}
                        column[row] = None
            values[name] = column
        rests = (self._rests.get(number, {}) for number in range(len(self._keys)))
        values[REST] = [None if rest == {} else facts_bytes(rest) for rest in rests]
        arrays = [make_array(kind, values[name]) for name, kind in self._columns.items()]
        self._batches.append(pa.record_batch(arrays, schema=self._schema))
        self._begin_batch()
        self._write_groups()

    def add_rows(self, rows: "pa.Table") -> None:
        """Add rows of tables with the same columns."""
        import pyarrow as pa

        if self._keys:
            self._end_batch()
        columns = rows.select([*self._columns]).columns
        self._batches += pa.Table.from_arrays(columns, schema=self._schema).to_batches()
        self._write_groups()

    def _write_groups(self, least: int = GROUP_ROWS) -> None:
        import pyarrow as pa

        while self._batches and sum(map(len, self._batches)) >= least:
            table = pa.Table.from_batches(self._batches, self._schema)
            self._writer.write_table(table[:GROUP_ROWS])
            self._batches = table[GROUP_ROWS:].to_batches()


def open_writer(
    out: BytesIO, schema: "pa.Schema", metadata: Mapping[str, str] = MARK
) -> "pq.ParquetWriter":
    """Begin a Parquet file that is read again by wdsprep, with sums of its pages."""
    from pyarrow import parquet as pq

    writer = pq.ParquetWriter(
        out,
        schema,
        compression="zstd",
        store_schema=False,
        use_dictionary=[
            *("bucket", "captions.list.element"),
            *(f"{name}.list.element" for name in schema.names if name.endswith("changes")),
        ],
        column_encoding={ROW: "DELTA_BINARY_PACKED"} if ROW in schema.names else None,
        write_page_checksum=True,
        write_statistics=False,
    )
    writer.add_key_value_metadata(metadata)
    return writer


def read_table(
    data: bytes,
    columns: Columns,
    *,
    what: str,
    rows: int | None = None,
    names: Iterable[str] | None = None,
) -> "pa.Table":
    """Return the rows of a table, or of those of its columns that have one of the `names`.

    Raise DamageError, which names the file `what`, if it is no such table. If the number of `rows`
    is known, they are counted before any are unpacked. No thread of Arrow takes part: one that
    still held these bytes when Python ends would end the process.
    """
    import pyarrow as pa
    from pyarrow import parquet as pq

    try:
        source = pa.BufferReader(data)
        file = pq.ParquetFile(source, pre_buffer=False, page_checksum_verification=True)
        if rows not in (None, count := file.metadata.num_rows):
            raise DamageError(what, f"it has {count:,} rows, and its shard {rows:,} samples")
        wanted = None if names is None else [name for name in columns if name in names]
        table = file.read(wanted, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise DamageError(what, f"it is no Parquet file ({one_line(str(error))})") from None
    check_schema(file.schema_arrow, columns, what=what)
    return table


def check_schema(schema: "pa.Schema", columns: Columns, *, what: str) -> None:
    """Raise DamageError if a file has other columns than such a table, or other types."""
    if not schema.equals(table_schema(columns).with_metadata(MARK), check_metadata=True):
        raise DamageError(what, "its columns are not those of a table of samples")


def is_marked(metadata: Mapping[bytes, bytes] | None) -> bool:
    """Return whether a Parquet file with this metadata is a table of samples of ours."""
    return {name.encode(): value.encode() for name, value in MARK.items()}.items() <= (
        metadata or {}
    ).items()


def table_without(
    data: bytes, columns: Columns, *, rows: Iterable[int], what: str, lost: Sequence[int] = ()
) -> bytes:
    """Return the bytes of a table without the rows of these numbers.

    If the image shard loses samples too, `lost` are their positions, which rise: then the positions
    after them become lower.
    """
    import numpy as np
    import pyarrow as pa

    table, gone = read_table(data, columns, what=what), [*rows]
    if max(gone, default=-1) >= len(table):
        raise DamageError(what, f"it has {len(table):,} rows, too few for its shard")
    table = table.take(np.delete(np.arange(len(table)), gone))
    if lost:
        places = table[ROW].to_numpy()
        lower = pa.array(places - np.searchsorted(lost, places))
        at = table.schema.get_field_index(ROW)
        table = table.set_column(at, table.schema.field(ROW), lower)
    out = BytesIO()
    with open_writer(out, table_schema(columns)) as writer:
        writer.write_table(table, row_group_size=GROUP_ROWS)
    return out.getvalue()


def has_all_values(table: "pa.Table") -> bool:
    """Return whether a table has a value in each row of each column, and only finite numbers."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return all(
        not column.null_count
        and (not pa.types.is_floating(column.type) or pc.all(pc.is_finite(column)).as_py())
        for column in table.columns
    )


def table_schema(columns: Columns) -> "pa.Schema":
    """Return the names and types of the columns of a table."""
    import pyarrow as pa

    types = _types()
    fields = ((name, types[kind], name not in (KEY, ROW)) for name, kind in columns.items())
    return pa.schema(pa.field(name, kind, has_nulls) for name, kind, has_nulls in fields)


@cache
def _types() -> Mapping[str, "pa.DataType"]:
    import pyarrow as pa

    items = {TEXTS: pa.string(), WHOLES: pa.int64()}
    lists = {name: pa.list_(pa.field("element", kind)) for name, kind in items.items()}
    return {  # an element is what Parquet calls it
        **lists,
        TEXT: pa.string(),
        WHOLE: pa.int64(),
        NUMBER: pa.float64(),
        FLAG: pa.bool_(),
    }


def _are_fit(kind: str, values: Sequence[Any]) -> bool:
    """Return whether a column of this kind can hold all these values."""
    known = [value for value in values if value is not None]
    types = {*map(type, known)}
    if kind in (TEXTS, WHOLES):
        item = TEXT if kind == TEXTS else WHOLE
        items = [*chain.from_iterable(known)] if types <= {list, tuple} else [None]
        return None not in items and _are_fit(item, items)
    if kind == NUMBER:
        wholes = [value for value in known if type(value) is int]
        return types <= {int, float} and all(-EXACT <= value <= EXACT for value in wholes)
    if kind == WHOLE:
        largest = max(known, default=0) if types <= {int} else LARGEST
        return largest < LARGEST and min(known, default=0) >= -LARGEST
    return types <= {str if kind == TEXT else bool}


# --- arrays of Arrow, made of buffers: `pa.array` of a list would import pandas
_CODES = {WHOLE: "q", NUMBER: "d"}
"""How Python calls the numbers that a column holds."""


def make_array(kind: str, values: Sequence[Any]) -> "pa.Array":
    """Return values, which may be None, as an array of what a column of this kind holds."""
    import pyarrow as pa

    nulls, form = values.count(None), _types()[kind]
    if nulls == len(values):
        return pa.nulls(len(values), form)
    valid = _bits(value is not None for value in values) if nulls else None
    if kind in _CODES:
        numbers = array(_CODES[kind], [value or 0 for value in values] if nulls else values)
        return pa.Array.from_buffers(form, len(values), [valid, pa.py_buffer(numbers)])
    if kind == FLAG:
        return pa.Array.from_buffers(form, len(values), [valid, _bits(map(bool, values))])
    if nulls:
        values = [value or () for value in values]
    if kind == TEXT:
        return _text_array(values, valid)
    offsets = pa.py_buffer(_offsets(values))
    items = [*chain.from_iterable(values)]
    content = _text_array(items, None) if kind == TEXTS else make_array(WHOLE, items)
    return pa.Array.from_buffers(form, len(values), [valid, offsets], children=[content])


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


def _bits(values: Iterable[bool]) -> "pa.Buffer":
    import numpy as np
    import pyarrow as pa

    return pa.py_buffer(np.packbits(np.fromiter(values, np.bool_), bitorder="little"))
