"""Where samples come from: a folder of images, a set of tars, tables with image bytes.

A source lists its *items* in an order that depends on what it holds alone, and reads one item into
samples. A slice, the unit of work of `pack`, is a fixed run of items: ten thousand images of a
folder, one tar, the row groups of a table that make ten thousand rows.
"""

import functools
import hashlib
import itertools
import json
import re
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from wdsprep.errors import SourceError
from wdsprep.samples import Code, Reject, Sample
from wdsprep.store import Store, open_store


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """What a source reads at once. `parts` are its files, each with size and stamp, so that two
    items are equal only if nothing about them has changed. `take` is the number of samples to take
    of it (0: all), `samples` how many it holds where a listing tells (else 0)."""

    name: str
    parts: tuple[tuple[str, int, str], ...]
    extra: str = ""
    take: int = 0
    samples: int = 1

    def to_json(self) -> str:
        """One line of a slice's inputs file."""
        line = [self.name, self.parts, self.extra, self.take]
        return json.dumps(line, separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, line: str) -> "Item":
        name, parts, extra, take = json.loads(line)
        found = tuple((part, nbytes, stamp) for part, nbytes, stamp in parts)
        return cls(name=name, parts=found, extra=extra, take=take)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes, _ in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A run of items: a unit of work of `pack`."""

    number: int
    items: tuple[Item, ...]

    @property
    def name(self) -> str:
        return f"{self.number:06d}"

    @property
    def samples(self) -> int:
        """How many samples the slice holds, as far as the listing told; 0 where it did not."""
        return sum(item.take or item.samples for item in self.items)

    @property
    def inputs(self) -> bytes:
        """What the slice is made from, as its inputs file keeps it."""
        return "".join(item.to_json() for item in self.items).encode()

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.inputs).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """An input that is no sample, as its source found it."""

    source: str
    code: Code
    detail: str = ""

    def to_reject(self, key: str) -> Reject:
        return Reject(key=key, source=self.source, code=self.code, detail=self.detail)


class Source(Protocol):
    """Picklable: the driver lists, workers read."""

    @property
    def kind(self) -> str:
        """`folder`, `tars` or `table`."""

    @property
    def url(self) -> str:
        """Where it is."""

    def items(self) -> Iterator[Item]:
        """All items, in the same order each time."""

    def count(self, item: Item, /) -> int:
        """How many samples an item holds."""

    def read(self, item: Item, /) -> Iterator[Sample | Refusal]:
        """The samples of an item, in order; each input is a Sample or a Refusal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Names that the user gave. Empty ones are recognised; what a filter names must be there."""

    image: str = ""
    caption: str = ""
    filtered: tuple[str, ...] = ()


def slices(items: Iterable[Item], *, size: int, first: int = 0) -> Iterator[Slice]:
    """Cut items into slices of `size`, numbered from `first`."""
    iterator = iter(items)
    for number in itertools.count(first):
        taken = tuple(itertools.islice(iterator, size))
        if not taken:
            return
        yield Slice(number=number, items=taken)


_NO_CHARACTER = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # halves of pairs, from JSON


def shown(name: str) -> str:
    """A file name as text that any reader can take: bytes that are no UTF-8 are replaced."""
    name = _NO_CHARACTER.sub("\ufffd", name)
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def is_hidden(name: str) -> bool:
    """Whether a file or a folder above it begins with a dot: shells leave those out too."""
    return name.startswith(".") or "/." in name


_OPENING = threading.Lock()  # lru_cache alone lets many threads open the same, which is slow on S3
_open_once = functools.lru_cache(maxsize=8)(open_store)


def opened(url: str) -> Store:
    """The store at `url`, opened once in each process: workers read many items from it."""
    with _OPENING:
        return _open_once(url)


def url_table_error(what: str) -> SourceError:
    return SourceError(
        f"{what} is a table of URLs, which this version cannot download: fetch the images first, "
        "for example with img2dataset, and pack what it writes"
    )
