"""WebDataset tars, gzipped or not, one a slice.

They lie in a folder, or match a glob or a brace pattern, or there is a single one.

What img2dataset writes is one case: its json lies in the tar, and the Parquet table beside it says
the same again, which is read only where a sample has no json of its own.

Of a sample the first image, those in roles, the json and the caption are read. The rest is passed
over and counted by its kind, and so is any file that belongs to no sample. A link stands for the
member it names.
"""

import functools
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from wdsprep.dataset.chunks import OnBytes
from wdsprep.dataset.file_names import is_foreign_table, is_index
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject, RejectedError
from wdsprep.dataset.samples import RoleImage, Sample, image_name
from wdsprep.dataset.tar.members import BadSampleError, members
from wdsprep.dataset.tar.read import TarSample, open_tape, open_unpacked_tape, scan
from wdsprep.errors import NotFoundError, SourceError
from wdsprep.images.headers import IMAGES, OTHER_IMAGES
from wdsprep.limits import MAX_NBYTES, MAX_TEXT_NBYTES
from wdsprep.sources.base import (
    Item,
    Source,
    Told,
    check_names,
    ignore_left_out,
    item_of,
    make_or_refuse,
    naming_role,
    number_files,
)
from wdsprep.sources.captions import (
    apply_caption_file,
    captions_of,
    decode_facts,
    decode_text,
    plain_facts,
)
from wdsprep.sources.folder import NOT_OF_A_SAMPLE, check_nbytes
from wdsprep.sources.patterns import ALL_TARS, Pattern, kind_of, tar_stem
from wdsprep.store import shared_store
from wdsprep.store.base import Entry, is_hidden
from wdsprep.text import shown

UNREADABLE = ""
"""The key of rows of the table beside a tar whose own key cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TarsSource(Source):
    """The tars below `url` whose names match `pattern`, a glob with braces."""

    kind = "tars"
    pattern: str
    max_nbytes: int = MAX_NBYTES
    has_images: bool = True
    """True if the bytes of images are read; otherwise they are empty."""

    def items(self, left_out: Told = ignore_left_out, /) -> Iterator[Item]:
        wanted = Pattern(self.pattern)
        tables: dict[str, Entry] = {}
        found = 0
        for entry in shared_store(self.url).list(wanted.start):
            if is_foreign_table(entry.name):
                continue
            if entry.name.endswith(".parquet"):
                tables[entry.name.removesuffix(".parquet")] = entry  # a.parquet before a.tar
            elif wanted.takes(entry.name):
                found += 1
                beside = tables.pop(tar_stem(entry.name), None)
                yield item_of(entry, beside) if beside else item_of(entry)
            elif self.pattern == ALL_TARS and not (
                is_hidden(entry.name) or is_index(entry.name) or NOT_OF_A_SAMPLE.search(entry.name)
            ):
                left_out(kind_of(entry.name))
        for table in tables if self.pattern == ALL_TARS else ():
            left_out(kind_of(f"{table}.parquet"))
        wanted.check_met(self.url, "tar")
        if not found:
            is_folder = self.pattern == ALL_TARS
            where = f"is in {self.url}" if is_folder else f"matches {self.url}/{self.pattern}"
            raise SourceError(f"no tar {where}: give another source")

    def count(self, item: Item, /) -> int:
        """Count the samples and rejects by reading the whole tar."""
        return sum(1 for _ in self.read(item))

    def read(self, item: Item, left_out: Told = ignore_left_out, /) -> Iterator[Sample | Reject]:
        return (row for _key, row in self.read_keyed(item, left_out=left_out))

    def read_keyed(
        self, item: Item, *, watch: OnBytes | None = None, left_out: Told = ignore_left_out
    ) -> Iterator[tuple[str, Sample | Reject]]:
        """Yield the samples and rejects of an item, each with its key in the tar.

        A tar that has vanished is one reject without a key. `watch` gets the bytes of the file
        as they are read, in order, and `left_out` the kinds of files in the tar that are not used.
        """
        table = item.parts[1][0] if len(item.parts) > 1 else ""

        def stray(path: str) -> None:
            if not posixpath.basename(path).startswith("."):
                left_out(kind_of(path))

        try:
            expected = item.parts[0][1]
            with open_unpacked_tape(
                shared_store(self.url), item.name, watch=watch, expected=expected
            ) as tape:
                for found in scan(tape, wants=self.wants, stray=stray, links=True):
                    for row in self.rows(found, item.name, table, left_out):
                        yield found.key, row
        except NotFoundError:
            detail = "the tar was listed, then gone"
            yield "", Reject(source=shown(item.name), code=Code.TAR_VANISHED, detail=detail)

    def rows(
        self,
        found: TarSample | BadSampleError,
        tar: str,
        table: str = "",
        left_out: Told = ignore_left_out,
    ) -> Iterator[Sample | Reject]:
        """Yield the sample, or the reject, that a group of members of a tar makes.

        Yield nothing for a group that has neither an image nor a text. `tar` is the name of the
        tar, and `table` that of the Parquet table beside it, if there is one.
        """
        source = shown(f"{tar}/{found.key}" if found.key else tar)
        if row := make_or_refuse(source, lambda: self._row(found, source, tar, table, left_out)):
            yield row

    def _row(
        self, found: TarSample | BadSampleError, source: str, tar: str, table: str, left_out: Told
    ) -> Sample | None:
        if isinstance(found, BadSampleError):
            raise RejectedError(Code(f"tar_{found.code}"), str(found))
        if found.unread:
            found = self._follow_links(found, tar)
        fields, unread, texts = found.fields, found.unread or {}, self.columns.texts
        if unread and not self.has_images:  # empty fields, but for images that are too large
            reader = replace(self, has_images=True)
            images = {
                name: b""
                for name, nbytes in unread.items()
                if name not in texts and reader.wants(name, int(nbytes), {})
            }
            fields = {**images, **fields}
            unread = {name: nbytes for name, nbytes in unread.items() if name not in images}
        image = self._image(fields)
        in_roles = self._in_roles(fields, unread) if self.columns.roles else {}
        for name, nbytes in unread.items():
            if name in texts:
                check_nbytes(name, int(nbytes), MAX_TEXT_NBYTES)
            elif not image and self._is_image(name):  # else one that was read stands in its place
                check_nbytes(name, int(nbytes), self.max_nbytes)
        if not image:
            if not texts.isdisjoint(fields):
                there = ", ".join(sorted(fields))
                raise RejectedError(Code.NO_IMAGE, f"the sample has only {there}")
            for name in (*fields, *unread):  # some other file in the tar
                left_out(f".{name}")
            return None
        facts: dict[str, Any] = {}
        if "json" in fields:
            facts = decode_facts(fields["json"], "json")
        elif table:
            rows = _rows_beside(self.url, table)
            row = rows.get(found.key) or rows.get(UNREADABLE, {})
            if isinstance(row, RejectedError):
                raise RejectedError(*row.args)
            facts = plain_facts(row)
        captions = captions_of(facts, self.columns.caption)
        if (name := self.columns.caption_file(fields)) and not self.columns.caption:
            captions = apply_caption_file(decode_text(fields[name], name), captions)
        further = tuple([RoleImage(name, fields[field]) for name, field in in_roles.items()])
        used = {image, *texts, *in_roles.values()}
        if unread or not used.issuperset(fields):
            for name in (*fields, *unread):
                if name not in used:
                    left_out(f".{name}")
        return Sample(
            source=source, image=fields[image], captions=captions, facts=facts, images=further
        )

    def wants(self, name: str, nbytes: int, before: Mapping[str, bytes]) -> bool:
        """Return whether a member of a sample is to be read.

        That is so for its texts, and for its image if images are read. `name` is the member's
        field, `nbytes` its size, and `before` the fields read before it. Members that are too
        large are not read.
        """
        if name in self.columns.texts:
            return nbytes <= MAX_TEXT_NBYTES
        is_wanted = self.has_images and (self._is_in_role(name) or self._is_image(name, before))
        return is_wanted and nbytes <= self.max_nbytes

    def _is_image(self, name: str, before: Iterable[str] = ()) -> bool:
        """Return whether a member is the image of its sample, of it and those before it."""
        return self._image((*before, name)) == name

    def _image(self, fields: Iterable[str]) -> str:
        """Return the field that has the image, or "" if there is none.

        It is the member that the user named, or else the first that wdsprep can decode by its
        extension, or else the first with the extension of any image. It is in no role.
        """
        if self.columns.image:
            return next(filter(self._is_named, fields), "")
        for known in (IMAGES, OTHER_IMAGES):
            for name in fields:
                if name.rpartition(".")[2] in known and not self._is_in_role(name):
                    return name
        return ""

    def _is_named(self, name: str) -> bool:
        """Return whether a member has the name that the user gave, or that with an extension."""
        stem, _, kind = name.rpartition(".")
        names = (name, stem) if kind in IMAGES or kind in OTHER_IMAGES else (name,)
        return self.columns.image.lstrip(".") in names

    def _is_in_role(self, name: str) -> bool:
        return any(role.number(name) is not None for role in self.columns.roles)

    def _in_roles(
        self, fields: Mapping[str, bytes], unread: Mapping[str, int | str]
    ) -> dict[str, str]:
        """Return the members of a sample that are images in roles, by their names as such.

        They are in the order of the roles, and of the numbers in their names. Raise RejectedError
        for one that is too large, and as `check_names` does.
        """
        members: list[tuple[str, str]] = []
        for role in self.columns.roles:
            numbers = ((role.number(name), name) for name in (*fields, *unread))
            numbered = [(number, name) for number, name in numbers if number is not None]
            members += ((image_name(role.name, n), name) for n, name in number_files(numbered))
        check_names(image for image, _ in members)
        for image, name in members:
            with naming_role(image):
                check_nbytes(name, int(unread.get(name, 0)), self.max_nbytes)
        return dict(members)

    def _follow_links(self, found: TarSample, tar: str) -> TarSample:
        """Return the sample with the bytes of members that its links name, if they are wanted.

        Raise RejectedError if such a member is not in the tar, or the tar is gzipped.
        """
        fields, unread = dict(found.fields), dict(found.unread or {})
        for name, target in (found.unread or {}).items():
            if isinstance(target, int):
                continue
            unread[name] = 0
            if not self.wants(name, 0, fields):
                continue
            place = _member_places(self.url, tar).get(target)
            if place is None:
                what = f"{name} is a link to {target}, which"
                raise RejectedError(Code.UNREADABLE, f"{what} cannot be read from this tar")
            start, unread[name] = place
            if self.wants(name, place[1], fields):
                fields[name] = shared_store(self.url).read(tar, start=start, nbytes=place[1])
                del unread[name]
        return replace(found, fields=fields, unread=unread)


@functools.lru_cache(maxsize=2)
def _member_places(url: str, tar: str) -> dict[str, tuple[int, int]]:
    """Return where the members of a tar begin and how long they are, by path.

    A gzipped tar has none here, and a damaged tar has those before the damage.
    """
    found = {}
    with open_tape(shared_store(url), tar) as tape, suppress(BadSampleError):
        for path, _, start, nbytes, target in members(tape):
            if path and not target:
                found[posixpath.normpath(path)] = start, nbytes
    return found


@functools.lru_cache(maxsize=2)
def _rows_beside(url: str, table: str) -> dict[str, dict[str, Any] | RejectedError]:
    """Return the rows of the Parquet table beside a tar, by key. Rows without a key are ignored.

    A row that cannot be read is a RejectedError under the key UNREADABLE. A table of ours has no
    rows here: it says what the json in the tar says.
    """
    from wdsprep.sources.tables.parquet import read_rows

    by_key: dict[str, dict[str, Any] | RejectedError] = {}
    for row in read_rows(shared_store(url), table):
        if isinstance(row, RejectedError):
            by_key[UNREADABLE] = row
        elif "key" in row:
            by_key[str(row["key"])] = row
    return by_key
