"""Read the rows of a cache that another tool made, file by file, in any of its formats.

A row has columns by name: arrays, bytes, texts and numbers. A file is one unit of work.
"""

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject, RejectedError
from wdsprep.dataset.stored_dataset import read_manifest
from wdsprep.dataset.tar.members import BadSampleError
from wdsprep.dataset.tar.read import TarSample, open_unpacked_tape, scan
from wdsprep.errors import SourceError, UsageError
from wdsprep.importing.column_arrays import nested_array
from wdsprep.limits import MAX_NBYTES, MAX_TEXT_NBYTES
from wdsprep.sources.base import Columns, Item, item_of, make_or_refuse
from wdsprep.sources.captions import decode_facts, decode_text
from wdsprep.sources.folder import check_nbytes
from wdsprep.sources.patterns import PARQUET, is_glob, is_tar, table_files, table_kind, tar_stem
from wdsprep.sources.recognise import UnclearSourceError, recognise
from wdsprep.sources.table_sources import ArrowSource, MdsSource, TableSource, UrlSource
from wdsprep.sources.tables import TableRow
from wdsprep.sources.tables.arrow import arrow_batches, arrow_files, arrow_schema, count_arrow_rows
from wdsprep.sources.tables.mds import fields_in, read_index, read_samples, shards_there, value_of
from wdsprep.sources.tables.parquet import open_parquet, rows_in
from wdsprep.sources.tars import TarsSource
from wdsprep.store import shared_store
from wdsprep.text import shown

BATCH_ROWS = 16
KEYS = ("__key__", "key")
"""The columns that hold the key of a sample."""
KINDS = {MdsSource: "mds", ArrowSource: "arrow", TarsSource: "tars", TableSource: "parquet"}
LARGE = ("ndarray", "bytes", "jpeg", "png", "pil")
"""The encodings of MDS that hold arrays or images."""
TEXT_MEMBERS = {"json": "json", "txt": "caption", "caption.txt": "caption"}


Values = Mapping[str, Any]
MakeValues = Callable[[], Values]
"""A function that returns the values of a row."""
Row = tuple[str, str, Values | Reject]
"""The key of a row of a cache, its source, and its values or why it cannot be imported.

The key is that in a tar or in a column. Otherwise it is made of the name of the file and the number
of the row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentCache:
    """A cache of latents that another tool made. `kind` is mds, arrow, parquet or tars.

    `sample_files` has those of further kinds.
    """

    url: str
    kind: str
    pattern: str = ""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Return the settings of the dataset that the cache tells of, such as its pipeline."""
        return {}

    def items(self) -> Iterator[Item]:
        """Yield the files of the cache by name, or as the index of an MDS folder lists them."""
        if self.kind == "mds":
            for shard, entry in shards_there(self.url):
                yield item_of(entry, name=shard.raw.name, extra=shard.index, samples=shard.samples)
        elif self.kind == "arrow":
            yield from map(item_of, arrow_files(self.url))
        elif self.kind == "tars":
            pattern = TarsSource(url=self.url, pattern=self.pattern, columns=Columns())
            yield from pattern.items()
        else:
            for entry in table_files(self.url, self.pattern, PARQUET):
                with open_parquet(shared_store(self.url), entry.name) as file:
                    yield item_of(entry, samples=file.rows)

    def columns(self, items: Sequence[Item]) -> list[str]:
        """Return the columns of the first file; for a tar, the members of its first sample."""
        item = items[0]
        if self.kind == "mds":
            return [*read_index(self.url, item.extra)[item.name].encodings]
        if self.kind == "arrow":
            return list(arrow_schema(self.url, item.name).names)
        if self.kind == "parquet":
            with open_parquet(shared_store(self.url), item.name) as file:
                return list(file.schema.names)
        samples = self._tar_samples(item.name, ())
        first = next((sample for sample in samples if isinstance(sample, TarSample)), None)
        if first is None:
            raise SourceError(f"{self.url}/{item.name} holds no sample: give another source")
        return [*first.fields, *(first.unread or ())]

    def count(self, item: Item) -> int:
        """Return the number of rows of a file."""
        if self.kind == "tars":
            return sum(1 for _ in self._tar_samples(item.name, None))
        if self.kind == "arrow":
            return count_arrow_rows(self.url, item.name)
        return item.samples

    def rows(self, item: Item, wanted: Sequence[str]) -> Iterator[Row]:
        """Yield the rows of a file.

        Of the columns with arrays only the wanted ones are read. A row that cannot be read has a
        reject.
        """
        stem = stem_of(item.name)
        if self.kind == "tars":
            for sample in self._tar_samples(item.name, wanted):
                source = shown(f"{item.name}/{sample.key}" if sample.key else item.name)
                yield make_row(sample.key or stem, source, partial(_member_values, sample, wanted))
            return
        stem = stem.replace(".", "_")
        for number, make in enumerate(self._row_makers(item, wanted)):
            yield make_row(f"{stem}-{number:07d}", f"{shown(item.name)}#{number}", make)

    def _row_makers(self, item: Item, wanted: Sequence[str]) -> Iterator[MakeValues]:
        if self.kind == "mds":
            shard = read_index(self.url, item.extra)[item.name]
            names = [
                name
                for name, kind in shard.encodings.items()
                if name in wanted or kind.partition(":")[0] not in LARGE
            ]

            def values_in(data: bytes) -> Values:
                fields = fields_in(shard, data, names) if names else {}
                return {n: value_of(shard.encodings[n], value, n) for n, value in fields.items()}

            for data in read_samples(self.url, shard, item.parts[0][0]):
                yield partial(values_in, data)
        elif self.kind == "arrow":
            names = _columns_to_read(arrow_schema(self.url, item.name), wanted)
            for batch in arrow_batches(self.url, item.name, BATCH_ROWS):
                yield from _batch_values(batch.select(names), wanted)
        else:
            with open_parquet(shared_store(self.url), item.name) as file:
                names = _columns_to_read(file.schema, wanted)
                for batch in file.batches(BATCH_ROWS, columns=names):
                    yield from _batch_values(batch, wanted)

    def _tar_samples(
        self, tar: str, wanted: Sequence[str] | None
    ) -> Iterator[TarSample | BadSampleError]:
        """Yield the samples of a tar with their texts and the `wanted` members, or an error of one.

        If `wanted` is None, the samples have nothing but keys.
        """
        read = () if wanted is None else {*wanted, *TEXT_MEMBERS}

        def wants(name: str, nbytes: int, _before: object) -> bool:
            return name in read and nbytes <= _most_nbytes(name)

        with open_unpacked_tape(shared_store(self.url), tar) as tape:
            yield from scan(tape, wants=wants)


def stem_of(name: str) -> str:
    """Return the name of a file without its extension."""
    stem = tar_stem(name)
    return stem if stem != name else posixpath.splitext(name)[0]


def find_cache(url: str) -> LatentCache:
    """Return the cache at `url`, whose format is recognised by its files."""
    names_files = is_glob(url) or is_tar(url) or table_kind(url)
    if not names_files and read_manifest(shared_store(url)) is not None:
        raise UsageError(f"{url} is a dataset of wdsprep already: load it with wdsprep.load")
    give = (
        "give MDS shards, files of datasets, Parquet, tars, or a cache of musubi-tuner or Automodel"
    )
    try:
        source = recognise(url, columns=Columns(), rows_per_item=1)
    except UnclearSourceError as error:
        raise SourceError(f"{error.what}: {give}") from error
    kind = KINDS.get(type(source), "")
    if kind or (isinstance(source, UrlSource) and source.kinds == {"parquet"}):
        pattern = getattr(source, "pattern", "")
        return LatentCache(url=source.url, kind=kind or "parquet", pattern=pattern)
    raise SourceError(f"{url} holds no cached latents: {give}")


def make_row(key: str, source: str, make: MakeValues) -> Row:
    """Return a row with the values that `make` returns, or with a reject if they cannot be read.

    The key of the row is in one of the columns KEYS, or else it is `key`.
    """
    values = make_or_refuse(source, make)
    if isinstance(values, Reject):
        return key, source, values
    stated = next((values[name] for name in KEYS if values.get(name)), "")
    return str(stated).replace(".", "_") or key, source, values


def _columns_to_read(schema: pa.Schema, wanted: Sequence[str]) -> list[str]:
    """Return the names of the columns to read: the wanted ones, and all plain ones."""

    def is_plain(kind: pa.DataType) -> bool:
        is_nested = pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType)
        return not (is_nested or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))

    return [f.name for f in schema if f.name in wanted or is_plain(f.type)]


def _batch_values(batch: pa.RecordBatch, wanted: Sequence[str]) -> Iterator[MakeValues]:
    def raise_if_rejected(row: TableRow) -> Values:
        if isinstance(row, RejectedError):
            raise row
        return row

    rows = rows_in(batch, partial(_values, wanted=wanted))
    return (partial(raise_if_rejected, row) for row in rows)


def _values(batch: pa.RecordBatch, wanted: Sequence[str]) -> list[dict[str, Any]]:
    columns: dict[str, list[Any]] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        plain = column.storage if isinstance(column, pa.ExtensionArray) else column
        is_array = name in wanted and hasattr(plain.type, "value_type")
        arrays = (nested_array(plain, number) for number in range(len(plain)))
        columns[name] = [*arrays] if is_array else plain.to_pylist()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _member_values(sample: TarSample | BadSampleError, wanted: Sequence[str]) -> Values:
    """Return the values of a sample in a tar: the wanted members, json fields, and its caption.

    Raise RejectedError if the sample is damaged, or if a wanted member is too large.
    """
    if isinstance(sample, BadSampleError):
        raise RejectedError(Code(f"tar_{sample.code}"), str(sample))
    for name, nbytes in (sample.unread or {}).items():
        if name in wanted and isinstance(nbytes, int):
            check_nbytes(name, nbytes, _most_nbytes(name))
    facts: dict[str, Any] = {}
    for name, data in sample.fields.items():
        if TEXT_MEMBERS.get(name) == "json":
            facts |= decode_facts(data, name)
        elif TEXT_MEMBERS.get(name) == "caption":
            facts["caption"] = decode_text(data, name)
    return {**facts, **{name: sample.fields[name] for name in wanted if name in sample.fields}}


def _most_nbytes(member: str) -> int:
    return MAX_TEXT_NBYTES if member in TEXT_MEMBERS else MAX_NBYTES
