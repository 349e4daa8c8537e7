"""Where samples come from: a folder of images, a set of tars, tables with image bytes or URLs.

A source lists its *items* in an order that depends on what it holds alone, and reads one item into
samples. A slice, the unit of work of `pack`, is a fixed run of items: ten thousand images of a
folder, one tar, the row groups of a table that make ten thousand rows.

`recognise` tells which kind of source lies at a path, `patterns` which files of it are meant. The
kinds are `folder`, `tars`, `image_tables` and `url_tables`; `tables` reads the rows of the last
two, and of a table of captions. `captions` finds the caption and facts of an image, or the column
of a table that holds them, and `metadata` reads those that lie beside a folder. `contents` makes
one digest of what items hold.

In: A folder, tars or tables, where `store` can read them.
Out: Items in a fixed order, and of each its samples or refusals.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from wdsprep.dataset.digests import DigestKind
from wdsprep.dataset.names import is_retry, slice_name
from wdsprep.dataset.records import Nbytes
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Refusal, as_rejected
from wdsprep.dataset.samples import Sample
from wdsprep.errors import UsageError
from wdsprep.text import columns, shown

MOST_SLICES = 1_000_000
"""A key is the slice's number and the input's in it. While all slices have as many digits, no two
inputs share a key, however many a slice holds."""


_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


ItemLine = tuple[str, list[tuple[str, Nbytes, str]], str, Nbytes]
"""What a line of an inputs file says."""


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
        return _encode(line) + "\n"

    @classmethod
    def from_line(cls, line: Sequence[Any]) -> "Item":
        """The item of a line that is an `ItemLine`."""
        name, parts, extra, take = line
        found = tuple((part, nbytes, stamp) for part, nbytes, stamp in parts)
        return cls(name=name, parts=found, extra=extra, take=take)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes, _ in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A run of items: a unit of work of `pack`. `elsewhere` are the sources of those samples in it
    that another slice has taken over."""

    number: int
    items: tuple[Item, ...]
    elsewhere: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return slice_name(self.number)

    @property
    def is_retry(self) -> bool:
        return is_retry(self.name)

    @property
    def samples(self) -> int:
        """How many samples the slice holds, as far as the listing told; 0 where it did not."""
        return sum(item.take or item.samples for item in self.items)

    @property
    def inputs(self) -> bytes:
        """What the slice is made from, as its inputs file keeps it."""
        return "".join(item.to_json() for item in self.items).encode()

    def digest(self, kind: DigestKind) -> str:
        """As the receipt has it."""
        return kind.hex(self.inputs)


Made = TypeVar("Made")


def alone(source: str, make: Callable[[], Made]) -> Made | Refusal:
    """What `make` makes of one input. Whatever exception that meets is the refusal of this input,
    and costs no other."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001 (told apart by as_rejected)
        refused = as_rejected(error, Code.UNREADABLE)
        return Refusal(source=source, code=refused.code, detail=shown(refused.detail))


Told = Callable[[str], object]


def untold(_kind: str) -> None:
    """Of what is left out, where nobody counts it."""


class LeftOut:
    """Counts files that are no input to `pack` by their kind: `.mov`, or nothing where a name has
    no extension."""

    NAMED = 20  # kinds at most: a hostile tar has any number
    PREFIX = "left_out:"

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()

    def note(self, kind: str) -> None:
        kind = kind.lower() or "no extension"
        is_plain = re.fullmatch(r"\.[\w.-]{1,20}", kind, re.ASCII) or kind == "no extension"
        is_named = kind in self.kinds or len(self.kinds) < self.NAMED
        self.kinds[kind if is_plain and is_named else "others"] += 1

    def counts(self) -> Counter[str]:
        """As a receipt keeps them among other counts."""
        return Counter({f"{self.PREFIX}{kind}": count for kind, count in self.kinds.items()})

    @classmethod
    def among(cls, counts: Mapping[str, int]) -> Counter[str]:
        """The kinds in the counts of receipts."""
        own = {name: count for name, count in counts.items() if name.startswith(cls.PREFIX)}
        return Counter({name.removeprefix(cls.PREFIX): count for name, count in own.items()})


class Source(Protocol):
    """Picklable: the driver lists, workers read. Both tell the kinds of files that are left out."""

    @property
    def kind(self) -> str:
        """`folder`, `tars`, `table` or `urls`."""

    @property
    def url(self) -> str:
        """Where it is."""

    def items(self, left_out: Told = untold) -> Iterator[Item]:
        """All items, in the same order each time."""

    def count(self, item: Item, /) -> int:
        """How many samples an item holds."""

    def read(self, item: Item, /, left_out: Told = untold) -> Iterator[Sample | Refusal]:
        """The samples of an item, in order; each input is a Sample or a Refusal. Samples of a
        table of URLs have no image yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Names that the user gave. Empty ones are recognised; what a filter names, what is to be kept
    and what holds the digest of an image must be there."""

    image: str = ""
    caption: str = ""
    url: str = ""
    digest: str = ""
    filtered: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    def check(self, there: Sequence[str], what: str) -> None:
        """An error where one of them is not among the columns that are there."""
        asked = [("image-col", self.image), ("url-col", self.url), ("caption-col", self.caption)]
        asked += [("verify-hash", self.digest), *(("filter", name) for name in self.filtered)]
        asked += [("save-additional-columns", name) for name in self.kept]
        for option, name in asked:
            if name and name not in there:
                raise UsageError(
                    f"{what} has no column {name!r} (--{option}): it has {columns(there)}"
                )


def slices(items: Iterable[Item], *, size: int, first: int = 0) -> Iterator[Slice]:
    """Cut items into slices of `size`, numbered from `first`."""
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
