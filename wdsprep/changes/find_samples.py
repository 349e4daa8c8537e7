"""Find the samples that a user lists, in each unit of work of a dataset.

Keys, sources, URLs and digests are columns of the tables beside the shards. Somebody has asked for
his picture to go, so none may be missed: a table is asked only if it is the one that the receipt of
its unit states, which is decided by its tar; otherwise the tar itself is. A key begins with its
slice, so only the tables of that slice are read for it. Selections, and latents of tars that
another program packed, have keys that do not.

No table has the digests of the stored images. These are hashed, unless all images of a shard were
kept as they came and the table has the digests of what came (`pack --compute-hash sha256`).
"""

import hashlib
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from wdsprep.changes.samples_to_remove import WantedSamples
from wdsprep.dataset.damage import naming_place
from wdsprep.dataset.file_names import LATENTS, SELECTION, latent_unit
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.receipts import CONTENT, Receipt, Shard, image_shard_digest
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject, rejects_in
from wdsprep.dataset.removed_samples import ShardRemoval, UnitRemoval, mark_of
from wdsprep.dataset.sample_table import KEY
from wdsprep.dataset.samples import parse_object
from wdsprep.dataset.shard_reader import ShardReader
from wdsprep.dataset.tar.members import BadSampleError
from wdsprep.dataset.tar.read import open_tape, scan
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.dataset.unit_locks import Edition
from wdsprep.errors import DamageError
from wdsprep.images.extensions import IMAGES
from wdsprep.store.base import Store
from wdsprep.tables.stored_tables import read_sound_columns

KeysByNumber = dict[int, str]
"""The keys of samples, by their numbers in a shard, which rise."""
Fields = Mapping[str, bytes]


@dataclass(frozen=True, kw_only=True)
class DatasetPlace:
    """A dataset: its path as the user wrote it, its URL, and its receipts as they are now."""

    shown: str
    url: str
    edition: Edition
    manifest: Manifest

    @property
    def store(self) -> Store:
        return self.edition.store

    @property
    def has_images(self) -> bool:
        return self.manifest.dataset == "images"

    @cached_property
    def receipts(self) -> Mapping[str, Receipt]:
        return {receipt.unit: receipt for receipt in self.manifest.receipts}

    @property
    def is_selection(self) -> bool:
        """Return whether `select` made the dataset, so that keys do not begin with their unit."""
        source = self.manifest.settings.get("source")
        return source == SELECTION or SELECTION in self.manifest.extra

    @property
    def is_foreign(self) -> bool:
        """Return whether its latents were made of tars that another program packed."""
        return not self.has_images and any(
            CONTENT in receipt.files or not LATENTS.fullmatch(f"{unit}.tar")
            for unit, receipt in self.receipts.items()
        )


@dataclass(kw_only=True)
class FoundSamples:
    """The samples that were found in a dataset, by unit.

    `marks` are those of inputs that must stay away. `known` are the wanted keys whose samples were
    removed before.
    """

    units: dict[str, UnitRemoval] = field(default_factory=dict)
    marks: set[bytes] = field(default_factory=set)
    known: set[str] = field(default_factory=set)

    @property
    def samples(self) -> int:
        return sum(unit.samples for unit in self.units.values())

    @property
    def keys(self) -> Iterator[str]:
        for unit in self.units.values():
            yield from (key for shard in unit.shards for key in shard.keys)
            yield from unit.rejects

    def add(self, other: "FoundSamples") -> None:
        self.units |= other.units
        self.marks |= other.marks
        self.known |= other.known


@dataclass(frozen=True, kw_only=True)
class Finder:
    """A search for the wanted samples.

    With `keeps_copies`, found samples are marked by their sources alone, and not by their URLs and
    digests, so that their copies may be packed.
    """

    wanted: WantedSamples
    keeps_copies: bool = False
    heard: Callable[[str, int, int], object] = lambda _place, _done, _of: None

    def find(
        self,
        place: DatasetPlace,
        receipts: Collection[Receipt],
        images: Mapping[str, ShardRemoval] | None = None,
    ) -> FoundSamples:
        """Return the samples of some units that are wanted, or whose images are removed.

        `images` are the image shards that lose samples, by the units of the latents made of them.
        """
        found = FoundSamples()
        are_own = place.has_images or self.wanted.are_own
        any_slice = place.is_selection or place.is_foreign or not are_own

        def look(receipt: Receipt) -> FoundSamples:
            kinds = self.wanted.kinds if place.has_images else frozenset[str]()
            if any_slice or self.wanted.may_be_in(receipt.unit):
                kinds |= self.wanted.texts.keys() & {KEY}
            lost = images.get(receipt.unit) if images else None
            return self._find_in_unit(place, receipt, kinds, lost)

        for done, in_unit in enumerate(map_ahead(look, receipts, place.store.readers)):
            self.heard(place.shown, done, len(receipts))
            found.add(in_unit)
        return found

    def _find_in_unit(
        self,
        place: DatasetPlace,
        receipt: Receipt,
        kinds: Collection[str],
        lost: ShardRemoval | None,
    ) -> FoundSamples:
        """Return the samples and rejects of a unit that are wanted, or that its images lost."""
        found = FoundSamples()
        lost_keys = frozenset(lost.keys if lost else ())
        if lost and image_shard_digest(receipt.input) != lost.digest:
            lost = None
        if not (kinds or lost_keys):
            return found
        shards: dict[Shard, KeysByNumber] = {}
        for shard in receipt.shards:
            with naming_place(f"{place.store.url}/{shard.name}"):
                if numbered := self._find_in_shard(place.store, receipt, shard, kinds, lost_keys):
                    shards[shard] = numbered
        rejects = self._find_rejects(place, receipt, kinds, found, lost_keys, follows=bool(lost))
        gone = {*rejects, *(key for numbered in shards.values() for key in numbered.values())}
        if lost and not gone <= lost_keys:  # some are removed from these latents alone
            lost = None
            rejects = self._find_rejects(place, receipt, kinds, found, lost_keys, follows=False)
        for shard, numbered in shards.items() if lost is None else ():
            with ShardReader(place.store, shard) as reader, naming_place(reader.place):
                self._add_marks(reader, numbered, found, has_images=place.has_images)
        if shards or rejects or lost:
            found.units[receipt.unit] = UnitRemoval(
                unit=receipt.unit,
                shards=tuple(_removal(*both) for both in shards.items()),
                rejects=rejects,
                made_of=lost.digest if lost else "",
                lost_rows=lost.rows if lost else (),
            )
        return found

    def _find_in_shard(
        self,
        store: Store,
        receipt: Receipt,
        shard: Shard,
        kinds: Collection[str],
        lost_keys: Container[str],
    ) -> KeysByNumber:
        """Return the keys of the samples of a shard that are wanted or lost, by their numbers."""
        names = {KEY, *kinds, *(("changes",) if "sha256" in kinds else ())}
        table = read_sound_columns(store, receipt, shard, names)
        keys = table.column(KEY).to_pylist()
        numbers = {number for number, key in enumerate(keys) if key in lost_keys}
        for kind in kinds:
            numbers.update(self.wanted.texts[kind].find(table.column(kind).to_pylist()).tolist())
        numbered = {number: keys[number] for number in numbers}
        if "sha256" in kinds and not _states_all_digests(table):
            numbered |= self._find_stored_images(store, shard)
        return dict(sorted(numbered.items()))

    def _find_stored_images(self, store: Store, shard: Shard) -> KeysByNumber:
        """Return the samples of a shard whose images, as they are stored, have a wanted digest."""
        keys, digests = [], []
        with open_tape(store, shard.name, expected=shard.nbytes) as tape:
            for sample in scan(tape, wants=lambda name, *_: name in IMAGES):
                if isinstance(sample, BadSampleError):
                    raise sample
                keys.append(sample.key)
                digests.append(next(image_digests(sample.fields, {}), ""))
        return {
            number: keys[number] for number in self.wanted.texts["sha256"].find(digests).tolist()
        }

    def _add_marks(
        self, reader: ShardReader, numbered: KeysByNumber, found: FoundSamples, *, has_images: bool
    ) -> None:
        """Add the marks by which `pack` recognises the inputs of some samples to `found`."""
        for key, sample in zip(numbered.values(), reader.samples(numbered), strict=True):
            if sample.key != key:
                raise DamageError(reader.place, "its table or its index leads to others", key)
            facts = _facts(sample.fields)
            if facts["source"]:
                found.marks.add(mark_of("source", facts["source"]))
            if has_images and not self.keeps_copies:
                digests = image_digests(sample.fields, facts)
                found.marks.update(mark_of("sha256", digest) for digest in digests)
                found.marks |= {mark_of("url", facts["url"])} if facts.get("url") else set()

    def _find_rejects(
        self,
        place: DatasetPlace,
        receipt: Receipt,
        kinds: Collection[str],
        found: FoundSamples,
        lost_keys: Container[str],
        *,
        follows: bool,
    ) -> tuple[str, ...]:
        """Return the keys of the rejects of a unit that are wanted, or that its images have lost.

        Their marks are added to `found`. A wanted key that was removed before is not returned, but
        added to the known keys of `found`, unless the unit `follows` images that have lost it.
        """
        rejects: list[Reject] = []
        before: list[Reject] = []
        for reject in rejects_in(place.store, receipt.unit) if receipt.rejects else ():
            is_left = reject.code is not Code.REMOVED or (follows and reject.key in lost_keys)
            (rejects if is_left else before).append(reject)
        going = {number for number, reject in enumerate(rejects) if reject.key in lost_keys}
        for kind in {*kinds} - {"sha256"}:
            wanted = self.wanted.texts[kind]
            going.update(wanted.find([getattr(reject, kind) for reject in rejects]).tolist())
            if kind == KEY:
                keys = [reject.key for reject in before]
                found.known.update(keys[number] for number in wanted.find(keys).tolist())
        for reject in (rejects[number] for number in sorted(going)):
            if place.has_images and reject.source:
                found.marks.add(mark_of("source", reject.source))
            if reject.url and not self.keeps_copies:
                found.marks.add(mark_of("url", reject.url))
        return tuple(rejects[number].key for number in sorted(going))


def _states_all_digests(table: pa.Table) -> bool:
    """Return whether a table has the digests of all stored images, which were kept as they came."""
    is_kept = pc.equal(pc.list_value_length(table.column("changes")), 0).fill_null(False)
    return bool(pc.all(pc.and_(is_kept, table.column("sha256").is_valid())).as_py())


def _removal(shard: Shard, numbered: KeysByNumber) -> ShardRemoval:
    return ShardRemoval(
        name=shard.name,
        samples=shard.samples,
        nbytes=shard.nbytes,
        digest=shard.digest,
        rows=tuple(numbered),
        keys=tuple(numbered.values()),
    )


def image_digests(fields: Fields, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the SHA-256 digests by which an image may be known.

    One is of the bytes that came, if the json states it. The other is of the stored bytes, which
    may be the same.
    """
    if digest := facts.get("sha256"):
        yield str(digest).lower()
    for name in IMAGES:
        if name in fields:
            yield hashlib.sha256(fields[name]).hexdigest()


def _facts(fields: Fields) -> Mapping[str, Any]:
    """Return the json of a sample, with an empty source if it has none, as latents may.

    Raise BadSampleError if it is not an object.
    """
    found = parse_object(fields.get("json", b""))
    if found is None:
        raise BadSampleError("the json of a sample is not an object")
    return {"source": "", **found}


def by_latent_unit(units: Iterable[UnitRemoval]) -> dict[str, ShardRemoval]:
    """Return the image shards that lose samples, by the units of the latents made of them."""
    return {latent_unit(shard.name): shard for unit in units for shard in unit.shards}
