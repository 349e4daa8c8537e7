"""A table of captions, which is read once and stored as a `lookup` in each dataset of a run.

A record beside the lookup says what was read. So a run that continues does not read the table
again, unless one of its files has another size or date.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from wdsprep.dataset.digests import hex_digest
from wdsprep.dataset.file_names import CAPTION_TABLE, lookup_name, taken_name
from wdsprep.dataset.json_records import Nbytes, Text, read_record
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.rejects import Refusal, RejectedError
from wdsprep.dataset.samples import Sample, facts_bytes
from wdsprep.dataset.thread_map import read_each
from wdsprep.encoding.captions.lookup import FORM, Lookup, LookupFile, digest_of_file, open_lookup
from wdsprep.encoding.captions.options import CaptionOptions
from wdsprep.encoding.captions.sources import (
    OWN,
    CaptionSource,
    CaptionUse,
    FieldCaptions,
    name_of,
    replace_surrogates,
)
from wdsprep.encoding.image_shards import ImageShard
from wdsprep.encoding.shard_texts import is_read_in_parts, read_texts
from wdsprep.errors import FormatError, NotFoundError, SourceError, UsageError
from wdsprep.limits import MAX_TEXT_NBYTES
from wdsprep.sources.captions import first_of
from wdsprep.sources.recognise import recognise_tables
from wdsprep.sources.tables.files import BY, Table, TableFiles
from wdsprep.sources.tars import TarsSource
from wdsprep.store import open_store, shared_store
from wdsprep.store.base import Entry, Store, write_bytes
from wdsprep.text import EXAMPLES, human_bytes, human_time, list_columns, plural

if TYPE_CHECKING:
    from wdsprep.encoding.captions.sorted_pairs import Pairs

ROWS_AT_ONCE = 4_096
LOOKED_AT = 1_000  # first samples, or rows of JSON lines, that are taken to be like the others


@dataclass(frozen=True, kw_only=True)
class CaptionTable:
    """A table of captions, in one file or several, with its columns of names and captions."""

    url: str
    files: TableFiles
    entries: tuple[Entry, ...]
    by: str
    column: str

    @classmethod
    def find(cls, url: str, by: str, column: str) -> "CaptionTable":
        """Return the table at a place, or raise UsageError if it lacks the column `by` or `column`.

        An empty `by` stands for the first of `BY` that the table has, an empty `column` for
        caption. Files of JSON lines after the first file are not checked. Raise SourceError if a
        file has no columns.
        """
        files = recognise_tables(url)
        entries = tuple(files.entries())
        found = cls(url=url, files=files, entries=entries, by=by, column=column or "caption")
        there = _find_columns(files.open(entries[0].name))
        found = replace(found, by=by or first_of(BY, there))
        found.check(entries[0].name, there)
        for entry in entries[1:]:
            if (table := files.open(entry.name)).has_schema:
                found.check(entry.name, table.columns())
        return found

    def check(self, name: str, there: Sequence[str]) -> None:
        what = f"{self.files.url}/{name}" if len(self.entries) > 1 else self.url
        if not there:
            raise SourceError(f"{what} is empty: give the path of a table of captions")
        if not self.by:
            raise UsageError(
                f"{what} has {list_columns(there)}, and no column that identifies samples: add a "
                f"column {', '.join(BY[:-1])} or {BY[-1]}"
            )
        asked = {"--captions-by": self.by, "--caption-column": self.column}
        for option, column in asked.items():
            if column not in there:
                raise UsageError(
                    f"{what} has no column {column!r} ({option}): it has {list_columns(there)}"
                )

    @cached_property
    def identity(self) -> str:
        """Return a digest of the names, sizes and dates of a table's files.

        It tells whether a table is the same as before without reading it.
        """
        files = [[entry.name, entry.nbytes, entry.stamp] for entry in self.entries]
        return hex_digest(json.dumps([FORM, self.by, self.column, files]).encode())

    def values(self) -> Iterator[tuple[str, int, list[Any], list[Any]]]:
        """Yield the rows of a table in parts.

        A part has the name of its file, the number of its first row in that file, the names and the
        captions.
        """
        for entry in self.entries:
            first = 0
            table = self.files.open(entry.name)
            for names, captions in table.values((self.by, self.column), ROWS_AT_ONCE):
                yield entry.name, first, names, captions
                first += len(names)


def _find_columns(table: Table) -> list[str]:
    """Return the columns of a table, or for JSON lines all names in its first rows."""
    if table.has_schema:
        return table.columns()
    where = next(table.parts(LOOKED_AT), ("", 0))[0]
    rows = [row for _, row in table.rows(where) if isinstance(row, dict)] if where else []
    return list(dict.fromkeys(name for row in rows for name in row))


class _TablePairs:
    """An iterable over the names and captions of a table; rows that lack either are only counted.

    `rows` counts all rows, and `blank` those that lack a name or a caption. An iteration raises
    SourceError at a row that cannot be read, that has a value of a wrong type, or whose caption is
    too long.
    """

    def __init__(self, table: CaptionTable) -> None:
        self._table = table
        self.rows = self.blank = 0

    def __iter__(self) -> "Iterator[Pairs]":
        for file, first, names, captions in self._table.values():
            self.rows += len(names)
            pairs = _convert_texts(names, captions) or self._check_rows(
                file, first, names, captions
            )
            self.blank += len(names) - len(pairs[0])
            yield pairs

    def _check_rows(self, file: str, first: int, names: list[Any], captions: list[Any]) -> "Pairs":
        found: list[tuple[str, str]] = []
        for number, (name, caption) in enumerate(zip(names, captions, strict=True), first):
            for one in (name, caption):
                if isinstance(one, RejectedError):
                    raise self._row_error(file, number, f"cannot be read ({one})")
            if isinstance(name, int) and not isinstance(name, bool):
                name = str(name)
            if not (isinstance(name, str | None) and isinstance(caption, str | None)):
                is_named = isinstance(name, str | None)
                what, value = (self._table.column, caption) if is_named else (self._table.by, name)
                why = f"has a {type(value).__name__} for its {what}, not a text"
                raise self._row_error(file, number, why)
            if name and caption and (text := caption.strip()):
                if _is_too_long(text := replace_surrogates(text)):
                    nbytes = human_bytes(len(text.encode()))
                    why = f"has a caption of {nbytes}, more than a sample can have"
                    raise self._row_error(file, number, why)
                found.append((replace_surrogates(name), text))
        return [name for name, _ in found], [text for _, text in found]

    def _row_error(self, file: str, number: int, why: str) -> SourceError:
        what = f"{self._table.files.url}/{file}"
        return SourceError(f"row {number} of {what} {why}: correct it (the first row is 0)")


def _convert_texts(names: list[Any], captions: list[Any]) -> "Pairs | None":
    """Return the names and captions of rows, or None unless each has a name and a short caption.

    Nearly all rows have both, and this takes a sixth of the time that `_check_rows` takes.
    """
    if {*map(type, names), *map(type, captions)} != {str} or not all(names):
        return None
    texts = [caption.strip() for caption in captions]
    if not all(texts) or 12 * max(map(len, texts)) >= MAX_TEXT_NBYTES:
        return None
    return [*map(replace_surrogates, names)], [*map(replace_surrogates, texts)]


def _is_too_long(caption: str) -> bool:
    """Return whether a caption takes more than half of the bytes that a sample's json may have.

    A character takes up to 6 bytes there.
    """
    if 12 * len(caption) < MAX_TEXT_NBYTES:
        return False
    return 2 * len(facts_bytes({OWN: caption})) > MAX_TEXT_NBYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRead:
    """The record of a table of captions that was read: its identity, its rows and its lookup."""

    identity: Text
    rows: Nbytes
    blank: Nbytes
    """The number of rows that have no name, or no caption."""
    lookup: Lookup

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode() + b"\n"

    @classmethod
    def of(cls, store: Store) -> "TableRead | None":
        """Return the record of the table that a dataset was made with.

        Return None if the dataset has no record, or a damaged one.
        """
        with suppress(NotFoundError, FormatError):
            said = read_record(cls, store.read(CAPTION_TABLE), CAPTION_TABLE)
            known = {field.name: said["lookup"][field.name] for field in fields(Lookup)}
            lookup = Lookup(**{**known, "examples": tuple(known["examples"])})
            if lookup.names > lookup.nbytes:
                return None
            return cls(
                identity=said["identity"], rows=said["rows"], blank=said["blank"], lookup=lookup
            )
        return None


def _has_lookup(store: Store, lookup: Lookup) -> bool:
    """Return whether a store has a sound copy of a lookup. Of a remote one only the size counts."""
    name = lookup_name(lookup.digest)
    if not any((e.name, e.nbytes) == (name, lookup.nbytes) for e in store.list(name)):
        return False
    return not store.root or digest_of_file(store, name) == lookup.file_digest


def _read_known(place: str) -> TableRead | None:
    """Return the record of a dataset's caption table, or None if record or lookup is not sound."""
    store = open_store(place)
    read = TableRead.of(store)
    return read if read and _has_lookup(store, read.lookup) else None


class PreparedCaptions:
    """The sources of captions for the datasets of a run, with the lookup of a table, if any."""

    def __init__(
        self,
        sources: Sequence[CaptionSource],
        table: str = "",
        read: TableRead | None = None,
        file: LookupFile | None = None,
    ) -> None:
        self.sources, self.table, self.read, self._file = tuple(sources), table, read, file

    def put(self, store: Store) -> None:
        """Write the lookup and the record of the table into a dataset, unless they are there."""
        if self.read is None:
            return
        if self._file and not _has_lookup(store, self.read.lookup):
            self._file.copy_to(store, lookup_name(self.read.lookup.digest))
        if TableRead.of(store) != self.read:
            write_bytes(store, CAPTION_TABLE, self.read.to_bytes())

    def close(self) -> None:
        if self._file:
            self._file.close()


def find_table(options: CaptionOptions) -> CaptionTable | None:
    """Return the table of captions that the options name, or None; only its columns are read."""
    if not options.captions:
        return None
    return CaptionTable.find(str(options.captions), options.captions_by, options.caption_column)


def prepare_captions(
    options: CaptionOptions,
    table: CaptionTable | None,
    tars: TarsSource,
    shards: Sequence[ImageShard],
    places: Sequence[str],
    *,
    is_kept: bool,
    hashed_by: str | None,
    told: Callable[[str], object],
) -> PreparedCaptions:
    """Return the sources of captions for a run, and read the table if that is necessary.

    Nothing is written to the datasets at `places`. If `is_kept`, the table is not read if all these
    datasets have its lookup and its files have not changed. `told` gets progress, and a warning if
    none of the first samples has the field, or the name, by which captions are found. `hashed_by`
    is the digest that pack gave the images, or None if pack did not make them.
    """
    sources = options.sources
    for source in sources:
        if source.field and (missing := _warn_of_field(source.field, tars, shards)):
            told(missing)
    if table is None:
        return PreparedCaptions(sources)
    if missing := _warn_of_names(table.by, tars, shards, hashed_by):
        told(missing)
    known = {_read_known(place) for place in places} if is_kept else set()
    read, file = known.pop() if len(known) == 1 else None, None
    if read is None or read.identity != table.identity:
        read, file = _read_table(table, told)
    (source,) = sources
    made = read.lookup
    source = replace(
        source, by=table.by, digest=made.digest, file_digest=made.file_digest, at=places[0]
    )
    return PreparedCaptions([source], str(options.captions), read, file)


def _read_table(table: CaptionTable, told: Callable[[str], object]) -> tuple[TableRead, LookupFile]:
    told(f"{table.url}: reading captions by {table.by}; they are kept beside the shards")
    began, pairs = time.monotonic(), _TablePairs(table)
    file = LookupFile(pairs)
    if not file.lookup.names:
        file.close()
        none = "no row" if not pairs.rows else f"no row with a {table.by} and a {table.column}"
        raise SourceError(f"{table.url} has {none}: give the path of a table of captions")
    took = human_time(time.monotonic() - began)
    told(f"{table.url}: {plural(file.lookup.names, 'caption')} by {table.by}, read in {took}")
    return TableRead(
        identity=table.identity, rows=pairs.rows, blank=pairs.blank, lookup=file.lookup
    ), file


def _first_samples(
    tars: TarsSource, shards: Sequence[ImageShard]
) -> Iterator[tuple[str, Sample, bool]]:
    """Yield the first samples of the first shard: key, sample, and whether pack made the shard.

    If the shard is missing or damaged, nothing more is yielded: a worker reports that later.
    """
    for shard in shards[:1]:
        with suppress(NotFoundError, FormatError):
            for key, row in islice(
                _read_samples(replace(tars, has_images=False), shard), LOOKED_AT
            ):
                if isinstance(row, Sample):
                    yield key, row, not shard.is_foreign


def _read_samples(tars: TarsSource, shard: ImageShard) -> Iterator[tuple[str, Sample | Refusal]]:
    store = shared_store(tars.url)
    if is_read_in_parts(store, shard):
        return read_texts(tars, store, shard)
    return tars.read_keyed(shard.item)


def _warn_of_names(
    by: str, tars: TarsSource, shards: Sequence[ImageShard], hashed_by: str | None
) -> str:
    """Return a warning if the first samples all lack the name by which a table lists them, or "".

    Raise UsageError instead if the name is a digest that pack was not asked to compute.
    """
    if by == "key":
        return ""
    first = [name_of(by, *each[:2], is_packed=each[2]) for each in _first_samples(tars, shards)]
    if any(first) or not first:
        return ""
    if by == "sha256" and hashed_by not in (None, by):
        raise UsageError(
            f"--captions is by {by}, which the samples of {tars.url} lack: pack with "
            "--compute-hash sha256, or give a table with another of "
            + ", ".join(name for name in BY if name != by)
        )
    return (
        f"none of the first {plural(len(first), 'sample')} of {tars.url} has a {by}, which "
        "--captions is by: samples without one keep their own captions"
    )


def _warn_of_field(path: str, tars: TarsSource, shards: Sequence[ImageShard]) -> str:
    """Return a warning if none of the first samples has a caption at a path of its json, or ""."""
    captions = FieldCaptions(path)
    there: dict[str, None] = {}
    seen = 0
    for key, sample, is_packed in _first_samples(tars, shards):
        if captions.find(key, sample, is_packed=is_packed):
            return ""
        seen += 1
        meta = sample.facts.get("meta")
        there |= dict.fromkeys(sample.facts)
        there |= dict.fromkeys(f"meta.{name}" for name in (meta if isinstance(meta, dict) else ()))
    if not seen:
        return ""
    return (
        f"none of the first {plural(seen, 'sample')} of {tars.url} has a caption in {path}: "
        f"samples without one keep their own captions; their json has {list_columns(sorted(there))}"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionReport:
    """The number of samples of a dataset with a caption from a table or a field, and without."""

    source: CaptionSource
    named: int
    """The number of samples that have a caption from the table or the field."""
    unnamed: int
    """The number of samples that keep their own caption."""
    unnamed_examples: tuple[str, ...] = ()
    table: str = ""
    read: TableRead | None = None
    unmatched: int | None = None
    """The number of rows that no sample uses; None while samples are missing, or files are lost."""
    unmatched_examples: tuple[str, ...] = ()
    place: str = ""
    lost: tuple[str, ...] = ()
    """Files with the rows that a shard's samples use, if they cannot be read."""


def report_captions(
    ready: PreparedCaptions, source: CaptionSource, place: str, manifest: Manifest
) -> CaptionReport:
    """Return a report of the captions of a dataset.

    Rows of a table that no sample uses are known once the dataset is complete.
    """
    named = manifest.counts.get("named", 0)
    unnamed = manifest.samples - named
    report = CaptionReport(source=source, named=named, unnamed=unnamed, place=place)
    if ready.read is None:
        return report
    store = open_store(place)
    report = replace(report, table=ready.table, read=ready.read)
    rows, keys, lost = _read_caption_uses(store, manifest, ready.read.lookup.names)
    report = replace(report, unnamed_examples=keys, lost=lost)
    if not manifest.complete or lost:
        return report
    left = islice((row for row, taken in enumerate(rows) if not taken), EXAMPLES)
    missing = rows.count(0)
    examples = tuple(_find_names(store, ready.read.lookup, list(left))) if missing else ()
    return replace(report, unmatched=missing, unmatched_examples=examples)


def _read_caption_uses(
    store: Store, manifest: Manifest, names: int
) -> tuple[bytearray, tuple[str, ...], tuple[str, ...]]:
    """Return a byte for each row of the lookup, which is 1 if a sample uses the row.

    Also return the keys of a few samples that the lookup does not have, and the names of the files
    that cannot be read. `names` is the number of rows.
    """
    rows, lost = bytearray(names), list[str]()

    def unnamed(unit: str) -> list[str]:
        try:
            taken = CaptionUse.from_bytes(store.read(taken_name(unit)))
            for row in taken.rows:
                rows[row] = 1
        except (NotFoundError, FormatError, LookupError):
            lost.append(taken_name(unit))
            return []
        return taken.unnamed

    found = read_each(unnamed, manifest.ledger.units(), store.readers)
    return rows, tuple(islice(chain.from_iterable(found), EXAMPLES)), tuple(sorted(lost))


def _find_names(store: Store, lookup: Lookup, rows: Sequence[int]) -> list[str]:
    opened = open_lookup(store.url, lookup_name(lookup.digest), lookup.file_digest)
    try:
        return opened.names(rows)
    finally:
        opened.close()
