"""What is left to pack: slices wanted minus receipts present, and whether the source still is
what it was.

The items of a source are cut into slices anew on each run. Where a slice that has a receipt comes
out differently, the source has changed, and that is an error before any work is done. An append
leaves the packed slices as they are and cuts what is new into further ones: a new *generation*,
whose first slice the manifest records, so that an append that was killed resumes like any run.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from wdsprep.errors import FingerprintError, SourceError
from wdsprep.manifest import Manifest
from wdsprep.sources import Item, Slice, Source, shown, slices
from wdsprep.sources.folder import MetadataFound
from wdsprep.store import Store

KEPT_ITEMS = 100_000  # a source with more is listed once more instead of kept in memory
EXAMPLES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What a first pass over the source found: its items, or their number if there are many."""

    source: Source
    limit: int
    count: int
    samples: int
    captioned: int
    nbytes: int
    kept: tuple[Item, ...] | None

    def items(self) -> Iterator[Item]:
        return iter(self.kept) if self.kept is not None else limited(self.source, self.limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The slices of the last generation; `older` identifies the items that earlier ones hold."""

    survey: Survey
    slice_size: int
    generations: tuple[int, ...]
    older: frozenset[int]
    packed: Mapping[str, str]  # the digests of what the slices that are done were made from
    count: int = 0  # of slices pending

    def wanted(self) -> Iterator[Slice]:
        items = self.survey.items()
        if self.older:
            items = (item for item in items if identity(item) not in self.older)
        return slices(items, size=self.slice_size, first=self.generations[-1])

    def pending(self) -> Iterator[Slice]:
        """Slices wanted minus receipts present, cut as they are asked for."""
        for part in self.wanted():
            if part.name not in self.packed:
                yield part
            elif self.survey.kept is None and part.digest != self.packed[part.name]:
                raise FingerprintError(f"{self.survey.source.url} changes while it is packed")


def survey(source: Source, limit: int, tell: Callable[[int], None]) -> Survey:
    """Go over the source; `tell` hears from time to time how many items were seen."""
    try:
        return _survey(source, limit, tell)
    except MetadataFound as found:
        return _survey(found.source, limit, tell)


def _survey(source: Source, limit: int, tell: Callable[[int], None]) -> Survey:
    kept: list[Item] = []
    count = samples = nbytes = captioned = 0
    for item in limited(source, limit):
        count += 1
        samples += item.samples
        nbytes += item.nbytes
        captioned += bool(item.samples and (len(item.parts) > 1 or item.extra))
        if count <= KEPT_ITEMS:
            kept.append(item)
        if count % 1_000 == 0:
            tell(count)
    if not count:
        raise SourceError(f"{source.url} holds nothing to pack: put images in it")
    return Survey(
        source=source,
        limit=limit,
        count=count,
        samples=samples,
        captioned=captioned,
        nbytes=nbytes,
        kept=tuple(kept) if count <= KEPT_ITEMS else None,
    )


def limited(source: Source, limit: int) -> Iterator[Item]:
    """The items that hold the first `limit` samples (0: all), the last one cut where they end."""
    left = limit
    items = source.items()
    for item in items:
        there = source.count(item) if limit else 0
        if limit and there >= left:
            yield replace(item, take=left) if there > left else item
            break
        left -= there
        yield item
    if source.kind == "folder":  # what is left may hold the captions of what was taken
        for _ in items:
            pass


def make_plan(
    store: Store, manifest: Manifest, seen: Survey, *, slice_size: int, append: bool
) -> Plan:
    """Hold the source against what is packed; an error says what differs."""
    packed = {receipt.unit: receipt.input for receipt in manifest.receipts}
    start = manifest.generations[-1]
    earlier = [unit for unit in packed if int(unit) < start]
    plan = Plan(
        survey=seen,
        slice_size=slice_size,
        generations=manifest.generations,
        older=frozenset(map(identity, packed_items(store, earlier))),
        packed=packed,
    )
    pending = _pending_if_unchanged(plan, complete=manifest.complete)
    if pending is not None:
        return replace(plan, count=pending)
    added = _check_only_added(store, manifest, seen, append=append)
    if not added:
        return replace(plan, survey=replace(seen, kept=()))  # all of it is packed, cut otherwise
    plan = replace(
        plan,
        generations=(*manifest.generations, max(map(int, packed)) + 1),
        older=frozenset(map(identity, packed_items(store, packed))),
    )
    return replace(plan, count=sum(1 for _ in plan.wanted()))


def _pending_if_unchanged(plan: Plan, *, complete: bool) -> int | None:
    """How many slices are left to do, or None where a packed slice does not come out of the source
    as it was, or a complete dataset does not cover the source."""
    unseen = {unit for unit in plan.packed if int(unit) >= plan.generations[-1]}
    pending = 0
    for part in plan.wanted():
        if part.name not in plan.packed:
            pending += 1
        elif plan.packed[part.name] != part.digest:
            return None
        unseen.discard(part.name)
    return None if unseen or (pending and complete) else pending


def packed_items(store: Store, units: Iterable[str]) -> Iterator[Item]:
    for unit in units:
        for line in store.read(f"inputs/{unit}.jsonl").splitlines():
            yield Item.from_json(line.decode())


def identity(item: Item) -> int:
    """64 bits that change when anything about the item does."""
    return _hash(item.to_json())


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _check_only_added(store: Store, manifest: Manifest, seen: Survey, *, append: bool) -> int:
    """The number of new items, where the source may have gained some and has not changed else."""
    units = [receipt.unit for receipt in manifest.receipts]
    known = {_hash(item.name): identity(item) for item in packed_items(store, units)}
    added, changed = _Names("added"), _Names("changed")
    for item in seen.items():
        before = known.pop(_hash(item.name), None)
        if before is None:
            added.note(item.name)
        elif before != identity(item):
            changed.note(item.name)
    removed = _Names("removed")
    for item in packed_items(store, units) if known else ():
        if _hash(item.name) in known:
            removed.note(item.name)
    if changed.count or removed.count or (added.count and not append):
        limit = manifest.extra.get("limit", 0)
        how = f" with --limit {limit}" if limit != seen.limit and limit else ""
        _refuse(seen.source.url, how, added, changed, removed)
    return added.count


def _refuse(url: str, how: str, added: "_Names", changed: "_Names", removed: "_Names") -> None:
    what = ", ".join(str(names) for names in (added, changed, removed) if names.count)
    ways = "--overwrite starts over"
    if not changed.count and not removed.count:
        ways = f"--append packs what is new into further shards, {ways}"
    raise FingerprintError(f"{url} has changed since it was packed{how}: {what}: {ways}")


class _Names:
    """Counts names and keeps the first few to show."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._examples: list[str] = []
        self.count = 0

    def note(self, name: str) -> None:
        self.count += 1
        if self.count <= EXAMPLES:
            self._examples.append(shown(name))

    def __str__(self) -> str:
        more = ", ..." if self.count > EXAMPLES else ""
        return f"{self.count:,} {self._what} ({', '.join(self._examples)}{more})"
