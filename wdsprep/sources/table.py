"""Parquet tables with the images' bytes in a column, as Ray and Hugging Face write them.

An item is a run of row groups of one file, read batch by batch: no file, and no row group, is ever
in memory as a whole. Footers alone tell how many rows there are.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from wdsprep.errors import SourceError, UsageError
from wdsprep.samples import Code, Sample
from wdsprep.sources import Columns, Item, Refusal, is_hidden, opened, shown, url_table_error
from wdsprep.sources.captions import NAMES, captions_of, plain_facts
from wdsprep.store import Entry, Store

BATCH_ROWS = 32
BUFFER_NBYTES = 1 << 20
IMAGE_NAMES = ("image", "jpg", "jpeg", "png", "webp", "bytes", "image_bytes", "data", "content")
URL_NAMES = ("url", "URL", "image_url", "URLs", "urls", "TOP_URL")


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSource:
    """Every Parquet file below `url`, or the one that `name` says."""

    url: str
    name: str
    columns: Columns
    rows_per_item: int
    kind: str = "table"

    def files(self) -> Iterator[Entry]:
        for entry in opened(self.url).list(self.name):
            wanted = entry.name.endswith(".parquet") and not is_hidden(entry.name)
            if entry.name == self.name or (not self.name and wanted):
                yield entry

    def items(self) -> Iterator[Item]:
        for entry in self.files():
            with _open(opened(self.url), entry.name) as file:
                self.check(file.schema_arrow, entry.name)
                for first, last, rows in _runs(file.metadata, self.rows_per_item):
                    yield Item(
                        name=f"{entry.name}[{first}:{last}]",
                        parts=((entry.name, entry.nbytes, entry.stamp),),
                        extra=f"{first}:{last}",
                        samples=rows,
                    )

    def chosen(self) -> tuple[str, str]:
        """The columns that images and captions come from, in the first file ("" for none)."""
        first = next(self.files())
        with _open(opened(self.url), first.name) as file:
            schema = file.schema_arrow
            return self.check(schema, first.name), self.columns.caption or _first(
                NAMES, schema.names
            )

    def check(self, schema: pa.Schema, name: str) -> str:
        """The column that holds the images; an error that names the columns where there is none."""
        asked = [("image-col", self.columns.image), ("caption-col", self.columns.caption)]
        asked += [("filter", column) for column in self.columns.filtered]
        for option, column in asked:
            if column and column not in schema.names:
                there = ", ".join(schema.names)
                raise UsageError(f"{name} has no column {column!r} (--{option}): it has {there}")
        image = self.columns.image or _image_column(schema)
        if image and _holds_bytes(schema.field(image).type):
            return image
        raise _no_images(schema, f"{self.url}/{name}", image)

    def count(self, item: Item, /) -> int:
        return item.samples

    def read(self, item: Item, /) -> Iterator[Sample | Refusal]:
        name = item.parts[0][0]
        first, last = map(int, item.extra.split(":"))
        with _open(opened(self.url), name) as file:
            image = self.check(file.schema_arrow, name)
            before = sum(file.metadata.row_group(group).num_rows for group in range(first))
            groups = range(first, last)
            batches = file.iter_batches(BATCH_ROWS, row_groups=groups, use_threads=False)
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, before):
                yield self._sample(row, image, f"{shown(name)}#{number}")

    def _sample(self, row: dict[str, Any], image: str, source: str) -> Sample | Refusal:
        value = row.pop(image)
        data = value.get("bytes") if isinstance(value, Mapping) else value
        if data is None:
            detail = f"column {image} is null"
            return Refusal(source=source, code=Code.NO_IMAGE, detail=detail)
        facts = plain_facts(row)
        captions = captions_of(facts, self.columns.caption)
        return Sample(source=source, image=data, captions=captions, facts=facts)


def read_rows(store: Store, name: str) -> Iterator[dict[str, Any]]:
    """The rows of a small table as facts, without what says nothing."""
    with _open(store, name) as file:
        for batch in file.iter_batches(1_000, use_threads=False):
            yield from map(plain_facts, batch.to_pylist())


def _open(store: Store, name: str) -> pq.ParquetFile:
    try:
        file = StoreFile(store, name)
        return pq.ParquetFile(pa.PythonFile(file, "r"), buffer_size=BUFFER_NBYTES, pre_buffer=False)
    except pa.ArrowInvalid as error:
        raise SourceError(f"{store.url}/{name} is no sound Parquet file: {error}") from error


def _runs(metadata: pq.FileMetaData, rows: int) -> Iterator[tuple[int, int, int]]:
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


def _holds_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return "bytes" in [field.name for field in kind] and _holds_bytes(kind.field("bytes").type)
    return bool(
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    )


def _image_column(schema: pa.Schema) -> str:
    held = [field.name for field in schema if _holds_bytes(field.type)]
    return next((name for name in IMAGE_NAMES if name in held), held[0] if held else "")


def _no_images(schema: pa.Schema, what: str, column: str) -> Exception:
    there = ", ".join(f"{field.name} ({field.type})" for field in schema)
    if column:
        return UsageError(f"{what}: column {column!r} holds no image bytes: it has {there}")
    if found := _first(URL_NAMES, schema.names):
        return url_table_error(f"{what} (column {found})")
    return SourceError(f"{what} has no column of image bytes: it has {there}; give --image-col")


def _first(names: Sequence[str], there: Sequence[str]) -> str:
    return next((name for name in names if name in there), "")


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
