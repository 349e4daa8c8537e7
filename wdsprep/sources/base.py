"""What a source is: items in a fixed order, the samples of each, slices of items, their digests.

`Content` is the digest of what a run of items holds. A listing knows names, sizes and dates. Where
a date alone is another, as after `touch`, or in a folder that was copied, only what the source
gives out tells whether anything has changed. So that is what counts: the images' bytes, captions
and facts, and of what is no sample its code; not how a table is compressed, or what lies beside a
sample and is never read.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar, NamedTuple, TypeVar

from blake3 import blake3

from wdsprep.cpus import usable_cpus
from wdsprep.dataset.file_names import slice_name
from wdsprep.dataset.manifest import CONTENT
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject, RejectedError, as_rejected
from wdsprep.dataset.sample_table import IMAGE_COLUMNS, LATENT_COLUMNS
from wdsprep.dataset.samples import MAPPING, ROLE, Sample, image_name, role_of
from wdsprep.dataset.sealed_json import Nbytes, hex_digest
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.errors import UsageError
from wdsprep.images.headers import IMAGES, OTHER_IMAGES
from wdsprep.sources.captions import CAPTIONS
from wdsprep.store.base import Entry
from wdsprep.text import brief, did_you_mean, list_columns, shown

MOST_SLICES = 1_000_000
"""A key is the slice's number and the input's in it. While all slices have as many digits, no two
inputs share a key, however many a slice holds."""


_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


ItemLine = tuple[str, list[tuple[str, Nbytes, str]], str, Nbytes]
"""The values of a line of an inputs file."""


class Item(NamedTuple):
    """The part of a source that is read at once, such as a file or some rows of a table.

    `parts` are its files: the name, the bytes, and a stamp that changes when the file does. `extra`
    is for its source alone. `take` is the number of samples to take of it (0 means all), and
    `samples` the number that it holds, 0 if unknown. An item that is read from an inputs file has
    1, as these do not store it.
    """

    name: str
    parts: tuple[tuple[str, int, str], ...]
    extra: str = ""
    take: int = 0
    samples: int = 1

    def to_json(self) -> str:
        """Return the item, without `samples`, as a line of a slice's inputs file."""
        line = [self.name, self.parts, self.extra, self.take]
        return _encode(line) + "\n"

    @classmethod
    def from_line(cls, line: Sequence[Any]) -> "Item":
        """Return the item that an `ItemLine` describes."""
        name, parts, extra, take = line
        return cls(name=name, parts=tuple(map(tuple, parts)), extra=extra, take=take)

    @property
    def nbytes(self) -> int:
        return sum([nbytes for _, nbytes, _ in self.parts])


def item_of(*files: Entry, name: str = "", extra: str = "", samples: int = 0) -> Item:
    """Return the item that some files make, by default under the name of the first."""
    parts = tuple([(file.name, file.nbytes, file.stamp) for file in files])
    return Item(name=name or files[0].name, parts=parts, extra=extra, samples=samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A run of items: a unit of work of `pack`.

    `elsewhere` names the samples in it that another slice has taken over.
    """

    number: int
    items: tuple[Item, ...]
    elsewhere: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return slice_name(self.number)

    @property
    def samples(self) -> int:
        """Return how many samples the slice holds, as far as the listing tells."""
        return sum(item.take or item.samples for item in self.items)

    @property
    def inputs(self) -> bytes:
        """Return the content of the inputs file: all that the slice is made from."""
        return "".join(item.to_json() for item in self.items).encode()

    @property
    def digest(self) -> str:
        """Return the digest of the inputs, as the receipt has it."""
        return hex_digest(self.inputs)


Made = TypeVar("Made")


def make_or_refuse(source: str, make: Callable[[], Made]) -> Made | Reject:
    """Return what `make` makes of one input, or the reject of this input if it fails.

    Errors about the run (WdsprepError) and a lack of memory are raised: no input is to blame.
    """
    try:
        return make()
    except Exception as error:  # noqa: BLE001 (told apart by as_rejected)
        reject = as_rejected(error, Code.UNREADABLE).to_reject(source)
        return replace(reject, detail=shown(reject.detail))


Told = Callable[[str], object]


def ignore_left_out(_kind: str) -> None:
    """Ignore a file that is left out, for callers that do not count these."""


LEFT_OUT = "left_out:"
"""What begins the names of the counts of left-out files in receipts."""
NAMED_KINDS = 20  # at most: a hostile tar has any number


def count_left_out(counts: Counter[str], kind: str) -> None:
    """Count a file that is no input to `pack`, by its kind.

    A kind is an extension such as `.mov`, `no extension`, `in source` for images in the folder of a
    role that have the name of no target, or `.txt in source` for texts there. Kinds beyond the
    first NAMED_KINDS, and odd ones, are counted as `others`.
    """
    kind = kind.lower() or "no extension"
    if (name := f"{LEFT_OUT}{kind}") not in counts:
        is_plain = re.fullmatch(
            rf"\.[\w.-]{{1,20}}|no extension|(\.\w{{1,20}} )?in {ROLE}", kind, re.ASCII
        )
        is_named = sum(other.startswith(LEFT_OUT) for other in counts) < NAMED_KINDS
        name = name if is_plain and is_named else f"{LEFT_OUT}others"
    counts[name] += 1


def left_out_among(counts: Mapping[str, int]) -> Counter[str]:
    """Return the counts of left-out files among those of receipts, by kind."""
    left_out = {name: count for name, count in counts.items() if name.startswith(LEFT_OUT)}
    return Counter({name.removeprefix(LEFT_OUT): count for name, count in left_out.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A place that samples are read from: a folder, tars or tables.

    `columns` are the columns that the user named, and the roles of further images. A source can be
    pickled: the driver lists the items, and workers read them. Both tell the kinds of files that
    are left out.
    """

    kind: ClassVar[str]
    """The kind of the source: `folder`, `tars`, `table` or `urls`."""
    url: str
    columns: "Columns"

    def items(self, left_out: Told = ignore_left_out, /) -> Iterator[Item]:
        """Yield all items, in the same order each time.

        `left_out` is called with the kinds of files that are no input.
        """
        raise NotImplementedError

    def count(self, item: Item, /) -> int:
        """Count the samples of an item."""
        return item.samples

    def makers(self, item: Item, /) -> Iterator[tuple[str, Callable[[], Sample]]]:
        """Yield the name of each sample of an item, and a function that makes the sample."""
        raise NotImplementedError

    def read(self, item: Item, _left_out: Told = ignore_left_out, /) -> Iterator[Sample | Reject]:
        """Yield all samples of an item, in order; a Reject stands for one that cannot be used.

        The item's `take` is not looked at. Samples of a table of URLs have no image yet. The second
        argument is called with the kinds of files in the item that are no input.
        """
        for source, make in self.makers(item):
            yield make_or_refuse(source, make)


MOST_IMAGES = 100
"""The most images that a sample may have in one role."""
TAKEN_NAMES = (
    *("target", "all", "image", "original", "scaled", "latent", "emb", "pooled", "txt", "npy"),
    *((IMAGES | OTHER_IMAGES | IMAGE_COLUMNS.keys() | LATENT_COLUMNS.keys()) - {"source"}),
)
"""What no role is called: members, arrays and columns have these names, or begin with them."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """A role in which samples have further images, and where in a source they are.

    `where` is what the user gave: a folder, an ending of files or members such as `.source.jpg`, or
    the name of a column or field. `url` is that of the folder, if it is one.
    """

    name: str
    where: str
    is_optional: bool = False
    url: str = ""

    @classmethod
    def parse(cls, text: str) -> "Role":
        """Return the role in `NAME=WHERE`. Raise UsageError if it is no such text."""
        name, _, where = text.partition("=")
        if not re.fullmatch(ROLE, name) or not where:
            raise UsageError(
                f"{brief(text)}: write NAME=WHERE, as source=edits/, with a short name of a-z, 0-9"
            )
        if name in TAKEN_NAMES:
            raise UsageError(f"{name} is the name of something else: give the role another")
        return cls(name=name, where=where)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        """Return the names of columns: one that ends in `_0` goes on in `_1`, `_2` and so on."""
        if not self.where.endswith("_0"):
            return (self.where,)
        return tuple(f"{self.where[:-1]}{number}" for number in range(MOST_IMAGES + 1))

    def columns(self, there: Collection[str]) -> list[str]:
        """Return those of the columns or fields `there` that hold images in this role."""
        return [name for name in self._names if name in there]

    def values(self, row: Mapping[str, Any]) -> list[Any]:
        """Return what a row has for the images in this role, in order; None stands for no image.

        A list has several. An object whose `role` is `target` does not count.
        """
        values: list[Any] = []
        for field in map(row.get, self._names):
            values += (field or [None]) if isinstance(field, list) else [field]
        return [v for v in values if not (isinstance(v, MAPPING) and v.get("role") == "target")]

    @property
    def is_ending(self) -> bool:
        """Return whether files beside images, or members of tars, are in this role by their end."""
        return self.where.startswith(".") and "/" not in self.where

    @cached_property
    def _ending(self) -> re.Pattern[str]:
        where = self.where.lstrip(".")
        stem, _, kind = where.rpartition(".")
        if not stem or kind.lower() not in IMAGES | OTHER_IMAGES:
            stem, kind = where, "|".join(sorted(IMAGES | OTHER_IMAGES))
        ending = rf"{re.escape(stem)}(?:_(\d{{1,4}}))?\.(?:{kind})"
        return re.compile(rf"(.*\.)?(?:{ending}|{re.escape(where)})", re.IGNORECASE | re.DOTALL)

    def member(self, name: str) -> tuple[str, int] | None:
        """Return what stands before the ending of this role in a name, and the number in it.

        Return None if the name does not end so. The number is -1 if there is none.
        """
        match = self._ending.fullmatch(name)
        return (match[1] or "", int(match[2] or -1)) if match else None

    def number(self, field: str) -> int | None:
        """Return the number in the name of a field of a sample, such as 1 in `source_1.jpg`.

        It is -1 if there is none. Return None if the field is not in this role.
        """
        found = self.member(field)
        return found[1] if found and not found[0] else None


def field_texts(role: Role, row: Mapping[str, Any]) -> list[str | None]:
    """Return the paths or URLs that a row gives for the images in a role, None for an empty one.

    Each is a text, or an object with a `file_name`. Anything else becomes a text, which is neither
    the path nor the URL of an image.
    """
    values = (v.get("file_name", v) if isinstance(v, MAPPING) else v for v in role.values(row))
    texts = (v if v is None or isinstance(v, str) else brief(v) for v in values)
    return [text.strip() or None if text else None for text in texts]


Image = TypeVar("Image")


def name_images(role: Role, images: Iterable[Image | None]) -> list[tuple[str, Image]]:
    """Return the images that a sample has in a role, each after its name.

    None stands for no image, and its number is left out, which `check_names` does not permit.
    """
    numbered = enumerate(images)
    return [(image_name(role.name, n), image) for n, image in numbered if image is not None]


def number_files(files: Iterable[tuple[int, Image]]) -> list[tuple[int, Image]]:
    """Sort the files of a role, and number them from 0; gaps stay.

    `files` are pairs: the number in the name of a file, where numbers begin at 0 or 1, and the
    file. The number is -1 for a file without one, which comes first.
    """
    rising = sorted(files, key=lambda pair: pair[0])
    has_plain = bool(rising) and rising[0][0] < 0
    first = min(1, next((number for number, _ in rising if number >= 0), 0))
    return [(max(0, number - first + has_plain), file) for number, file in rising]


def check_names(names: Iterable[str]) -> None:
    """Raise RejectedError if a role of a sample has too many images, a gap, or a number twice."""
    counts = Counter[str]()
    for name in names:
        role, number = role_of(name)
        if number >= MOST_IMAGES:
            detail = f"{name}: more than {MOST_IMAGES} images in one role"
            raise RejectedError(Code.UNREADABLE, detail)
        if number > counts[role]:
            missing = image_name(role, counts[role])
            raise RejectedError(Code.ROLE_GAP, f"{missing} is missing before {name}")
        if number < counts[role]:
            raise RejectedError(Code.UNREADABLE, f"{name}: two images have its name and number")
        counts[role] += 1


@contextmanager
def naming_role(name: str) -> Iterator[None]:
    """Name an image, by its role, in the rejection of its sample."""
    try:
        yield
    except RejectedError as error:
        raise RejectedError(error.code, f"{name}: {error.detail or error.code}") from error


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The names of columns that the user gave, and the roles of further images.

    If `image`, `caption` or `url` is empty, wdsprep finds that column by itself. `digest` is the
    column of the digests of images, `filtered` are the columns that a filter names, and `kept`
    those to be kept. `caption_ext` are the extensions of caption files beside images, the first of
    which that an image has counts.
    """

    image: str = ""
    caption: str = ""
    url: str = ""
    digest: str = ""
    filtered: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    caption_ext: tuple[str, ...] = CAPTIONS
    roles: tuple[Role, ...] = ()

    @cached_property
    def texts(self) -> frozenset[str]:
        """Return the extensions of files with texts of an image, without their dots."""
        return frozenset({"json", *(extension[1:] for extension in self.caption_ext)})

    def caption_file(self, extensions: Container[str]) -> str:
        """Return the extension, without its dot, of the caption file that counts, or "" if none.

        `extensions` are those of the files that an image has.
        """
        own = (extension[1:] for extension in self.caption_ext)
        return next((extension for extension in own if extension in extensions), "")

    def in_roles(self, there: Collection[str]) -> list[str]:
        """Return those of the columns `there` that hold images in any role."""
        return [name for role in self.roles for name in role.columns(there)]

    def check(self, there: Sequence[str], what: str) -> None:
        """Check that a table has each column that is named here. Raise UsageError if it lacks one.

        `there` are the table's columns, and `what` is how the message names the table.
        """
        asked = [("image-col", self.image), ("url-col", self.url), ("caption-col", self.caption)]
        asked += [("verify-hash", self.digest), *(("filter", name) for name in self.filtered)]
        asked += [("save-additional-columns", name) for name in self.kept]
        asked += [(f"role {role.name}", role.where) for role in self.roles]
        for option, name in asked:
            if name and name not in there:
                raise UsageError(
                    f"{what} has no column {name!r} (--{option}){did_you_mean(name, there)}: "
                    f"it has {list_columns(there)}"
                )


def slices(items: Iterable[Item], *, size: int, first: int = 0) -> Iterator[Slice]:
    """Cut items into slices of `size` items, numbered from `first`.

    Raise UsageError if a slice's number does not fit into a key.
    """
    iterator = iter(items)
    for number in itertools.count(first):
        taken = tuple(itertools.islice(iterator, size))
        if not taken:
            return
        check_slices(number + 1)
        yield Slice(number=number, items=taken)


def check_slices(count: int) -> None:
    if count > MOST_SLICES:
        raise UsageError(
            f"the source makes more than {MOST_SLICES:,} slices: raise --samples-per-shard, or "
            "pack its parts into datasets of their own, which a loader mixes"
        )


MARK_NBYTES = 16
MOST_THREADS = 8


class Content:
    """A digest of rows, made from the fingerprint of each row in their order.

    Unless it is kept, no fingerprint is computed.
    """

    def __init__(self, *, is_kept: bool = True) -> None:
        self._is_kept = is_kept
        self._hash = blake3()

    def mark(self, row: Sample | Reject) -> bytes:
        """Return the fingerprint of a row, or b"" if the digest is not kept.

        That of a sample changes with its source, images, captions, facts or URLs; that of a reject
        with its source or code. Any thread may call this.
        """
        if not self._is_kept:
            return b""
        if isinstance(row, Reject):
            return blake3(_encode([row.source, row.code.value]).encode()).digest(MARK_NBYTES)
        said = [row.source, row.captions, row.facts, row.url, len(row.image)]
        content = blake3(row.image)
        for image in row.images:
            said += [image.name, image.url, len(image.data)]
            content.update(image.data)
        return content.update(_encode(said).encode()).digest(MARK_NBYTES)

    def add(self, marked: bytes) -> None:
        if self._is_kept:
            self._hash.update(marked)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    @property
    def file(self) -> dict[str, str]:
        """Return the digest as an entry of a receipt's files; nothing if it is not kept."""
        return {CONTENT: self.digest} if self._is_kept else {}


def find_changed_units(
    source: Source,
    contents: Mapping[str, str],
    items_of: Callable[[str], Collection[Item]],
    *,
    heard: Callable[[int], object],
) -> list[str]:
    """Return the units whose items no longer hold what they held.

    `contents` has the recorded digest of each unit. `heard` is called at the start and after each
    unit with the number of items read so far.
    """
    heard(0)
    done, changed = 0, []

    def compare(unit: str) -> tuple[str, int, bool]:
        content, items = Content(), items_of(unit)
        for item in items:
            for row in islice(source.read(item), item.take or None):
                content.add(content.mark(row))
        return unit, len(items), content.digest == contents[unit]

    for unit, count, is_same in map_ahead(compare, contents, min(MOST_THREADS, usable_cpus())):
        done += count
        heard(done)
        if not is_same:
            changed.append(unit)
    return changed
