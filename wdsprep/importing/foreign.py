"""The rows of a cache that somebody else made, file by file, whatever holds it.

A row is its columns by their names: arrays, bytes or texts and numbers. A file is one unit of work.
"""

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pyarrow as pa

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.state import read_manifest
from wdsprep.dataset.tar.members import BadSampleError
from wdsprep.dataset.tar.read import TarSample, scan, stream_tape, unzipped
from wdsprep.errors import SourceError, UsageError
from wdsprep.importing.arrays import nested
from wdsprep.limits import MAX_TEXT_NBYTES
from wdsprep.sources import Columns, Item
from wdsprep.sources.captions import decode_facts, decode_text
from wdsprep.sources.image_tables import ArrowSource, MdsSource, TableSource
from wdsprep.sources.patterns import is_glob, is_tar, table_kind, tar_stem
from wdsprep.sources.recognise import recognise
from wdsprep.sources.tables.arrow import arrow_batches, arrow_files, arrow_schema
from wdsprep.sources.tables.mds import read_index, read_samples, shards_there, value_of
from wdsprep.sources.tables.parquet import open_parquet
from wdsprep.sources.tars import TarsSource
from wdsprep.sources.url_tables import UrlSource
from wdsprep.store import opened
from wdsprep.store.base import Entry, stream
from wdsprep.text import shown

BATCH_ROWS = 16
KEYS = ("__key__", "key")
"""Columns that name a sample."""
TEXT_MEMBERS = {"json": "json", "txt": "caption", "caption.txt": "caption"}
MAX_ARRAY_NBYTES = 1 << 30  # of a member of a tar


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """`key` is that of a tar, or of a column; else it is made of the file and the number."""

    key: str
    source: str
    columns: Mapping[str, Any]


Rows = Iterator[Row | tuple[Row, RejectedError]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """A cache. `kind` is mds, arrow, parquet or tars."""

    url: str
    kind: str
    pattern: str = ""

    def items(self) -> Iterator[Item]:
        """Its files, in the order of their names, or of an index."""
        if self.kind == "mds":
            for shard, entry in shards_there(self.url):
                yield _item(entry, name=shard.raw.name, extra=shard.index, samples=shard.samples)
        elif self.kind == "arrow":
            yield from map(_item, arrow_files(self.url))
        elif self.kind == "tars":
            pattern = TarsSource(url=self.url, pattern=self.pattern, columns=Columns())
            yield from pattern.items()
        else:
            table = TableSource(
                url=self.url, pattern=self.pattern, columns=Columns(), rows_per_item=1
            )
            for entry in table.files():
                with open_parquet(opened(self.url), entry.name) as file:
                    yield _item(entry, samples=file.metadata.num_rows)

    def columns(self, item: Item) -> list[str]:
        """Of a file; of a tar, those of its first sample."""
        if self.kind == "mds":
            return [*read_index(self.url, item.extra)[item.name].encodings]
        if self.kind == "arrow":
            return list(arrow_schema(self.url, item.name).names)
        if self.kind == "parquet":
            with open_parquet(opened(self.url), item.name) as file:
                return list(file.schema_arrow.names)
        first = next((found for found in self._tar(item.name, ()) if _is_sample(found)), None)
        if not isinstance(first, TarSample):
            raise SourceError(f"{self.url}/{item.name} holds no sample: name another source")
        return [*first.fields, *(first.unread or ())]

    def count(self, item: Item) -> int:
        return item.samples or sum(1 for _ in self.rows(item, ()))

    def rows(self, item: Item, wanted: Sequence[str]) -> Rows:
        """The rows of a file; of columns of arrays those alone that are wanted."""
        if self.kind == "tars":
            yield from self._of_tar(item.name, wanted)
            return
        stem = stem_of(item.name).replace(".", "_")
        for number, columns in enumerate(self._columns(item, wanted)):
            said = next((columns[name] for name in KEYS if columns.get(name)), "")
            key = str(said).replace(".", "_") or f"{stem}-{number:07d}"
            yield Row(key=key, source=f"{shown(item.name)}#{number}", columns=columns)

    def _columns(self, item: Item, wanted: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        if self.kind == "mds":
            shard = read_index(self.url, item.extra)[item.name]
            said = shard.encodings
            names = [n for n, kind in said.items() if n in wanted or not _is_large(kind)]
            for fields in read_samples(self.url, shard, item.parts[0][0], names):
                yield {name: _value(said[name], data) for name, data in fields.items()}
        elif self.kind == "arrow":
            schema = arrow_schema(self.url, item.name)
            names = _readable(schema, wanted)
            for batch in arrow_batches(self.url, item.name, BATCH_ROWS):
                yield from _rows_of(batch.select(names), wanted)
        else:
            with open_parquet(opened(self.url), item.name) as file:
                names = _readable(file.schema_arrow, wanted)
                for batch in file.iter_batches(BATCH_ROWS, columns=names, use_threads=False):
                    yield from _rows_of(batch, wanted)

    def _of_tar(self, tar: str, wanted: Sequence[str]) -> Rows:
        for found in self._tar(tar, wanted):
            source = shown(f"{tar}/{found.key}" if found.key else tar)
            if isinstance(found, BadSampleError):
                refused = RejectedError(Code.named(f"tar_{found.code}"), str(found))
                yield Row(key=found.key or stem_of(tar), source=source, columns={}), refused
                continue
            try:
                yield Row(key=found.key, source=source, columns=_of_members(found, wanted))
            except RejectedError as refused:
                yield Row(key=found.key, source=source, columns={}), refused

    def _tar(self, tar: str, wanted: Sequence[str]) -> Iterator[TarSample | BadSampleError]:
        def wants(name: str, nbytes: int, _before: object) -> bool:
            if name in TEXT_MEMBERS:
                return nbytes <= MAX_TEXT_NBYTES
            return name in wanted and nbytes <= MAX_ARRAY_NBYTES

        with stream(opened(self.url), tar) as file:
            yield from scan(stream_tape(unzipped(file)), wants=wants)


def _is_sample(found: TarSample | BadSampleError) -> bool:
    return isinstance(found, TarSample)


def _item(entry: Entry, *, name: str = "", extra: str = "", samples: int = 0) -> Item:
    parts = ((entry.name, entry.nbytes, entry.stamp),)
    return Item(name=name or entry.name, parts=parts, extra=extra, samples=samples)


def stem_of(name: str) -> str:
    """The name of a file without what says its kind."""
    stem = tar_stem(name)
    return stem if stem != name else posixpath.splitext(name)[0]


def find_foreign(url: str) -> Foreign:
    """The cache at `url`, by what lies there."""
    names_files = is_glob(url) or is_tar(url) or table_kind(url)
    if not names_files and read_manifest(opened(url)) is not None:
        raise UsageError(f"{url} is a dataset of wdsprep already: wdsprep.load serves it as it is")
    found = recognise(url, columns=Columns(), rows_per_item=1)
    if isinstance(found, MdsSource):
        return Foreign(url=found.url, kind="mds")
    if isinstance(found, ArrowSource):
        return Foreign(url=found.url, kind="arrow")
    if isinstance(found, TarsSource):
        return Foreign(url=found.url, kind="tars", pattern=found.pattern)
    is_parquet = isinstance(found, UrlSource) and found.kinds == {"parquet"}
    if isinstance(found, TableSource) or is_parquet:
        return Foreign(url=found.url, kind="parquet", pattern=getattr(found, "pattern", ""))
    raise SourceError(
        f"{url} holds no cached latents: name MDS shards, what datasets has saved, Parquet or tars"
    )


def _is_large(encoding: str) -> bool:
    return encoding.partition(":")[0] in ("ndarray", "bytes", "jpeg", "png", "pil")


def _value(encoding: str, data: bytes) -> Any:
    try:
        return value_of(encoding, data)
    except ValueError as error:
        return error  # which whoever wants an array there refuses


def _readable(schema: pa.Schema, wanted: Sequence[str]) -> list[str]:
    """The columns that are wanted, and those of texts and numbers."""
    return [f.name for f in schema if f.name in wanted or not _is_nested(f.type)]


def _is_nested(kind: pa.DataType) -> bool:
    is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return bool(is_bytes or pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType))


def _rows_of(batch: pa.RecordBatch, wanted: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    found: dict[str, Sequence[Any]] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        plain = column.storage if isinstance(column, pa.ExtensionArray) else column
        is_array = name in wanted and hasattr(plain.type, "value_type")
        found[name] = nested(plain) if is_array else plain.to_pylist()
    for values in zip(*found.values(), strict=True):
        yield dict(zip(found, values, strict=True))


def _of_members(found: TarSample, wanted: Sequence[str]) -> Mapping[str, Any]:
    """The json's fields and the caption beside the arrays."""
    facts: dict[str, Any] = {}
    for name, data in found.fields.items():
        if TEXT_MEMBERS.get(name) == "json":
            facts |= decode_facts(data, name)
        elif TEXT_MEMBERS.get(name) == "caption":
            facts["caption"] = decode_text(data, name)
    return {**facts, **{name: found.fields[name] for name in wanted if name in found.fields}}


def first_rows(foreign: Foreign, items: Sequence[Item], wanted: Sequence[str]) -> Iterator[Row]:
    """Of all files, those that can be read."""
    rows = chain.from_iterable(foreign.rows(item, wanted) for item in items)
    return (row for row in rows if isinstance(row, Row))
