"""A folder of images, at any depth, with captions and facts in files of the same name beside them.

The listing comes in name order, in which all that lies between `a.jpg` and `a.txt` begins with
`a.` too. So images meet their sidecars in one pass that holds only the names still open, and a
folder of any size takes little memory.

A folder may have `metadata.jsonl` and `metadata.csv` as Hugging Face's imagefolder uses them: a row
for each file. A row may stand anywhere in its table, so rows wait in a temporary SQLite file, not
in memory, for the image they belong to. What no image takes is a caption without its image.

Images in a role lie in another folder under the same names (also `a_0.jpg`, `a_1.jpg`), beside
their target with an ending of their own, or where a field of the metadata says. The files of other
folders wait in the same SQLite file. Among the parts of an item an image in a role is
`/ROLE/NAME`, which no file of the folder itself can be called.
"""

import contextlib
import json
import os
import posixpath
import re
import sqlite3
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.samples import RoleImage, Sample, image_name, parse_object, role_of
from wdsprep.errors import AccessError, NotFoundError, ShortReadError, SourceError, UsageError
from wdsprep.images.headers import IMAGES, OTHER_IMAGES
from wdsprep.limits import MAX_NBYTES, MAX_TEXT_NBYTES
from wdsprep.sources.base import (
    Columns,
    Item,
    Role,
    Source,
    Told,
    check_names,
    field_texts,
    ignore_left_out,
    item_of,
    naming_role,
    number_files,
)
from wdsprep.sources.captions import apply_caption_file, captions_of, decode_facts, decode_text
from wdsprep.sources.patterns import extension, kind_of
from wdsprep.sources.tables.text import TextTable
from wdsprep.store import did_you_mean_place, shared_store
from wdsprep.store.base import Entry, Store, is_hidden
from wdsprep.text import list_columns, shown

NOT_OF_A_SAMPLE = re.compile(r"(^|/)(\d+_stats|dataset_infos?|state|metadata)\.json$")

METADATA = ("metadata.jsonl", "metadata.csv")
FILE_NAME = "file_name"
"""The column of metadata that names the file of a row, unless the user names another."""
NOT_THERE = "not there"
"""The stamp of an image that metadata names for a role, if the folder has no such image."""


class MetadataFound(SourceError):  # noqa: N818 (seldom an error: the survey lists once more)
    """The error that a listing has come upon metadata tables; `source` is the folder with them."""

    def __init__(self, source: "FolderSource") -> None:
        names = ", ".join(source.tables)
        super().__init__(f"{source.url} has gained metadata just now ({names}): run again")
        self.source = source


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderSource(Source):
    """A source that is a folder of images, or a prefix in a bucket, without hidden files."""

    kind = "folder"
    tables: tuple[str, ...] = ()
    max_nbytes: int = MAX_NBYTES

    def items(self, left_out: Told = ignore_left_out, /) -> Iterator[Item]:
        """Yield an item for each image, with its texts, and one for each name that has texts alone.

        At the end comes an item for each row of metadata that no other item has taken. If the
        listing finds other metadata tables than `tables`, raise MetadataFound before these rows.
        Raise SourceError if no image has one of the roles.
        """
        store = shared_store(self.url)
        tables: list[str] = []
        with open_metadata(store, self.tables, self.columns, left_out) as metadata:
            for group in _groups(store.list(), tables, left_out, self.columns):
                for item in group.items(self.columns):
                    row, folder = metadata.take(item.name)
                    item = item._replace(extra=row) if row else item
                    if not self.columns.roles:
                        yield item
                    elif row or not metadata.is_in_role(item.name):
                        yield metadata.with_roles(item, group, folder)
            if tuple(tables) != self.tables:
                raise MetadataFound(replace(self, tables=tuple(tables)))
            metadata.check_roles(self.url)
            for role in metadata.roles_of_others():
                left_out(f"in {role}")
            for name, row in metadata.left():
                yield Item(name=name, parts=(), extra=row, samples=0)

    def count(self, _item: Item, /) -> int:
        return 1

    def may_have_caption(self, item: Item) -> bool:
        """Return whether an image has texts beside it, or a caption in its row of metadata."""
        beside = any(name[0] != "/" for name, _, _ in item.parts[1:])
        return beside or bool(
            item.extra and captions_of(parse_object(item.extra) or {}, self.columns.caption)
        )

    def makers(self, item: Item, /) -> Iterator[tuple[str, Callable[[], Sample]]]:
        source = shown(item.name)
        yield source, lambda: self._sample(source, item)

    def _sample(self, source: str, item: Item) -> Sample:
        if not item.parts or not is_image(item.parts[0][0]) or item.parts[0][0].startswith("/"):
            raise RejectedError(Code.NO_IMAGE, "no image has this name")
        (image, image_nbytes, _), *beside = item.parts
        check_nbytes(image, image_nbytes, self.max_nbytes)
        in_roles = [part for part in beside if part[0].startswith("/")]
        if in_roles:
            beside = beside[: -len(in_roles)]
            check_names(path.split("/", 2)[1] for path, _, _ in in_roles)
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
        images: list[RoleImage] = []
        urls = {role.name: role.url for role in self.columns.roles}
        for path, nbytes, stamp in in_roles:
            _, name, file = path.split("/", 2)
            with naming_role(name):
                if stamp == NOT_THERE:
                    raise RejectedError(Code.NO_IMAGE, f"{shown(file)} is no image of the folder")
                check_nbytes(file, nbytes, self.max_nbytes)
                place = shared_store(urls[role_of(name)[0]] or self.url)
                images.append(RoleImage(name, _read(place, file)))
        return Sample(
            source=source, image=data, captions=captions, facts=facts, images=tuple(images)
        )


@dataclass(slots=True)
class _Group:
    """The files of one name: its images and what stands beside them.

    `in_roles` are the files in a role by their ending, with the number in it.
    """

    stem: str
    images: list[Entry] = field(default_factory=list)
    sidecars: dict[str, Entry] = field(default_factory=dict)
    in_roles: "dict[str, list[NumberedFile]]" = field(default_factory=dict)

    def items(self, columns: Columns) -> Iterator[Item]:
        kinds = ("json", columns.caption_file(self.sidecars))
        beside = [self.sidecars[kind] for kind in kinds if kind in self.sidecars]
        for image in self.images:
            yield item_of(image, *beside, samples=1)
        if not self.images:
            names = (entry.name for entry in beside)
            first, *_ = chain(names, (name for _, (name, _, _) in chain(*self.in_roles.values())))
            yield item_of(*beside, name=first)


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
    entries: Iterable[Entry], tables: list[str], left_out: Told, columns: Columns
) -> Iterator[_Group]:
    """Group files by stem. A group is yielded once no more files of it can come.

    `entries` come in the order of their names. The names of metadata tables are added to
    `tables`, and `left_out` gets the kind of each file that is not hidden and neither image, text
    nor metadata, nor said by other programs of a whole folder.
    """
    texts, roles = columns.texts, [role for role in columns.roles if role.is_ending]
    open_groups: list[_Group] = []  # each stem begins with the one before it and a dot
    for entry in entries:
        name = entry.name
        kind = extension(name)
        if is_hidden(name):
            continue
        if kind == "json" and NOT_OF_A_SAMPLE.search(name):
            if name.endswith("metadata.json"):  # whose user means one of METADATA
                left_out(".json")
            continue
        is_sidecar = kind in texts
        if not is_sidecar and not is_image(name):
            if posixpath.basename(name) in METADATA:
                tables.append(name)
            else:
                left_out(kind_of(name))
            continue
        stem, in_role = name[: -len(kind) - 1], ("", 0)
        for role in roles:
            if (ending := role.member(name)) and ending[0].rpartition("/")[2]:
                stem, in_role = ending[0][:-1], (role.name, ending[1])
        while open_groups and not name.startswith(open_groups[-1].stem + "."):
            yield open_groups.pop()
        if not open_groups or open_groups[-1].stem != stem:
            open_groups.append(_Group(stem))
        if in_role[0]:
            numbered = in_role[1], (name, entry.nbytes, entry.stamp)
            open_groups[-1].in_roles.setdefault(in_role[0], []).append(numbered)
        elif is_sidecar:
            open_groups[-1].sidecars[kind] = entry
        else:
            open_groups[-1].images.append(entry)
    yield from reversed(open_groups)


NumberedFile = tuple[int, tuple[str, int, str]]
"""A part of an item that is in a role, after the number of its image."""


class Metadata:
    """The rows of all metadata tables of a folder, by the image they name, and images in roles.

    `rows` has both in tables of SQL. It is None if there is nothing of either.
    """

    def __init__(self, rows: sqlite3.Connection | None, roles: Sequence[Role] = ()) -> None:
        self._rows, self._roles = rows, roles
        self._counts = dict.fromkeys((role.name for role in roles), 0)
        self._first = ""

    def take(self, name: str) -> tuple[str, str]:
        """Remove the row of an image. Return it as JSON, and the folder of its table.

        Both are "" if there is none.
        """
        if self._rows is None:
            return "", ""
        key = shown(name)
        rows = self._query("SELECT row, folder FROM rows WHERE name = ?", key)
        if rows:
            self._query("DELETE FROM rows WHERE name = ?", key)
        return rows[0] if rows else ("", "")

    def left(self) -> Iterator[tuple[str, str]]:
        """Yield the rows that nothing has taken, in the order of their names."""
        if self._rows is not None:
            yield from self._rows.execute("SELECT name, row FROM rows ORDER BY name")

    # --- images in roles
    def is_in_role(self, name: str) -> bool:
        """Return whether a row of metadata names this image as one in a role."""
        return bool(self._query("SELECT 1 FROM in_roles WHERE name = ?", shown(name)))

    def with_roles(self, item: Item, group: "_Group", folder: str) -> Item:
        """Return an item with its images in all roles, in the order of the roles.

        `folder` is the one that paths in the item's metadata start from.
        """
        parts = list(item.parts)
        for role in self._roles:
            if role.url:
                files = self._files_named(role, group.stem, item.name)
            elif role.is_ending:
                files = number_files(group.in_roles.get(role.name, ()))
            else:
                files = self._files_in_field(role, item, folder)
            has_image = any(stamp != NOT_THERE for _, (_, _, stamp) in files)
            self._counts[role.name] += bool(has_image and item.samples)
            for number, (name, nbytes, stamp) in files:
                parts.append((f"/{image_name(role.name, number)}/{name}", nbytes, stamp))
        if item.samples:
            self._first = self._first or item.name
        return item._replace(parts=tuple(parts))

    def _query(self, question: str, *values: str | bytes) -> list[Any]:
        return self._rows.execute(question, values).fetchall() if self._rows else []

    def _files_named(self, role: Role, stem: str, image: str) -> list[NumberedFile]:
        """Return the image of a role's folder with this name, or else those with numbers behind it.

        `stem` is the name without its extension. Of several files the one with the extension, too,
        counts: it is that of the `image` beside others of its name.
        """
        question = "SELECT number, file, nbytes, stamp FROM files WHERE role = ? AND stem = ?"
        rows = self._query(question, role.name, shown(stem))
        files = [(number, (os.fsdecode(file), *facts)) for number, file, *facts in rows]
        plain = [file for file in files if file[0] < 0]
        chosen = [file for file in plain if file[1][0] == image] or plain or files
        for _, (file, *_) in chosen:
            self._query(
                "UPDATE files SET is_taken = 1 WHERE role = ? AND stem = ? AND file = ?",
                *(role.name, shown(stem), os.fsencode(file)),
            )
        return number_files(chosen)

    def roles_of_others(self) -> Iterator[str]:
        """Yield the role of each image in a folder of a role that belongs to no target."""
        question = (
            "SELECT role FROM files WHERE role != '' GROUP BY role, file HAVING NOT max(is_taken)"
        )
        return (role for (role,) in self._query(question))

    def _files_in_field(self, role: Role, item: Item, folder: str) -> list[NumberedFile]:
        """Return the images that the item's metadata names for a role, be they there or not."""
        files: list[NumberedFile] = []
        for number, name in enumerate(_paths(role, parse_object(item.extra) or {}, folder)):
            if name is not None:
                question = "SELECT file, nbytes, stamp FROM files WHERE role = '' AND stem = ?"
                rows = self._query(question, name) or [(name, 0, NOT_THERE)]
                files += ((number, (os.fsdecode(file), *facts)) for file, *facts in rows)
        return files

    def check_roles(self, url: str) -> None:
        """Raise SourceError if there are images, and none of them has one of the roles."""
        lacking = (role for role in self._roles if self._first and not self._counts[role.name])
        for role in lacking:
            files = self._query("SELECT file FROM files WHERE role = ? LIMIT 1", role.name)
            there = did_you_mean_place(role.url) if role.url else ""
            if files:
                there = f", which has {shown(os.fsdecode(files[0][0]))}"
            raise SourceError(
                f"no image of {url}, such as {shown(self._first)}, has a {role.name} in "
                f"{role.where}{there}: give a folder whose images have the same names, an ending "
                "of files beside the targets that begins with a dot, as .source.jpg, or a field of "
                "metadata.jsonl or metadata.csv"
            )


@contextlib.contextmanager
def open_metadata(
    store: Store, tables: tuple[str, ...], columns: Columns, left_out: Told
) -> Iterator[Metadata]:
    """Read metadata tables, and listings of images in roles, into a temporary database.

    It lasts as long as the block. `left_out` gets the kinds of texts in the folders of roles, such
    as `.txt in source`.
    """
    roles = columns.roles
    if not (tables or roles):
        yield Metadata(None)
        return
    fields = [role for role in roles if not (role.url or role.is_ending)]
    places = {role.name: shared_store(role.url) for role in roles if role.url}
    if fields:
        places[""] = store
    with contextlib.closing(sqlite3.connect("")) as rows:  # a file that SQLite removes itself
        rows.execute("PRAGMA journal_mode = OFF")
        rows.execute(
            "CREATE TABLE rows (name TEXT PRIMARY KEY, row TEXT, folder TEXT) WITHOUT ROWID"
        )
        rows.execute("CREATE TABLE in_roles (name TEXT PRIMARY KEY) WITHOUT ROWID")
        rows.execute(
            "CREATE TABLE files (role TEXT, stem TEXT, number INT, file BLOB, nbytes INT, "
            "stamp TEXT, is_taken INT, PRIMARY KEY (role, stem, file)) WITHOUT ROWID"
        )
        for table in tables:
            for name, row, folder in _read_rows(store, table, columns.image or FILE_NAME):
                try:
                    rows.execute("INSERT INTO rows VALUES (?, ?, ?)", (name, row, folder))
                except sqlite3.IntegrityError:
                    raise SourceError(
                        f"{store.url}/{table} has a second row for {name}: give each image one row "
                        "of one table, and several captions as a list"
                    ) from None
                for role in fields:
                    paths = _paths(role, parse_object(row) or {}, folder)
                    rows.executemany(
                        "INSERT OR IGNORE INTO in_roles VALUES (?)",
                        ((path,) for path in paths if path),
                    )
        for name, place in places.items():
            files = _role_files(name, place, columns.texts if name else frozenset(), left_out)
            rows.executemany("INSERT OR IGNORE INTO files VALUES (?, ?, ?, ?, ?, ?, 0)", files)
        yield Metadata(rows, roles)


def _role_files(
    role: str, store: Store, texts: Container[str], left_out: Told
) -> Iterator[tuple[str, str, int, bytes, int, str]]:
    """Yield a row for each image of a folder: role, name, number, and then the file's facts.

    The name has no extension where there is a role, and the number is -1. If it ends in a number,
    such as `a_2`, a second row has the name `a` and the number 2. `left_out` gets the kinds of
    files with extensions among `texts`.
    """
    for entry in store.list():
        if extension(entry.name) in texts and not is_hidden(entry.name):
            left_out(f"{kind_of(entry.name)} in {role}")
        if is_image(entry.name) and not is_hidden(entry.name):
            facts = os.fsencode(entry.name), entry.nbytes, entry.stamp
            stem = entry.name.rpartition(".")[0] if role else entry.name
            yield role, shown(stem), -1, *facts
            if role and (numbered := re.fullmatch(r"(.+)_(\d{1,4})", stem, re.ASCII | re.DOTALL)):
                yield role, shown(numbered[1]), int(numbered[2]), *facts


def _paths(role: Role, facts: Mapping[str, Any], folder: str) -> list[str | None]:
    """Return the names of the files that metadata names for a role, from the source on."""
    paths = field_texts(role, facts)
    return [p and shown(posixpath.normpath(posixpath.join(folder, p))) for p in paths]


def _read_rows(store: Store, table: str, column: str) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of a table: the name of the image, the row as JSON, the table's folder.

    `column` is that of the names.
    """
    folder, what = posixpath.dirname(table), f"{store.url}/{table}"
    for number, row in enumerate(TextTable(store, table).all_rows(), 1):
        try:
            if isinstance(row, RejectedError):
                raise row
            as_json = json.dumps(row)
        except (RejectedError, RecursionError) as error:  # JSON may be nested too deep to write
            raise SourceError(f"{what}, row {number}: {error}: mend it or move it away") from error
        name = row.get(column)
        if not isinstance(name, str):
            raise SourceError(
                f"{what}, row {number}: no {column} (it has {list_columns([*row])}): name the "
                "column of the files by --image-col, or mend the row or move the table away"
            )
        yield shown(posixpath.normpath(posixpath.join(folder, name))), as_json, folder
