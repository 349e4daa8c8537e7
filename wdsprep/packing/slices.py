"""The slices that are left to pack: those that are wanted, without those that have a receipt.

A first pass over the source counts its items (`survey_source`), hashes of packed items are compared
with them (`PackedItems`), the slices that are left follow (`SlicePlan`), and workers are given what
they need to pack them (`PackJob`).

The items of a source are cut into slices again in each run. If a slice that has a receipt now has
other items, apart from the dates of files, the source has changed, and that is an error before any
work is done. An append leaves the packed slices as they are and cuts the new items into further
slices: a new *generation*, whose first slice the manifest records, so that an append that was
killed resumes like any run. If a repair has removed a slice of an earlier generation, a *hole*, its
list of inputs is left: it alone still tells which items were in it.

A source that was copied, unpacked again or touched has the same names and sizes, but other dates.
Then the slices with such items are read, and their content is compared with their receipts: if it
is the same, nothing has changed. The result is not stored, so each run compares again until the
dates are the old ones.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Literal

from wdsprep.dataset.damage import naming_repair
from wdsprep.dataset.file_names import (
    BESIDE,
    FIRST_RETRY,
    INPUTS,
    REMOVED,
    RETRIES,
    inputs_name,
    is_retry,
    retry_of_inputs,
    slice_name,
)
from wdsprep.dataset.manifest import Manifest, Receipt
from wdsprep.dataset.sealed_json import read_lines
from wdsprep.dataset.settings import Settings
from wdsprep.dataset.stored_dataset import find_receipt
from wdsprep.dataset.unit_locks import Edition
from wdsprep.errors import FingerprintError, NotFoundError, SourceError
from wdsprep.fetch.options import FetchRules
from wdsprep.packing.options import PackRules
from wdsprep.runners.base import HopelessError
from wdsprep.sources.base import (
    Item,
    ItemLine,
    Slice,
    Source,
    Told,
    check_slices,
    count_left_out,
    find_changed_units,
    ignore_left_out,
    left_out_among,
    slices,
)
from wdsprep.sources.captions import CAPTIONS
from wdsprep.sources.folder import FolderSource, MetadataFound
from wdsprep.sources.patterns import extension
from wdsprep.store.base import Store, write_bytes
from wdsprep.text import EXAMPLES, examples, shown


@dataclass(frozen=True, kw_only=True, slots=True)
class PackJob:
    """The picklable description of a worker of `pack`, whose process it is sent to."""

    source: Source
    images: str
    rules: PackRules
    settings: Settings
    edition: str = ""
    """The mark of the dataset's edition."""
    generations: tuple[int, ...] = (0,)
    threads: int = 1
    retries: frozenset[str] = frozenset()
    """The names of the retry slices that are known."""
    fetch_rules: FetchRules | None = None
    """The rules of downloads, for a table of URLs."""
    allowed_more: tuple[str, ...] = ()
    """The policies that these rules allow beyond the settings of the dataset."""


Compared = Callable[[int, int], object]
"""A function that is called with the number of items that have been compared, and of all."""


Change = Literal["none", "dated", "changed", "added", "removed"]
"""How an item has changed since it was packed; "dated" means that only its dates are others."""


class PackedItems:
    """The items that have been packed, kept as hashes to compare the items of a source with.

    Three hashes of 64 bits are kept of an item: of its name, of its entry in a listing without
    dates, and of the entry with dates. `note_change` collects in `dated` the hashed names of the
    items of which only the dates have changed.
    """

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self._marks = {name_hash(item): _entry_hashes(item) for item in items}
        self.dated: set[int] = set()

    def __len__(self) -> int:
        return len(self._marks)

    def note_change(self, item: Item) -> Change:
        """Return how an item has changed, and add its hashed name to `dated` if only by dates."""
        before = self._marks.get(name_hash(item))
        if before is None:
            return "added"
        now = _entry_hashes(item)
        if before == now:
            return "none"
        if before >> 64 != now >> 64:  # the hashes without dates
            return "changed"
        self.dated.add(name_hash(item))
        return "dated"


def name_hash(item: Item) -> int:
    """Return a hash of the name of an item, without all else."""
    return _hash(item.name)


def undated_hash(item: Item) -> int:
    """Return a hash of an item without its dates, and with a digest of its metadata."""
    sizes = [(name, nbytes) for name, nbytes, _stamp in item.parts]
    return _hash(json.dumps([item.name, sizes, without_facts(item).extra, item.take]))


def _entry_hashes(item: Item) -> int:
    """Return two hashes of an item: without its dates in the upper 64 bits, with them in the lower.

    One number takes less memory than a pair. Both hashes have a digest in place of the metadata.
    """
    return undated_hash(item) << 64 | _hash(without_facts(item).to_json())


def without_facts(item: Item) -> Item:
    """Return an item with the metadata from a folder's table replaced by a digest.

    All else stays, dates too. The list of inputs has an item in this form once its sample was
    removed, so that it is still recognised.
    """
    if not item.extra.startswith("{"):
        return item
    return item._replace(extra=f"{REMOVED} {_hash(item.extra):016x}")


def _hash(text: str) -> int:
    data = text.encode("utf-8", "surrogatepass")  # a name may be bytes that are no UTF-8
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def packed_items(store: Store, units: Iterable[str]) -> Iterator[Item]:
    for unit in units:
        name = inputs_name(unit)
        with naming_repair(store):
            lines = read_lines(ItemLine, store.read(name), f"{store.url}/{name}")
        yield from map(Item.from_line, lines)


def compare_inputs(store: Store, part: Slice) -> Change:
    """Return how the items of a slice have changed since it was packed, all of them together.

    Its list of inputs may lack the metadata of samples that were removed.
    """
    try:
        before = PackedItems(packed_items(store, [part.name]))
    except NotFoundError:  # without the list nobody knows
        return "changed"
    changes = {before.note_change(item) for item in part.items}
    if len(before) != len(part.items) or not changes <= {"none", "dated"}:
        return "changed"
    return "dated" if "dated" in changes else "none"


def units_with(store: Store, units: Iterable[str], names: Collection[int]) -> list[str]:
    """Return the units of work that have items with these names, given as hashes."""
    return [
        unit
        for unit in (units if names else ())
        if any(name_hash(item) in names for item in packed_items(store, [unit]))
    ]


OVERWRITE = "--overwrite starts over"
KEPT_ITEMS = 100_000  # a source with more is listed once more instead of kept in memory


@dataclass(kw_only=True, slots=True)
class SourceSurvey:
    """The result of a first pass over a source: its items, or their number if they are many."""

    source: Source
    limit: int
    slice_size: int
    count: int = 0
    samples: int = 0
    captioned: int = 0
    unlisted: int = 0
    """The number of images in no row of the metadata of a folder that has any."""
    extensions: set[str] = field(default_factory=set)
    """The extensions of texts beside images, if the user named those of captions."""
    nbytes: int = 0
    kept: tuple[Item, ...] | None = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    """The number of files in the source that are not items, by their kinds."""

    def items(self) -> Iterator[Item]:
        return iter(self.kept) if self.kept is not None else limited(self.source, self.limit)


def survey_source(
    source: Source, limit: int, slice_size: int, tell: Callable[[int], None]
) -> SourceSurvey:
    """List the items of a source. Return how many there are, and the items if they are few.

    Items after the first `limit` samples do not count; 0 means all. A slice has `slice_size` items.
    `tell` is called from time to time with the number of items so far. Raise SourceError if the
    source has none, and UsageError if it makes too many slices.
    """
    seen = SourceSurvey(source=source, limit=limit, slice_size=slice_size)
    try:
        _list(seen, tell)
    except MetadataFound as error:
        seen = SourceSurvey(source=error.source, limit=limit, slice_size=slice_size)
        _list(seen, tell)
    if not seen.count:
        what = "rows in its tables" if source.kind in ("table", "urls") else "images in it"
        raise SourceError(f"{source.url} holds nothing to pack: put {what}")
    check_slices(-(-seen.count // slice_size))
    return seen


def _list(seen: SourceSurvey, tell: Callable[[int], None]) -> None:
    source, kept, left_out = seen.source, list[Item](), Counter[str]()
    names_extensions = source.columns.caption_ext != CAPTIONS
    folder = source if isinstance(source, FolderSource) else None
    for item in limited(source, seen.limit, partial(count_left_out, left_out)):
        seen.count += 1
        seen.samples += item.samples
        seen.nbytes += item.nbytes
        if folder and item.samples:
            seen.captioned += folder.may_have_caption(item)
            seen.unlisted += bool(folder.tables and not item.extra)
            if names_extensions:
                seen.extensions.update(extension(name) for name, _, _ in item.parts[1:])
        if seen.count <= KEPT_ITEMS:
            kept.append(item)
        if seen.count % 1_000 == 0:
            tell(seen.count)
    seen.kept = tuple(kept) if seen.count <= KEPT_ITEMS else None
    seen.left_out = left_out_among(left_out)


def limited(source: Source, limit: int, left_out: Told = ignore_left_out) -> Iterator[Item]:
    """Yield the items that hold the first `limit` samples of a source; 0 means all.

    The last item is cut to the samples that are left.
    """
    left = limit
    items = source.items(left_out)
    for item in items:
        there = source.count(item) if limit else 0
        if limit and there >= left:
            yield item._replace(take=left) if there > left else item
            break
        left -= there
        yield item
    if source.kind == "folder":  # what is left may hold the captions of what was taken
        for _ in items:
            pass


class SlicePlan:
    """The slices to pack: those of the last generation, and missing ones of earlier generations."""

    count: int
    """The number of slices that are pending."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        seen: SourceSurvey,
        *,
        append: bool,
        compared: Compared,
    ) -> None:
        """Compare a source with what is packed of it.

        Raise FingerprintError if the source has changed, except by dates and, with `append`, by new
        items. Slices that have items with other dates are read again and compared; `compared` gets
        the number of items compared, and of all.
        """
        self._store, self._manifest, self._seen = store, manifest, seen
        self._compared = compared
        self.generations = manifest.generations
        self._packed = {receipt.unit: receipt.input for receipt in _own_receipts(manifest)}
        """The digest of the inputs of each slice that is done, by its name."""
        start = self.generations[-1]
        self._holes = self._find_holes(start)
        filled = [part.name for part in self._holes]
        earlier = [unit for unit in self._packed if int(unit) < start]
        self._older = PackedItems(packed_items(store, [*filled, *earlier]))
        """The items of earlier generations."""
        if (unchanged := self._pending_if_unchanged()) is not None:
            self.count, touched = unchanged
            self._check_contents([*touched, *units_with(store, earlier, self._older.dated)])
            return
        known, added = self._check_only_added(filled, append=append)
        self._check_contents(units_with(store, self._packed, known.dated))
        self.count = len(self._holes)
        if not added:  # all of it is packed, cut otherwise
            self._seen = replace(seen, kept=())
            return
        self.generations = (*self.generations, max(map(int, self._packed)) + 1)
        self._older = known
        self.count += sum(1 for _ in self._wanted())

    def _wanted(self) -> Iterator[Slice]:
        items = self._seen.items()
        if self._older:
            new = ("added", "changed")  # a changed item has to make a slice differ
            items = (item for item in items if self._older.note_change(item) in new)
        return slices(items, size=self._seen.slice_size, first=self.generations[-1])

    def pending(self) -> Iterator[Slice]:
        """Yield the slices that have no receipt, each cut from the source when it is asked for.

        A source with many items is listed again for this. Raise FingerprintError if a packed slice
        has other items then.
        """
        yield from self._holes
        for part in self._wanted():
            if part.name not in self._packed:
                yield part
            elif self._seen.kept is None and part.digest != self._packed[part.name]:
                raise FingerprintError(
                    f"{self._seen.source.url} changes while it is packed: run the same command "
                    "again when it no longer changes"
                )

    def _find_holes(self, start: int) -> tuple[Slice, ...]:
        """Return the slices before `start` that have a list of inputs and no receipt.

        A list counts only if the source still has all its items and no other slice has them.
        Otherwise a killed run has left it, and it means nothing.
        """
        store, packed = self._store, self._packed
        units: list[str] = []
        if sum(int(unit) < start for unit in packed) < start:  # an earlier slice has no receipt
            matches = (BESIDE.fullmatch(entry.name) for entry in store.list(INPUTS))
            listed = (match[2] for match in matches if match)
            units = [unit for unit in listed if int(unit) < start and unit not in packed]
        if not units:
            return ()
        hashes = {unit: [*map(undated_hash, packed_items(store, [unit]))] for unit in sorted(units)}
        wanted = set(chain.from_iterable(hashes.values()))
        wanted -= set(map(undated_hash, packed_items(store, packed)))
        present = {h: item for item in self._seen.items() if (h := undated_hash(item)) in wanted}
        return tuple(
            Slice(number=int(unit), items=tuple(map(present.__getitem__, needed)))
            for unit, needed in hashes.items()
            if needed and present.keys() >= set(needed)
        )

    def _pending_if_unchanged(self) -> tuple[int, list[str]] | None:
        """Compare the packed slices of the last generation with the source.

        Return the number of slices that are left to do, and the names of those with other dates. If
        the list of inputs of a packed slice has other dates, or lacks the metadata of removed
        samples, its present digest replaces that in `_packed`. Return None if a packed slice is
        gone or has changed in another way, or if a complete dataset does not cover the source.
        """
        digests: dict[str, str] = {}
        touched: list[str] = []
        unseen = {unit for unit in self._packed if int(unit) >= self.generations[-1]}
        pending = len(self._holes)
        for part in self._wanted():
            if part.name not in self._packed:
                pending += 1
            elif self._packed[part.name] != (digest := part.digest):
                change = compare_inputs(self._store, part)
                if change == "changed":
                    return None
                digests[part.name] = digest
                touched += [part.name] if change == "dated" else []
            unseen.discard(part.name)
        if unseen or (pending and self._manifest.complete):
            return None
        self._packed |= digests
        return pending, touched

    def _check_only_added(self, filled: Iterable[str], *, append: bool) -> tuple[PackedItems, int]:
        """Check that a source has at most gained items since it was packed; dates do not count.

        Return the items that are packed, and the number of new ones. Raise FingerprintError if
        items have changed or are gone, or if there are new ones without `append`.
        """
        units, seen = [*filled, *self._packed], self._seen
        known = PackedItems(packed_items(self._store, units))
        names, counts = defaultdict[Change, list[str]](list), Counter[Change]()

        def note(change: Change, item: Item) -> None:
            counts[change] += 1
            if counts[change] <= EXAMPLES + 1:
                names[change].append(shown(item.name))

        for item in seen.items():
            note(known.note_change(item), item)
        as_packed = counts["none"] + counts["dated"]
        if as_packed + counts["changed"] < len(known):
            present = {name_hash(item) for item in seen.items()}
            for item in packed_items(self._store, units):
                if name_hash(item) not in present:
                    note("removed", item)
        is_other = counts["changed"] or counts["removed"]
        if is_other or (counts["added"] and not append):
            limit = self._manifest.extra.get("limit", 0)
            changes: tuple[Change, ...] = ("added", "changed", "removed")
            what = ", ".join(
                f"{counts[change]:,} {change} ({examples(names[change])})"
                for change in changes
                if counts[change]
            )
            ways = OVERWRITE
            if counts["removed"] and not as_packed:
                ways = f"if it is another source, give another place for its shards; {ways}"
            if not is_other:
                ways = f"--append packs what is new into further shards, {ways}"
            how = "has changed since it was packed"
            if limit and limit != seen.limit:  # more may be wanted of a tar or table that it cut
                how = f"was packed with --limit {limit}, which is now another or missing"
            raise FingerprintError(f"{seen.source.url} {how}: {what}: {ways}")
        return known, counts["added"]

    def _check_contents(self, units: Collection[str]) -> None:
        """Read items of units again, and raise FingerprintError if their content has changed."""
        if not units:
            return
        store, source, touched = self._store, self._seen.source, set(units)
        contents = {r.unit: r.content for r in _own_receipts(self._manifest) if r.unit in touched}
        total = sum(store.read(inputs_name(unit)).count(b"\n") for unit in contents)
        if changed := find_changed_units(
            source,
            contents,
            lambda unit: list(packed_items(store, [unit])),
            heard=lambda done: self._compared(done, total),
        ):
            known = PackedItems(packed_items(store, changed))
            items = (item for item in self._seen.items() if known.note_change(item) == "dated")
            names = [shown(item.name) for item in items]
            how = "changed"
            if len(names) > len(changed):
                how = "have other dates, and some of them other bytes"
            raise FingerprintError(
                f"{source.url} has changed since it was packed: {len(names):,} {how} "
                f"({examples(names)}): {OVERWRITE}"
            )


def restore_inputs(edition: Edition, manifest: Manifest, seen: SourceSurvey) -> None:
    """Write lost lists of inputs again, for packed slices of one item that the source still has."""
    there = {entry.name for entry in edition.store.list(INPUTS)}
    own = ((receipt.input, receipt.unit) for receipt in _own_receipts(manifest))
    gone = {digest: unit for digest, unit in own if inputs_name(unit) not in there}
    for item in seen.items() if gone else ():
        part = Slice(number=0, items=(item,))
        if unit := gone.get(part.digest):
            with edition.holding(unit):
                if find_receipt(edition.store, unit, part.digest, manifest.settings):
                    write_bytes(edition.store, inputs_name(unit), part.inputs)


def _own_receipts(manifest: Manifest) -> Iterator[Receipt]:
    """Yield the receipts of slices that are not retry slices."""
    return (receipt for receipt in manifest.receipts if not is_retry(receipt.unit))


def check_not_retried(store: Store, part: Slice, known: Collection[str]) -> None:
    """Raise HopelessError if a retry has taken rows of a slice since this run began.

    `known` are the names of the retry slices that there were then. New ones get the numbers that
    follow. So if the next number is missing, there are none, and nothing needs to be listed.
    """
    if is_retry(part.name):
        return
    following = 1 + max(map(int, known), default=FIRST_RETRY - 1)
    try:
        store.read(inputs_name(slice_name(following)), nbytes=0)
    except NotFoundError:
        return
    retries = {retry_of_inputs(entry.name) for entry in store.list(RETRIES)}
    items = packed_items(store, sorted(retries - {"", *known}))
    if any(item.name == part.name for item in items):
        raise HopelessError(
            f"a retry has taken rows of {part.name}: run the same command again to pack the rest"
        )
