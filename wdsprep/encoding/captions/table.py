"""A table of captions, made ready for a run: read once, as a `lookup` in each dataset of the run.

What was read, and what came of it, stands beside the lookup. So a run that goes on does not read
the table again, unless a file of it has another size or date.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from wdsprep.dataset.digests import DigestKind
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.names import CAPTION_TABLE, lookup_name, taken_name
from wdsprep.dataset.read_ahead import read_each
from wdsprep.dataset.records import Nbytes, Text, read_record
from wdsprep.dataset.rejects import Refusal, RejectedError
from wdsprep.dataset.samples import Sample, facts_bytes
from wdsprep.encoding.captions.lookup import FORM, Lookup, LookupFile, digest_of_file, open_lookup
from wdsprep.encoding.captions.sources import (
    BY,
    OWN,
    CaptionOptions,
    CaptionSource,
    CaptionUse,
    FieldCaptions,
    name_of,
    plain,
)
from wdsprep.encoding.image_shards import ImageShard
from wdsprep.encoding.shard_texts import is_read_in_parts, read_texts
from wdsprep.errors import FormatError, NotFoundError, SourceError, UsageError
from wdsprep.limits import MAX_TEXT_NBYTES
from wdsprep.sources.captions import first_of
from wdsprep.sources.recognise import recognise_tables
from wdsprep.sources.tables.files import Table, TableFiles
from wdsprep.sources.tars import TarsSource
from wdsprep.store import open_store, opened
from wdsprep.store.base import Entry, Store, write_bytes
from wdsprep.text import EXAMPLES, columns, human_bytes, human_time, plural

if TYPE_CHECKING:
    from wdsprep.encoding.captions.sorted_pairs import Pairs

ROWS_AT_ONCE = 4_096
LOOKED_AT = 1_000  # samples, or rows of JSON lines, that say what the others have


@dataclass(frozen=True, kw_only=True)
class CaptionTable:
    """Tables as a user names them, and their columns."""

    url: str
    files: TableFiles
    entries: tuple[Entry, ...]
    by: str
    column: str

    @classmethod
    def find(cls, url: str, by: str, column: str) -> "CaptionTable":
        """Find the files of a table, or refuse one that lacks a column."""
        files = recognise_tables(url)
        entries = tuple(files.entries())
        found = cls(url=url, files=files, entries=entries, by=by, column=column or "caption")
        there = _columns(files.open(entries[0].name))
        found = replace(found, by=by or first_of(BY, there))
        found.check(entries[0].name, there)
        for entry in entries[1:]:
            if (table := files.open(entry.name)).has_schema:
                found.check(entry.name, table.columns())
        return found

    def check(self, name: str, there: Sequence[str]) -> None:
        what = f"{self.files.url}/{name}" if len(self.entries) > 1 else self.url
        if not there:
            raise SourceError(f"{what} is empty: name a table of captions")
        if not self.by:
            raise UsageError(
                f"{what} has {columns(there)}, and nothing that names samples: give it a column "
                f"{', '.join(BY[:-1])} or {BY[-1]}"
            )
        asked = {"--captions-by": self.by, "--caption-column": self.column}
        for option, column in asked.items():
            if column not in there:
                raise UsageError(
                    f"{what} has no column {column!r} ({option}): it has {columns(there)}"
                )

    @cached_property
    def identity(self) -> str:
        """Return a digest that tells whether the table is the same, without reading it."""
        files = [[entry.name, entry.nbytes, entry.stamp] for entry in self.entries]
        return DigestKind.BLAKE3.hex(json.dumps([FORM, self.by, self.column, files]).encode())

    def values(self) -> Iterator[tuple[str, int, list[Any], list[Any]]]:
        """Yield names and captions of some rows of a file, and the number of the first of them."""
        for entry in self.entries:
            first = 0
            table = self.files.open(entry.name)
            for names, captions in table.values((self.by, self.column), ROWS_AT_ONCE):
                yield entry.name, first, names, captions
                first += len(names)


def _columns(table: Table) -> list[str]:
    """Return the columns of a table; of JSON lines those that any of the first rows has."""
    if table.has_schema:
        return table.columns()
    where = next(table.parts(LOOKED_AT), ("", 0))[0]
    rows = [row for _, row in table.rows(where) if isinstance(row, dict)] if where else []
    return list(dict.fromkeys(name for row in rows for name in row))


class _Pairs:
    """The names and captions of a table as they count, and how many rows have none."""

    def __init__(self, table: CaptionTable) -> None:
        self._table = table
        self.rows = self.blank = 0

    def __iter__(self) -> "Iterator[Pairs]":
        for file, first, names, captions in self._table.values():
            self.rows += len(names)
            pairs = _usual(names, captions) or self._found(file, first, names, captions)
            self.blank += len(names) - len(pairs[0])
            yield pairs

    def _found(self, file: str, first: int, names: list[Any], captions: list[Any]) -> "Pairs":
        found: list[tuple[str, str]] = []
        for number, (name, caption) in enumerate(zip(names, captions, strict=True), first):
            for one in (name, caption):
                if isinstance(one, RejectedError):
                    raise self._unsound(file, number, f"cannot be read ({one})")
            if isinstance(name, int) and not isinstance(name, bool):
                name = str(name)
            if not (isinstance(name, str | None) and isinstance(caption, str | None)):
                is_named = isinstance(name, str | None)
                what, value = (self._table.column, caption) if is_named else (self._table.by, name)
                why = f"has a {type(value).__name__} for its {what}, not a text"
                raise self._unsound(file, number, why)
            if name and caption and (text := caption.strip()):
                if _is_too_long(text := plain(text)):
                    nbytes = human_bytes(len(text.encode()))
                    why = f"has a caption of {nbytes}, more than a sample can have"
                    raise self._unsound(file, number, why)
                found.append((plain(name), text))
        return [name for name, _ in found], [text for _, text in found]

    def _unsound(self, file: str, number: int, why: str) -> SourceError:
        what = f"{self._table.files.url}/{file}"
        return SourceError(f"row {number} of {what} {why}: mend it (the first row is 0)")


def _usual(names: list[Any], captions: list[Any]) -> "Pairs | None":
    """Return the pairs of rows that are as nearly all are, in a sixth of the time."""
    if {*map(type, names), *map(type, captions)} != {str} or not all(names):
        return None
    texts = [caption.strip() for caption in captions]
    if not all(texts) or 12 * max(map(len, texts)) >= MAX_TEXT_NBYTES:
        return None
    return [*map(plain, names)], [*map(plain, texts)]


def _is_too_long(caption: str) -> bool:
    """Return whether a caption takes more than half of what the json of a sample may have.

    A character takes up to 6 bytes there."""
    if 12 * len(caption) < MAX_TEXT_NBYTES:
        return False
    return 2 * len(facts_bytes({OWN: caption})) > MAX_TEXT_NBYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRead:
    """The rows and values that were found in a table of captions."""

    identity: Text
    rows: Nbytes
    blank: Nbytes
    """The number of rows that have no name, or no caption."""
    lookup: Lookup

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode() + b"\n"

    @classmethod
    def of(cls, store: Store) -> "TableRead | None":
        """Read what a dataset says of the table that it was made with."""
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


def _has(store: Store, lookup: Lookup) -> bool:
    """Return whether a store has a lookup, byte for byte."""
    name = lookup_name(lookup.digest)
    if not any((e.name, e.nbytes) == (name, lookup.nbytes) for e in store.list(name)):
        return False
    return not store.root or digest_of_file(store, name) == lookup.file_digest


def _known(place: str) -> TableRead | None:
    """Return what a dataset says of a table, if it has the lookup too."""
    store = open_store(place)
    read = TableRead.of(store)
    return read if read and _has(store, read.lookup) else None


class PreparedCaptions:
    """The sources of captions for all datasets of a run; a table has been read into its lookup."""

    def __init__(
        self,
        sources: Sequence[CaptionSource],
        table: str = "",
        read: TableRead | None = None,
        file: LookupFile | None = None,
    ) -> None:
        self.sources, self.table, self.read, self._file = tuple(sources), table, read, file

    def put(self, store: Store) -> None:
        """Put the lookup into a dataset that it is for."""
        if self.read is None:
            return
        if self._file and not _has(store, self.read.lookup):
            self._file.copy_to(store, lookup_name(self.read.lookup.digest))
        if TableRead.of(store) != self.read:
            write_bytes(store, CAPTION_TABLE, self.read.to_bytes())

    def close(self) -> None:
        if self._file:
            self._file.close()


def find_table(options: CaptionOptions) -> CaptionTable | None:
    """Find the table that is asked for; nothing but its columns is read."""
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
    """Read the captions that a run needs, and refuse what cannot be.

    Nothing is written to the datasets at `places`; a lookup that is there need not be made, if it
    `is_kept`. `hashed_by` is the digest that pack gave the images; None where it did not make
    them."""
    sources = options.sources
    for source in sources:
        if source.field and (missing := _lacks_field(source.field, tars, shards)):
            told(missing)
    if table is None:
        return PreparedCaptions(sources)
    if missing := _lacks_names(table.by, tars, shards, hashed_by):
        told(missing)
    known = {_known(place) for place in places} if is_kept else set()
    read, file = known.pop() if len(known) == 1 else None, None
    if read is None or read.identity != table.identity:
        read, file = _read(table, told)
    (source,) = sources
    made = read.lookup
    source = replace(
        source, by=table.by, digest=made.digest, file_digest=made.file_digest, at=places[0]
    )
    return PreparedCaptions([source], str(options.captions), read, file)


def _read(table: CaptionTable, told: Callable[[str], object]) -> tuple[TableRead, LookupFile]:
    told(f"{table.url}: reading captions by {table.by}; they are kept beside the shards")
    began, pairs = time.monotonic(), _Pairs(table)
    file = LookupFile(pairs)
    if not file.lookup.names:
        file.close()
        none = "no row" if not pairs.rows else f"no row with a {table.by} and a {table.column}"
        raise SourceError(f"{table.url} has {none}: name a table of captions")
    took = human_time(time.monotonic() - began)
    told(f"{table.url}: {plural(file.lookup.names, 'caption')} by {table.by}, read in {took}")
    return TableRead(
        identity=table.identity, rows=pairs.rows, blank=pairs.blank, lookup=file.lookup
    ), file


def _first(tars: TarsSource, shards: Sequence[ImageShard]) -> Iterator[tuple[str, Sample, bool]]:
    """Yield the first samples that can be read; whoever encodes them says what is wrong."""
    for shard in shards[:1]:
        with suppress(NotFoundError, FormatError):
            for key, row in islice(_texts(replace(tars, has_images=False), shard), LOOKED_AT):
                if isinstance(row, Sample):
                    yield key, row, not shard.is_foreign


def _texts(tars: TarsSource, shard: ImageShard) -> Iterator[tuple[str, Sample | Refusal]]:
    store = opened(tars.url)
    if is_read_in_parts(store, shard):
        return read_texts(tars, store, shard)
    return tars.read_keyed(shard.item)


def _lacks_names(
    by: str, tars: TarsSource, shards: Sequence[ImageShard], hashed_by: str | None
) -> str:
    """Return a warning where the first samples lack what a table names them by.

    Others may have it, but for a digest that pack was not asked for, which is refused."""
    if by == "key":
        return ""
    first = [name_of(by, *each[:2], is_packed=each[2]) for each in _first(tars, shards)]
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


def _lacks_field(path: str, tars: TarsSource, shards: Sequence[ImageShard]) -> str:
    """Return a warning where the first samples have no caption in a field."""
    captions = FieldCaptions(path)
    there: dict[str, None] = {}
    seen = 0
    for key, sample, is_packed in _first(tars, shards):
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
        f"samples without one keep their own captions; their json has {columns(sorted(there))}"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionReport:
    """A report of how many samples of a dataset have a caption from a table or a field."""

    source: CaptionSource
    named: int
    """Samples that have a caption from the table or the field."""
    unnamed: int
    """The number of samples that keep their own caption."""
    unnamed_examples: tuple[str, ...] = ()
    table: str = ""
    read: TableRead | None = None
    unmatched: int | None = None
    """Rows that no sample has; None while not all samples are there, or not all say what they
    have."""
    unmatched_examples: tuple[str, ...] = ()
    place: str = ""
    lost: tuple[str, ...] = ()
    """Files that should say which rows the samples of their unit have, and cannot be read."""


def report_captions(
    ready: PreparedCaptions, source: CaptionSource, place: str, manifest: Manifest
) -> CaptionReport:
    """Report the captions of a dataset; rows that no sample has are known once it is complete."""
    named = manifest.counts.get("named", 0)
    unnamed = manifest.samples - named
    report = CaptionReport(source=source, named=named, unnamed=unnamed, place=place)
    if ready.read is None:
        return report
    store = open_store(place)
    report = replace(report, table=ready.table, read=ready.read)
    rows, keys, lost = _taken(store, manifest, ready.read.lookup.names)
    report = replace(report, unnamed_examples=keys, lost=lost)
    if not manifest.complete or lost:
        return report
    left = islice((row for row, taken in enumerate(rows) if not taken), EXAMPLES)
    missing = rows.count(0)
    examples = tuple(_names(store, ready.read.lookup, list(left))) if missing else ()
    return replace(report, unmatched=missing, unmatched_examples=examples)


def _taken(
    store: Store, manifest: Manifest, names: int
) -> tuple[bytearray, tuple[str, ...], tuple[str, ...]]:
    """Return a byte for each row of the lookup, 1 where a sample has taken it.

    With it come keys of samples that the lookup does not name, and files that cannot be read."""
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


def _names(store: Store, lookup: Lookup, rows: Sequence[int]) -> list[str]:
    opened = open_lookup(store.url, lookup_name(lookup.digest), lookup.file_digest)
    try:
        return opened.names(rows)
    finally:
        opened.close()
