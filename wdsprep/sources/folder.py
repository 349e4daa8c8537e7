"""A folder of images, at any depth, with captions and facts in files of the same name beside them.

The listing comes in name order, in which all that lies between `a.jpg` and `a.txt` begins with
`a.` too. So images meet their sidecars in one pass that holds only the names still open, and a
folder of any size takes little memory.

A folder may have `metadata.jsonl` and `metadata.csv` as Hugging Face's imagefolder uses them: a row
for each file. A row may stand anywhere in its table, so rows wait in a temporary SQLite file, not
in memory, for the image they belong to. What no image takes is a caption without its image.
"""

import contextlib
import csv
import io
import json
import posixpath
import re
import sqlite3
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, replace

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Refusal, RejectedError
from wdsprep.dataset.samples import Sample
from wdsprep.errors import AccessError, NotFoundError, ShortReadError, SourceError, UsageError
from wdsprep.images.headers import IMAGES, OTHER_IMAGES
from wdsprep.limits import MAX_NBYTES, MAX_TEXT_NBYTES
from wdsprep.sources.base import Columns, Item, Told, ignore_left_out, make_or_refuse
from wdsprep.sources.captions import apply_caption_file, captions_of, decode_facts, decode_text
from wdsprep.sources.patterns import extension, kind_of
from wdsprep.store import shared_store
from wdsprep.store.base import Entry, Store, is_hidden, stream
from wdsprep.text import list_columns, shown

NOT_OF_A_SAMPLE = re.compile(r"(^|/)(\d+_stats|dataset_info|dataset_infos|state)\.json$")


class MetadataFound(SourceError):  # noqa: N818 (seldom an error: the survey lists once more)
    """The error that a listing has come upon metadata tables; `source` is the folder with them."""

    def __init__(self, source: "FolderSource") -> None:
        names = ", ".join(source.tables)
        super().__init__(f"{source.url} has gained metadata just now ({names}): run again")
        self.source = source


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderSource:
    """A source that is a folder of images, or a prefix in a bucket, without hidden files."""

    url: str
    columns: Columns
    tables: tuple[str, ...] = ()
    max_nbytes: int = MAX_NBYTES
    kind: str = "folder"

    def items(self, left_out: Told = ignore_left_out) -> Iterator[Item]:
        """Yield an item for each image, with its texts, and one for each name that has texts alone.

        At the end comes an item for each row of metadata that no other item has taken. If the
        listing finds other metadata tables than `tables`, raise MetadataFound before these rows.
        """
        store = shared_store(self.url)
        tables: list[str] = []
        with open_metadata(store, self.tables) as metadata:
            for group in _groups(store.list(), tables, left_out, self.columns.texts):
                for item in group.items(self.columns):
                    row = metadata.take(item.name)
                    yield replace(item, extra=row) if row else item
            if tuple(tables) != self.tables:
                raise MetadataFound(replace(self, tables=tuple(tables)))
            for name, row in metadata.left():
                yield Item(name=name, parts=(), extra=row, samples=0)

    def count(self, _item: Item, /) -> int:
        return 1

    def read(
        self,
        item: Item,
        /,
        left_out: Told = ignore_left_out,  # noqa: ARG002  the listing knows all
    ) -> Iterator[Sample | Refusal]:
        source = shown(item.name)
        yield make_or_refuse(source, lambda: self._sample(source, item))

    def _sample(self, source: str, item: Item) -> Sample:
        if not item.parts or not is_image(item.parts[0][0]):
            raise RejectedError(Code.NO_IMAGE, "no image has this name")
        (image, image_nbytes, _), *beside = item.parts
        check_nbytes(image, image_nbytes, self.max_nbytes)
        for name, nbytes, _ in beside:
            check_nbytes(name, nbytes, MAX_TEXT_NBYTES)
        store = shared_store(self.url)
        data = _read(store, image)
        facts = decode_facts(item.extra.encode(), "metadata") if item.extra else {}
        captions = captions_of(facts, self.columns.caption) if facts else ()
        for name, _, _ in beside:  # the json first
            if extension(name) == "json":
                found = decode_facts(_read(store, name), name)
                facts = facts | found if facts else found
                captions = captions_of(found, self.columns.caption) or captions
            elif not self.columns.caption:
                captions = apply_caption_file(decode_text(_read(store, name), name), captions)
        return Sample(source=source, image=data, captions=captions, facts=facts)


@dataclass(slots=True)
class _Group:
    """The files of one name: its images and what stands beside them."""

    stem: str
    images: list[Entry] = field(default_factory=list)
    sidecars: dict[str, Entry] = field(default_factory=dict)

    def items(self, columns: Columns) -> Iterator[Item]:
        kinds = ("json", columns.caption_file(self.sidecars))
        beside = [self.sidecars[kind] for kind in kinds if kind in self.sidecars]
        for image in self.images:
            yield _item(image.name, [image, *beside])
        if not self.images:
            yield replace(_item(beside[0].name, beside), samples=0)


def _item(name: str, entries: Iterable[Entry]) -> Item:
    return Item(name=name, parts=tuple([(e.name, e.nbytes, e.stamp) for e in entries]))


def _read(store: Store, name: str) -> bytes:
    try:
        return store.read(name)
    except NotFoundError as error:
        raise RejectedError(Code.VANISHED, f"{shown(name)} was listed, then gone") from error
    except (ShortReadError, UsageError) as error:  # cut meanwhile; an S3 key like a//b
        raise RejectedError(Code.UNREADABLE, shown(str(error))) from error
    except AccessError as error:
        if store.root is None:  # credentials that have run out: no fault of this file's
            raise
        raise RejectedError(Code.UNREADABLE, shown(str(error))) from error


def is_image(name: str) -> bool:
    kind = extension(name)
    return kind in IMAGES or kind in OTHER_IMAGES


def check_nbytes(name: str, nbytes: int, most: int) -> None:
    """Raise RejectedError for a file with more bytes than `most`, before it takes up memory."""
    if nbytes > most:
        raise RejectedError(
            Code.TOO_MANY_BYTES, f"{shown(name)} has {nbytes:,} bytes, more than {most:,}"
        )


def _groups(
    entries: Iterable[Entry], tables: list[str], left_out: Told, texts: Container[str]
) -> Iterator[_Group]:
    """Group files by stem. A group is yielded once no more files of it can come.

    `entries` come in the order of their names. The names of metadata tables are added to
    `tables`, and `left_out` gets the kind of each file that is not hidden and neither image, text
    nor metadata. `texts` are the extensions of texts.
    """
    open_groups: list[_Group] = []  # each stem begins with the one before it and a dot
    for entry in entries:
        name = entry.name
        kind = extension(name)
        if is_hidden(name) or (kind == "json" and NOT_OF_A_SAMPLE.search(name)):
            continue
        is_sidecar = kind in texts
        if not is_sidecar and not is_image(name):
            if is_metadata(name):
                tables.append(name)
            else:
                left_out(kind_of(name))
            continue
        stem = name[: -len(kind) - 1]
        while open_groups and not name.startswith(open_groups[-1].stem + "."):
            yield open_groups.pop()
        if not open_groups or open_groups[-1].stem != stem:
            open_groups.append(_Group(stem))
        if is_sidecar:
            open_groups[-1].sidecars[kind] = entry
        else:
            open_groups[-1].images.append(entry)
    yield from reversed(open_groups)


def is_metadata(name: str) -> bool:
    return name.rpartition("/")[2] in ("metadata.jsonl", "metadata.csv")


class Metadata:
    """The rows of all metadata tables of a folder, by the image they name."""

    def __init__(self, rows: sqlite3.Connection | None) -> None:
        self._rows = rows

    def take(self, name: str) -> str:
        """Remove the row of an image, and return it as JSON, or "" if there is none."""
        if self._rows is None:
            return ""
        key = shown(name)
        found = self._rows.execute("SELECT row FROM rows WHERE name = ?", (key,)).fetchone()
        if found is None:
            return ""
        self._rows.execute("DELETE FROM rows WHERE name = ?", (key,))
        return str(found[0])

    def left(self) -> Iterator[tuple[str, str]]:
        """Yield the rows that nothing has taken, in the order of their names."""
        if self._rows is not None:
            yield from self._rows.execute("SELECT name, row FROM rows ORDER BY name")


@contextlib.contextmanager
def open_metadata(store: Store, tables: tuple[str, ...]) -> Iterator[Metadata]:
    """Read metadata tables into a temporary database, which lasts as long as the block."""
    if not tables:
        yield Metadata(None)
        return
    with contextlib.closing(sqlite3.connect("")) as rows:  # a file that SQLite removes itself
        rows.execute("PRAGMA journal_mode = OFF")
        rows.execute("CREATE TABLE rows (name TEXT PRIMARY KEY, row TEXT) WITHOUT ROWID")
        for table in tables:
            rows.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?)", _read_rows(store, table))
        yield Metadata(rows)


def _read_rows(store: Store, table: str) -> Iterator[tuple[str, str]]:
    folder, what = posixpath.dirname(table), f"{store.url}/{table}"
    with io.TextIOWrapper(stream(store, table), encoding="utf-8-sig", newline="") as text:
        rows: Iterable[tuple[dict[str, object], str]] = _json_rows(text, what)
        if table.endswith(".csv"):
            rows = ((row, json.dumps(row)) for row in csv.DictReader(text, restkey=""))
        try:
            for row, as_json in rows:
                name = row.get("file_name")
                if not isinstance(name, str):
                    there = list_columns([name for name in row if name])
                    raise SourceError(
                        f"{what} has a row without file_name (it has {there}): rename the column "
                        "of the files, or move the table away"
                    )
                yield shown(posixpath.normpath(posixpath.join(folder, name))), as_json
        except (UnicodeDecodeError, csv.Error) as error:
            raise SourceError(
                f"{what} cannot be read ({error}): mend it or move it away"
            ) from error


def _json_rows(lines: Iterable[str], what: str) -> Iterator[tuple[dict[str, object], str]]:
    """Yield each row of a table of JSON lines, with the text that it was parsed from.

    Rows keep that text, as JSON nested very deep can be parsed but not written again. Raise
    SourceError for a line that is not a JSON object. The error calls the table `what`.
    """
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise SourceError(f"{what}, line {number}: not JSON ({error}): mend it") from error
            if not isinstance(row, dict):
                raise SourceError(f"{what}, line {number}: not a JSON object: mend it")
            yield row, line.strip()
