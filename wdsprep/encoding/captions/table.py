"""A table of captions, in one file or several.

`CaptionTable` says what the rows have, and `CaptionRecord` is the record of a reading. If captions
come from the json of samples instead, `warn_of_field` looks at the first ones before a run.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

from wdsprep.dataset.file_names import CAPTION_TABLE
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.samples import Sample
from wdsprep.dataset.sealed_json import Hex, Nbytes, Text, hex_digest, make_record, read_record
from wdsprep.encoding.captions.options import replace_surrogates
from wdsprep.errors import FormatError, NotFoundError, SourceError, UsageError
from wdsprep.limits import MAX_TEXT_NBYTES
from wdsprep.sources.base import Item
from wdsprep.sources.captions import caption_at, first_of
from wdsprep.sources.recognise import recognise_tables
from wdsprep.sources.tables.text import BY, Table, open_table
from wdsprep.sources.tars import TarsSource
from wdsprep.store.base import Entry, Store
from wdsprep.text import did_you_mean, human_bytes, list_columns, plural

ROWS_AT_ONCE = 4_096
LOOKED_AT = 1_000
"""The first rows of JSON lines, and the first samples, which are taken to be like the others."""


@dataclass(frozen=True, kw_only=True)
class CaptionTable:
    """A table of captions, in one file or several, with its columns of names and captions."""

    url: str
    root: str
    """The URL of the store that has the files."""
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
        root, entries = recognise_tables(url)
        columns = _find_columns(open_table(root, entries[0].name))
        by, column = by or first_of(BY, columns), column or "caption"
        table = cls(url=url, root=root, entries=tuple(entries), by=by, column=column)
        table._check(entries[0].name, columns)
        for entry in entries[1:]:
            if (further := open_table(root, entry.name)).has_schema:
                table._check(entry.name, further.columns())
        return table

    def _check(self, name: str, there: Sequence[str]) -> None:
        what = f"{self.root}/{name}" if len(self.entries) > 1 else self.url
        if not there:
            raise SourceError(f"{what} is empty: give the path of a table of captions")
        asked = {"--captions-by": self.by or " or ".join(BY), "--caption-column": self.column}
        for option, column in asked.items():
            if column not in there:
                raise UsageError(
                    f"{what} has no column {column!r} ({option}){did_you_mean(column, there)}: "
                    f"it has {list_columns(there)}"
                )

    @cached_property
    def identity(self) -> str:
        """Return a digest of the names, sizes and dates of a table's files.

        It tells whether a table is the same as before without reading it.
        """
        files = [[entry.name, entry.nbytes, entry.stamp] for entry in self.entries]
        return hex_digest(json.dumps([self.by, self.column, files]).encode())

    def read(self) -> Iterator[tuple[int, list[str], list[str]]]:
        """Read the rows in parts: yield how many there are, then the names and captions of them.

        Rows that lack a name or a caption are left out. Raise SourceError at a row that cannot be
        read, that has a value of a wrong type, or whose caption is too long.
        """
        for entry in self.entries:
            first = 0
            table = open_table(self.root, entry.name)
            for names, captions in table.values((self.by, self.column), ROWS_AT_ONCE):
                pairs = _convert_texts(names, captions)
                if pairs is None:
                    checked = enumerate(zip(names, captions, strict=True), first)
                    kept = [pair for row in checked if (pair := self._check_row(entry.name, *row))]
                    pairs = [name for name, _ in kept], [caption for _, caption in kept]
                yield len(names), *pairs
                first += len(names)

    def _check_row(self, file: str, number: int, row: tuple[Any, Any]) -> tuple[str, str] | None:
        """Return the name and the caption in a row, or None if it lacks one of them.

        Raise SourceError if one cannot be read or is no text, or if the caption is too long.
        """
        name, caption = row
        if isinstance(name, int) and not isinstance(name, bool):
            name = str(name)
        why = ""
        for column, value in ((self.by, name), (self.column, caption)):
            if isinstance(value, RejectedError):
                why = f"cannot be read ({value})"
            elif not isinstance(value, str | None):
                why = why or f"has a {type(value).__name__} for its {column}, not a text"
        text = replace_surrogates(caption.strip()) if isinstance(caption, str) else ""
        # It may take half of the bytes of a sample's json, where a character takes up to 6.
        if name and not why and 12 * len(text) >= MAX_TEXT_NBYTES:
            nbytes = human_bytes(len(text.encode()))
            why = f"has a caption of {nbytes}, more than a sample can have"
        if why:
            what = f"row {number} of {self.root}/{file}"
            raise SourceError(f"{what} {why}: correct it (the first row is 0)")
        return (replace_surrogates(name), text) if name and text else None


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionRecord:
    """A record, kept in a dataset, of the table that its captions came from and of its names."""

    identity: Hex
    """Of the files of the table."""
    digest: Hex
    """Of the names and captions in the table."""
    shards: Hex
    """Of the image shards whose samples were joined with it."""
    rows: Nbytes
    blank: Nbytes
    """The number of rows that have no name, or no caption."""
    twice: Nbytes
    """The number of names that several rows have."""
    twice_examples: tuple[Text, ...] = ()
    unused: Nbytes = 0
    """The number of names that no sample has."""
    unused_examples: tuple[Text, ...] = ()
    unnamed_examples: tuple[Text, ...] = ()
    """The keys of some samples of the dataset that the table does not name."""

    @classmethod
    def of(cls, store: Store) -> "CaptionRecord | None":
        """Return the record of the table that a dataset is made with, or None if there is none.

        A damaged record counts as none.
        """
        with suppress(NotFoundError, FormatError):
            return make_record(cls, read_record(cls, store.read(CAPTION_TABLE), CAPTION_TABLE))
        return None


def _find_columns(table: Table) -> list[str]:
    """Return the columns of a table, or for JSON lines all names in its first rows."""
    if table.has_schema:
        return table.columns()
    where = next(table.parts(LOOKED_AT), ("", 0))[0]
    rows = [row for _, row in table.rows(where) if isinstance(row, dict)] if where else []
    return list(dict.fromkeys(name for row in rows for name in row))


def _convert_texts(names: list[Any], captions: list[Any]) -> tuple[list[str], list[str]] | None:
    """Return the names and captions of rows, or None unless each has a name and a short caption.

    Nearly all rows have both, and this takes a sixth of the time that checks of each row take.
    """
    if {*map(type, names), *map(type, captions)} != {str} or not all(names):
        return None
    texts = [caption.strip() for caption in captions]
    if not all(texts) or 12 * max(map(len, texts)) >= MAX_TEXT_NBYTES:
        return None
    return [*map(replace_surrogates, names)], [*map(replace_surrogates, texts)]


def warn_of_field(path: str, tars: TarsSource, first: Item) -> str:
    """Return a warning if none of the first samples has a caption at a path of its json, or "".

    `first` is the first shard. If it is missing or damaged, a worker reports that later.
    """
    names, seen = set[str](), 0
    with suppress(FormatError):
        for sample in islice(replace(tars, has_images=False).read(first), LOOKED_AT):
            if isinstance(sample, Sample):
                if caption_at(sample.facts, path):
                    return ""
                seen += 1
                meta = sample.facts.get("meta")
                in_meta = meta if isinstance(meta, dict) else ()
                names.update(sample.facts, (f"meta.{name}" for name in in_meta))
    if not seen:
        return ""
    return (
        f"none of the first {plural(seen, 'sample')} of {tars.url} has a caption in {path}: "
        f"samples without one keep their own captions; their json has {list_columns(sorted(names))}"
    )
