"""Parquet tables with the images' bytes in a column, as Ray and Hugging Face write them.

An item is a run of row groups of one file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Refusal, RejectedError
from wdsprep.dataset.samples import Sample
from wdsprep.errors import SourceError, UsageError
from wdsprep.sources import Columns, Item, Told, alone, untold
from wdsprep.sources.captions import NAMES, captions_of, first_of, plain_facts
from wdsprep.sources.patterns import table_files
from wdsprep.sources.tables import TableRow
from wdsprep.sources.tables.parquet import open_parquet, rows_in, runs
from wdsprep.store import opened
from wdsprep.store.base import Entry
from wdsprep.text import columns, shown

BATCH_ROWS = 32
IMAGE_NAMES = ("image", "jpg", "jpeg", "png", "webp", "bytes", "image_bytes", "data", "content")


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSource:
    """The Parquet files below `url` that match `pattern`, or all of them where it is empty."""

    url: str
    pattern: str
    columns: Columns
    rows_per_item: int
    kind: str = "table"

    def files(self, left_out: Told = untold) -> Iterator[Entry]:
        return table_files(self.url, self.pattern, frozenset({"parquet"}), left_out)

    def items(self, left_out: Told = untold) -> Iterator[Item]:
        for entry in self.files(left_out):
            with open_parquet(opened(self.url), entry.name) as file:
                self.check(file.schema_arrow, entry.name)
                for first, last, rows in runs(file.metadata, self.rows_per_item):
                    yield Item(
                        name=f"{entry.name}[{first}:{last}]",
                        parts=((entry.name, entry.nbytes, entry.stamp),),
                        extra=f"{first}:{last}",
                        samples=rows,
                    )

    def chosen(self) -> tuple[str, str]:
        """The columns that images and captions come from, in the first file ("" for none)."""
        first = next(self.files())
        with open_parquet(opened(self.url), first.name) as file:
            schema = file.schema_arrow
            image = self.check(schema, first.name)
            return image, self.columns.caption or first_of(NAMES, schema.names)

    def check(self, schema: pa.Schema, name: str) -> str:
        """The column that holds the images; an error that names the columns where there is none."""
        self.columns.check(schema.names, name)
        image = self.columns.image or image_column(schema)
        if image and holds_bytes(schema.field(image).type):
            return image
        raise _no_images(schema, f"{self.url}/{name}", image)

    def count(self, item: Item, /) -> int:
        return item.samples

    def read(
        self,
        item: Item,
        /,
        left_out: Told = untold,  # noqa: ARG002  the listing knows all
    ) -> Iterator[Sample | Refusal]:
        name = item.parts[0][0]
        first, last = map(int, item.extra.split(":"))
        with open_parquet(opened(self.url), name) as file:
            image = self.check(file.schema_arrow, name)
            before = sum(file.metadata.row_group(group).num_rows for group in range(first))
            groups = range(first, last)
            batches = file.iter_batches(BATCH_ROWS, row_groups=groups, use_threads=False)
            rows = (row for batch in batches for row in rows_in(batch))
            for number, row in enumerate(rows, before):
                source = f"{shown(name)}#{number}"
                yield alone(source, partial(self._sample, row, image, source))

    def _sample(self, row: TableRow, image: str, source: str) -> Sample:
        if isinstance(row, RejectedError):
            raise row
        value = row.pop(image)
        data = value.get("bytes") if isinstance(value, Mapping) else value
        if data is None:
            raise RejectedError(Code.NO_IMAGE, f"column {image} is null")
        facts = plain_facts(row)
        captions = captions_of(facts, self.columns.caption)
        return Sample(source=source, image=data, captions=captions, facts=facts)


def holds_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return "bytes" in [field.name for field in kind] and holds_bytes(kind.field("bytes").type)
    return bool(
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    )


def image_column(schema: pa.Schema) -> str:
    held = [field.name for field in schema if holds_bytes(field.type)]
    return next((name for name in IMAGE_NAMES if name in held), held[0] if held else "")


def _no_images(schema: pa.Schema, what: str, column: str) -> Exception:
    there = columns([f"{field.name} ({field.type})" for field in schema])
    if column:
        return UsageError(f"{what}: column {column!r} holds no image bytes: it has {there}")
    return SourceError(
        f"{what} has no column of image bytes: it has {there}; give --image-col, or --url-col "
        "where a column holds the images' URLs"
    )
