"""The samples that a user wants to remove, by keys, URLs, digests or sources, of any number."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice

from wdsprep.changes.key_lists import NameList, is_file, read_lines
from wdsprep.dataset.sample_table import KEY
from wdsprep.errors import UsageError
from wdsprep.store.base import local_path
from wdsprep.tables.wanted_texts import WantedTexts
from wdsprep.text import EXAMPLES

OWN_KEY = re.compile(r"\d{12,}")
DIGITS = 6  # the fewest of a slice, and of a number in it
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedSamples:
    """The samples to remove: `texts` to look for in the columns of tables, by their names.

    All datasets have keys. URLs, digests and sources are in tables of images alone. `starts` has
    the first digits of the slices that keys begin with, and "" if some begin with none.
    """

    texts: Mapping[str, WantedTexts]
    starts: frozenset[str]
    asked_keys: NameList

    @classmethod
    def of(
        cls, *, keys: NameList, urls: NameList, sha256: NameList, sources: NameList
    ) -> "WantedSamples":
        """Read the lists of keys, URLs, digests and sources."""
        starts: set[str] = set()

        def noted_keys() -> Iterator[str]:
            for key in _read_keys(keys):
                starts.add(key[:DIGITS] if OWN_KEY.fullmatch(key) else "")
                yield key

        lists = {"source": sources, "url": urls, "sha256": sha256}
        texts = {
            kind: WantedTexts(kind, _read_values(kind, asked))
            for kind, asked in lists.items()
            if asked
        }
        if len(wanted_keys := WantedTexts(KEY, noted_keys())):
            texts[KEY] = wanted_keys
        return cls(texts=texts, starts=frozenset(starts), asked_keys=keys)

    def __bool__(self) -> bool:
        return bool(self.texts)

    @property
    def kinds(self) -> frozenset[str]:
        """Return the names of the columns that images alone have."""
        return frozenset(self.texts) - {KEY}

    @property
    def are_own(self) -> bool:
        """Return whether all keys are such as `pack` gives."""
        return "" not in self.starts

    def may_be_in(self, unit: str) -> bool:
        """Return whether a wanted key may be one of the slice that a unit was made of."""
        return unit.rpartition("/")[2][:DIGITS] in self.starts

    @property
    def marks(self) -> Iterator[bytes]:
        """Yield the marks of the URLs, digests and sources."""
        return chain.from_iterable(self.texts[kind].marks for kind in self.kinds)

    @property
    def unmatched(self) -> int:
        """Return how many URLs, digests and sources were not seen."""
        return sum(int((~self.texts[kind].seen).sum()) for kind in self.kinds)

    def unseen_keys(self) -> tuple[int, tuple[str, ...]]:
        """Return how many keys were not seen, and some of them."""
        if KEY not in self.texts or (wanted := self.texts[KEY]).seen.all():
            return 0, ()
        unseen = wanted.unseen(_read_keys(self.asked_keys))
        return int((~wanted.seen).sum()), tuple(dict.fromkeys(islice(unseen, EXAMPLES + 1)))


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


def _read_values(kind: str, asked: NameList) -> Iterator[str]:
    """Yield the lines of the list of a kind. Raise UsageError for a wrong digest."""
    for line in read_lines(kind, asked):
        value = line.lower() if kind == "sha256" else line
        if kind == "sha256" and not SHA256.fullmatch(value):
            raise UsageError(
                f"{line[:80]!r} is not a SHA-256 digest: give 64 hexadecimal digits on each line"
            )
        yield value
