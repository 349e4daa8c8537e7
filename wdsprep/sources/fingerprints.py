"""The digest of what a run of items holds.

A listing knows names, sizes and dates. Where a date alone is another, as after `touch`, or in a
folder that was copied, only what the source gives out tells whether anything has changed. So that
is what counts: the images' bytes, captions and facts, and of what is no sample its code; not how a
table is compressed, or what lies beside a sample and is never read.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice

from blake3 import blake3

from wdsprep.cpus import usable_cpus
from wdsprep.dataset.receipts import CONTENT
from wdsprep.dataset.rejects import Refusal
from wdsprep.dataset.samples import Sample
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.sources.base import Item, Source

MARK_NBYTES = 16
MOST_THREADS = 8
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class Content:
    """A digest of rows, made from the fingerprint of each row in their order.

    Unless it is kept, no fingerprint is computed.
    """

    def __init__(self, *, is_kept: bool = True) -> None:
        self._is_kept = is_kept
        self._hash = blake3()

    def mark(self, row: Sample | Refusal) -> bytes:
        """Return the fingerprint of a row, or b"" if the digest is not kept.

        Any thread may call this.
        """
        return mark(row) if self._is_kept else b""

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


def mark(row: Sample | Refusal) -> bytes:
    """Return a fingerprint of a row.

    That of a sample changes with its source, image, captions, facts or URL; that of a refusal
    with its source or code.
    """
    if isinstance(row, Refusal):
        return blake3(_encode([row.source, row.code.value]).encode()).digest(MARK_NBYTES)
    said = [row.source, row.captions, row.facts, row.url, len(row.image)]
    return blake3(row.image).update(_encode(said).encode()).digest(MARK_NBYTES)


def content_of(source: Source, items: Iterable[Item]) -> str:
    """Read the samples that are taken of the items, and return the digest of what they are now."""
    content = Content()
    for item in items:
        for row in islice(source.read(item), item.take or None):
            content.add(mark(row))
    return content.digest


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
    done, found = 0, []

    def compare(unit: str) -> tuple[str, int, bool]:
        items = items_of(unit)
        return unit, len(items), content_of(source, items) == contents[unit]

    for unit, count, is_same in map_ahead(compare, contents, min(MOST_THREADS, usable_cpus())):
        done += count
        heard(done)
        if not is_same:
            found.append(unit)
    return found
