"""The samples that a user wants to remove, by key, URL, digest or source, in lists of any length.

A list may have 10 million lines. Keys are kept as text by the slice that they begin with, all else
as marks of 16 bytes: 160 MB of either.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from wdsprep.changes.key_lists import NameList, is_file, read_lines
from wdsprep.dataset.removed_samples import Marks, mark_of
from wdsprep.dataset.samples import key_order
from wdsprep.errors import UsageError
from wdsprep.store.base import local_path

OWN_KEY = re.compile(r"\d{12,}")
DIGITS = 6  # the fewest of a slice, and of a number in it
SHA256 = re.compile(r"[0-9a-f]{64}")


class KeysBySlice:
    """Keys, kept by the slice that they begin with."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._by_slice: dict[str, bytearray] = {}  # by the first digits of the slice
        self.are_own = True
        for key in keys:
            is_own = bool(OWN_KEY.fullmatch(key))
            self.are_own &= is_own
            held = self._by_slice.setdefault(key[:DIGITS] if is_own else "", bytearray())
            held += key.encode("utf-8", "surrogateescape") + b"\n"

    def __bool__(self) -> bool:
        return bool(self._by_slice)

    def __iter__(self) -> Iterator[str]:
        """Yield each key once, slice by slice."""
        return chain.from_iterable(map(self._keys_at, sorted(self._by_slice)))

    def of_slice(self, name: str) -> set[str]:
        """Return those of these keys that a sample of the slice `name` may have."""
        return {key for key in self._keys_at(name[:DIGITS]) if _is_key_of(key, name)}

    def _keys_at(self, first: str) -> list[str]:
        held = bytes(self._by_slice.get(first, b""))
        return sorted(set(held.decode("utf-8", "surrogateescape").splitlines()))


def _is_key_of(key: str, slice_name: str) -> bool:
    number = key.removeprefix(slice_name)
    is_number = len(number) == DIGITS or (len(number) > DIGITS and number[0] != "0")
    return len(number) < len(key) and is_number


class SortedKeys:
    """Keys in the order in which keys rise in a shard."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = sorted(keys, key=key_order)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and bool(self.between(key, key))

    def between(self, first: str, last: str) -> list[str]:
        """Return the keys that are neither before `first` nor after `last`, in order."""
        start = bisect_left(self._keys, key_order(first), key=key_order)
        return self._keys[start : bisect_right(self._keys, key_order(last), key=key_order)]


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedSamples:
    """The samples to remove.

    `keys` are found in all datasets. `marks` are of URLs, digests and sources, which only the json
    of images states; `kinds` says of which of these.
    """

    keys: KeysBySlice
    marks: Marks
    kinds: frozenset[str]

    @classmethod
    def of(
        cls, *, keys: NameList, urls: NameList, sha256: NameList, sources: NameList
    ) -> "WantedSamples":
        """Read the lists of keys, URLs, digests and sources."""
        given = {"source": sources, "url": urls, "sha256": sha256}
        kinds = frozenset(kind for kind, asked in given.items() if asked)
        return cls(
            keys=KeysBySlice(_read_keys(keys)),
            marks=Marks.sort(
                mark_of(kind, line) for kind in kinds for line in _read_values(kind, given)
            ),
            kinds=kinds,
        )

    def __bool__(self) -> bool:
        return bool(self.keys or self.kinds)

    def marks_of(self, kind: str, value: str) -> Iterator[bytes]:
        """Yield the mark of a value if it is wanted."""
        if kind in self.kinds and (mark := mark_of(kind, value)) in self.marks:
            yield mark


def _read_keys(asked: NameList) -> Iterable[str]:
    """Return the keys in a file or a list, or split a text of keys at its commas.

    A text is the path of a file if there is such a file, if the text is a URL, or if its last part
    has a dot.
    """
    if not isinstance(asked, str):
        return read_lines("keys", asked)
    is_there = "://" in asked or is_file(local_path(asked) or asked)
    if asked and (is_there or "." in asked.rpartition("/")[2]):
        return read_lines("keys", asked)
    return [key for word in asked.split(",") if (key := word.strip())]


def _read_values(kind: str, given: dict[str, NameList]) -> Iterator[str]:
    """Yield the lines of the list of a kind. Raise UsageError for a wrong digest."""
    for line in read_lines(kind, given[kind]):
        value = line.lower() if kind == "sha256" else line
        if kind == "sha256" and not SHA256.fullmatch(value):
            raise UsageError(
                f"{line[:80]!r} is not a SHA-256 digest: give 64 hexadecimal digits on each line"
            )
        yield value
