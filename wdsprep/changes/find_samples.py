"""Find the samples that a user lists, in each unit of work of a dataset.

A key begins with its slice, and keys rise in an image shard, so a dozen headers lead to each
sample. In latents all headers of a shard are read: shapes follow each other in it, and the keys of
tars that another program packed follow no rule. URLs, sources and digests are in the json of image
samples alone: for these every image shard is read, without its images if the json has their digest.
"""

import hashlib
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from wdsprep.changes.samples_to_remove import SortedKeys, WantedSamples
from wdsprep.dataset.damage import naming_place
from wdsprep.dataset.file_names import LATENTS, SELECTION, latent_unit
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.receipts import CONTENT, Receipt, Shard, image_shard_digest
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import rejects_in
from wdsprep.dataset.removed_samples import ShardRemoval, UnitRemoval, mark_of
from wdsprep.dataset.samples import parse_object
from wdsprep.dataset.shard_reader import ShardReader
from wdsprep.dataset.tar.members import BadSampleError
from wdsprep.dataset.tar.read import (
    open_tape,
    scan,
)
from wdsprep.dataset.unit_locks import Edition
from wdsprep.images.extensions import IMAGES
from wdsprep.store.base import Store

KeysByNumber = dict[int, str]
"""The keys of samples, by their numbers in a shard."""
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
    hits: set[bytes] = field(default_factory=set)
    """The wanted marks that samples or rejects have."""

    @property
    def samples(self) -> int:
        return sum(unit.samples for unit in self.units.values())

    @property
    def keys(self) -> Iterator[str]:
        for unit in self.units.values():
            yield from (key for shard in unit.shards for key in shard.keys)
            yield from unit.rejects


@dataclass(frozen=True, kw_only=True)
class Finder:
    """A search for the wanted samples.

    With `keeps_copies`, found samples are marked by their sources alone, and not by their URLs and
    digests, so that their copies may be packed.
    """

    wanted: WantedSamples
    keeps_copies: bool = False
    heard: Callable[[str, int, int], object] = lambda _place, _done, _of: None

    def find_in_images(self, place: DatasetPlace, receipts: Collection[Receipt]) -> FoundSamples:
        """Return the wanted samples of some units of images."""
        found = FoundSamples()
        every = SortedKeys(self.wanted.keys) if place.is_selection else None
        for done, receipt in enumerate(receipts):
            self.heard(place.shown, done, len(receipts))
            shards = {}
            keys = every or SortedKeys(self.wanted.keys.of_slice(receipt.unit))
            for shard in receipt.shards if keys or self.wanted.kinds else ():
                with naming_place(f"{place.store.url}/{shard.name}"):
                    if found_here := self._find_in_shard(place, shard, keys, found):
                        shards[shard] = found_here
            rejects = self._find_rejects(place, receipt, keys, found)
            _add_unit(found, receipt.unit, shards, rejects)
        return found

    def _find_in_shard(
        self, place: DatasetPlace, shard: Shard, keys: SortedKeys, found: FoundSamples
    ) -> KeysByNumber:
        """Return the keys of the wanted samples of an image shard, by their numbers.

        The marks by which these samples stay away are added to `found`.
        """
        with ShardReader(place.store, shard) as reader:
            if self.wanted.kinds:
                numbered = self._scan_shard(reader, keys, found)
            else:
                numbered = reader.find_rising(keys.between(*reader.keys([0, shard.samples - 1])))
            for sample in reader.samples(numbered):
                found.marks.update(self._marks(sample.fields))
        return numbered

    def find_in_latents(
        self,
        place: DatasetPlace,
        receipts: Collection[Receipt],
        images: Mapping[str, ShardRemoval],
    ) -> FoundSamples:
        """Return the samples of some units of latents that are wanted or whose images are removed.

        `images` are the image shards that lose samples, by the units of the latents made of them.
        """
        found = FoundSamples()
        any_slice = place.is_foreign or place.is_selection or not self.wanted.keys.are_own
        every = set(self.wanted.keys) if any_slice else set()
        for receipt in receipts:
            lost = images.get(receipt.unit)
            slice_name = receipt.unit.rpartition("/")[2].partition("_")[0]
            keys = every or self.wanted.keys.of_slice(slice_name)
            if lost and not keys.issuperset(lost.keys):  # `every`, perhaps millions, stays as it is
                keys = keys | set(lost.keys)
            if lost and image_shard_digest(receipt.input) != lost.digest:
                lost = None
            shards: dict[Shard, KeysByNumber] = {}
            for shard in receipt.shards if keys else ():
                with ShardReader(place.store, shard) as reader, naming_place(reader.place):
                    if numbered := reader.find(keys):
                        shards[shard] = numbered
            rejects = self._find_rejects(place, receipt, keys, found, lost.keys if lost else ())
            gone = {*rejects, *(key for numbered in shards.values() for key in numbered.values())}
            if lost and not gone.issubset(lost.keys):  # some are removed from these latents alone
                lost = None
                rejects = self._find_rejects(place, receipt, keys, found)
            if lost is None:
                for shard, numbered in shards.items():
                    with ShardReader(place.store, shard) as reader, naming_place(reader.place):
                        found.marks |= _sources(reader, numbered)
            _add_unit(found, receipt.unit, shards, rejects, lost)
        return found

    def _scan_shard(
        self, reader: ShardReader, keys: Container[str], found: FoundSamples
    ) -> KeysByNumber:
        """Read a whole image shard, and return the keys of its wanted samples by number.

        The wanted marks that they have are added to the hits of `found`. Raise BadSampleError if a
        sample is damaged.
        """
        numbered: KeysByNumber = {}
        shard = reader.shard
        with open_tape(reader.store, shard.name, expected=shard.nbytes) as tape:
            for number, sample in enumerate(scan(tape, wants=self._wants)):
                if isinstance(sample, BadSampleError):
                    raise sample
                hits = set(self._hits(sample.fields))
                if hits or sample.key in keys:
                    numbered[number] = sample.key
                    found.hits |= hits
        return numbered

    def _wants(self, name: str, _nbytes: int, _before: Fields) -> bool:
        """Return whether to read a member: json, and images if digests are wanted."""
        return name == "json" or ("sha256" in self.wanted.kinds and name in IMAGES)

    def _hits(self, fields: Fields) -> Iterator[bytes]:
        """Yield the wanted marks that a sample has."""
        facts = _facts(fields)
        yield from self._wanted_marks(facts["source"], facts.get("url", ""))
        for digest in image_digests(fields, facts) if "sha256" in self.wanted.kinds else ():
            yield from self.wanted.marks_of("sha256", digest)

    def _wanted_marks(self, source: str, url: str) -> Iterator[bytes]:
        yield from self.wanted.marks_of("source", source)
        yield from self.wanted.marks_of("url", url)

    def _marks(self, fields: Fields) -> Iterator[bytes]:
        """Yield the marks by which `pack` recognises an input as this sample."""
        facts = _facts(fields)
        yield mark_of("source", facts["source"])
        if not self.keeps_copies:
            yield from (mark_of("sha256", digest) for digest in image_digests(fields, facts))
            if url := facts.get("url"):
                yield mark_of("url", url)

    def _find_rejects(
        self,
        place: DatasetPlace,
        receipt: Receipt,
        keys: SortedKeys | set[str],
        found: FoundSamples,
        lost: Collection[str] = (),
    ) -> tuple[str, ...]:
        """Return the keys of the wanted rejects of a unit.

        Their marks are added to `found`. A wanted key that was removed before is not returned, but
        added to the known keys of `found`, unless the images have `lost` it.
        """
        marks = place.has_images and self.wanted.kinds
        if not receipt.rejects or not (keys or marks):
            return ()
        going = []
        for reject in rejects_in(place.store, receipt.unit):
            if reject.code is Code.REMOVED and reject.key not in lost:
                found.known |= {reject.key} if reject.key in keys else set()
                continue
            hits = set(self._wanted_marks(reject.source, reject.url)) if marks else set()
            if hits or reject.key in keys:
                found.hits |= hits
                going.append(reject.key)
                if place.has_images and reject.source:
                    found.marks.add(mark_of("source", reject.source))
                if reject.url and not self.keeps_copies:
                    found.marks.add(mark_of("url", reject.url))
        return tuple(going)


def _add_unit(
    found: FoundSamples,
    unit: str,
    shards: Mapping[Shard, KeysByNumber],
    rejects: tuple[str, ...],
    images: ShardRemoval | None = None,
) -> None:
    """Add to `found` what a unit of work loses: samples of its shards, and rejects.

    `images` is the image shard that latents were made of, if that loses samples too.
    """
    if not (shards or rejects or images):
        return
    going = (
        ShardRemoval(
            name=shard.name,
            samples=shard.samples,
            nbytes=shard.nbytes,
            digest=shard.digest,
            rows=tuple(sorted(numbered)),
            keys=tuple(numbered[row] for row in sorted(numbered)),
        )
        for shard, numbered in shards.items()
    )
    found.units[unit] = UnitRemoval(
        unit=unit,
        shards=tuple(going),
        rejects=rejects,
        made_of=images.digest if images else "",
        lost_rows=images.rows if images else (),
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


def _sources(reader: ShardReader, numbers: Collection[int]) -> set[bytes]:
    """Return the marks of the sources of some samples."""
    every = (_facts(sample.fields)["source"] for sample in reader.samples(numbers))
    return {mark_of("source", source) for source in every if source}


def by_latent_unit(units: Iterable[UnitRemoval]) -> dict[str, ShardRemoval]:
    """Return the image shards that lose samples, by the units of the latents made of them."""
    return {latent_unit(shard.name): shard for unit in units for shard in unit.shards}
