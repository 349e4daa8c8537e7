"""The check whether files whose dates have changed since they were packed have the same content.

A source that was copied, unpacked again or touched has the same names and sizes, but other dates.
Then the slices with such items are read, and their content is compared with their receipts: if it
is the same, nothing has changed. The result is not stored, so each run compares again until the
dates are the old ones.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from enum import Enum, auto

from wdsprep.dataset.damage import naming_repair
from wdsprep.dataset.file_names import REMOVED, inputs_name
from wdsprep.dataset.sealed_json import read_lines
from wdsprep.errors import NotFoundError
from wdsprep.sources.base import Item, ItemLine, Slice, Source, find_changed_units
from wdsprep.store.base import Store

Compared = Callable[[int, int], object]
"""A function that is called with the number of items that have been compared, and of all."""


class Change(Enum):
    NONE = auto()
    DATED = auto()  # its dates alone
    CHANGED = auto()
    ADDED = auto()


class PackedItems:
    """The items that have been packed, kept as hashes to compare the items of a source with.

    Three hashes of 64 bits are kept of an item: of its name, of its entry in a listing without
    dates, and of the entry with dates. `change` collects in `dated` the hashed names of the items
    of which only the dates have changed.
    """

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self._marks = {name_mark(item): _mark(item) for item in items}
        self.dated: set[int] = set()

    def __len__(self) -> int:
        return len(self._marks)

    def change(self, item: Item) -> Change:
        """Return how an item has changed since it was packed.

        If only its dates have changed, its hashed name is added to `dated`.
        """
        before = self._marks.get(name_mark(item))
        if before is None:
            return Change.ADDED
        now = _mark(item)
        if before == now:
            return Change.NONE
        if before >> 64 != now >> 64:
            return Change.CHANGED
        self.dated.add(name_mark(item))
        return Change.DATED


def identity(item: Item) -> int:
    """Return a hash of 64 bits over everything about an item except its dates."""
    return _hash(_undated(item))


def name_mark(item: Item) -> int:
    return _hash(item.name)


def _mark(item: Item) -> int:
    return identity(item) << 64 | _hash(without_facts(item).to_json())


def _undated(item: Item) -> str:
    sizes = [(name, nbytes) for name, nbytes, _stamp in item.parts]
    return json.dumps([item.name, sizes, without_facts(item).extra, item.take])


def without_facts(item: Item) -> Item:
    """Return an item with the metadata from a folder's table replaced by a digest.

    The list of inputs has an item in this form once its sample was removed, so that it is still
    recognised.
    """
    if not item.extra.startswith("{"):
        return item
    return replace(item, extra=f"{REMOVED} {_hash(item.extra):016x}")


def _hash(text: str) -> int:
    data = text.encode("utf-8", "surrogatepass")  # a name may be bytes that are no UTF-8
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def packed_items(store: Store, units: Iterable[str]) -> Iterator[Item]:
    for unit in units:
        name = inputs_name(unit)
        with naming_repair(store):
            lines = read_lines(ItemLine, store.read(name), f"{store.url}/{name}")
        yield from map(Item.from_line, lines)


def is_dated(store: Store, part: Slice) -> bool:
    """Return whether a slice was packed from the same items, apart from their dates."""
    try:
        before = map(_undated, packed_items(store, [part.name]))
        return list(before) == list(map(_undated, part.items))
    except NotFoundError:  # nothing tells
        return False


def is_without_facts(store: Store, part: Slice) -> bool:
    """Return whether a slice was packed from the same items with the same dates.

    Its list of inputs may lack the metadata of samples that were removed.
    """
    lines = store.read(inputs_name(part.name)).decode().splitlines(keepends=True)
    return len(lines) == len(part.items) and all(
        line in (item.to_json(), without_facts(item).to_json())
        for line, item in zip(lines, part.items, strict=True)
    )


def units_with(store: Store, units: Iterable[str], names: Collection[int]) -> list[str]:
    """Return the units of work that have items with these names, given as hashes."""
    return [
        unit
        for unit in (units if names else ())
        if any(name_mark(item) in names for item in packed_items(store, [unit]))
    ]


def changed_units(
    store: Store, source: Source, contents: Mapping[str, str], heard: Compared
) -> list[str]:
    """Read the items of units again, and return the units whose digest has changed.

    `contents` has the digest of each unit from when it was packed. `heard` is called with the
    number of items that have been read, and with the number of all.
    """
    of = sum(store.read(inputs_name(unit)).count(b"\n") for unit in contents)
    return find_changed_units(
        source,
        contents,
        lambda unit: list(packed_items(store, [unit])),
        heard=lambda done: heard(done, of),
    )
