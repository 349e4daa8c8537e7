"""`remove`: remove samples from images and from everything made of them, so that they stay away.

1. *Find*. The tables beside the shards have keys, sources, URLs and digests. A sample that is found
   in an image shard is removed from the latents made of that shard, too. Nothing is written; the
   user is told, and asked.
2. *Mark*. Each dataset gets the file `removed`: marks of inputs that must stay away, and which
   samples of which shard are removed, with the size and digest that the shard has now. From then on
   `verify` says that a removal is under way, `pack` and `encode` refuse to begin, and a run that is
   under way makes again what it had not finished, without these samples (`Draft`). The removal
   waits for every unit that is held, and searches what was finished meanwhile like the rest.
3. *Change*. Each unit is changed while it is held: images first, then latents, whose receipts get
   the new digests of their image shards (`rewrite_units`). Nothing else is read or written.
4. *Publish*. Captions of a table that wait for `encode` are deleted, since they may be those of the
   samples: an encode that goes on reads the table again. The hashes that `duplicates` keeps of
   these shards are deleted too. The manifest is written, and of the file `removed` only the marks
   stay.

So a kill before step 2 has changed nothing, and after it the dataset itself knows what is left to
do: the same command does that first, or `wdsprep remove DATASET` alone. Latents are marked before
their images: if images are not marked, nothing was begun, and the next removal replaces the marks
of the latents, or drops them.

A removed sample is recognised by its source, its URL, or the SHA-256 of its image (with
`keep_copies`, for duplicates, by its source alone), and becomes a reject `removed`: in a `pack`, an
append, a retry, after a repair, and also after --overwrite, since people who asked to be left out
have not changed their minds over an option; deleting the file `removed` forgets all. What became
of each image shard is kept there too, so that latents that were not given can follow their images
later (`forgotten_latents`).

Latents get their samples from the images. So a sample that was removed from latents alone is a
reject `removed` there, and comes back only if an encode makes that shard again while the images
have the sample.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from wdsprep.changes.find_samples import (
    DatasetPlace,
    Finder,
    FoundSamples,
    WantedSamples,
    by_latent_unit,
)
from wdsprep.changes.forgotten_latents import (
    NO_NEIGHBOURS,
    Neighbours,
    find_lost,
    find_neighbours,
)
from wdsprep.changes.image_hashes import delete_hashes
from wdsprep.changes.options import RemoveOptions
from wdsprep.changes.rewrite_units import UnitChange
from wdsprep.dataset.damage import naming_repair
from wdsprep.dataset.file_names import (
    CAPTIONS,
    MANIFEST_HOLD,
    captions_name,
    latent_unit,
    maker_of,
)
from wdsprep.dataset.kept_file import delete_texts
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.receipts import Receipt, image_shard_digest
from wdsprep.dataset.removed_samples import (
    Marks,
    Removed,
    ShardRemoval,
    ShardSuccessor,
    UnitRemoval,
    forget_removal,
    removed_from,
    write_removed,
)
from wdsprep.dataset.stored_dataset import (
    dated_manifest,
    open_dataset,
    refresh_manifest,
    write_manifest,
)
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.dataset.unit_locks import Edition, wait_for_holders
from wdsprep.errors import BusyError, FingerprintError, NotFoundError, UsageError
from wdsprep.options import Place, takes_datasets
from wdsprep.runners.job import JobListener
from wdsprep.store import open_store
from wdsprep.store.base import absolute
from wdsprep.text import NotebookTable, command, plural

UNITS_AT_ONCE = 4
"""The number of units that are changed at a time: one waits for the disk while another hashes."""


@takes_datasets(RemoveOptions)
def remove(datasets: Sequence[Place], options: RemoveOptions) -> "Removal":
    """Remove samples from datasets, so that no `pack` or `encode` brings them back.

        removal = wdsprep.remove("shards/images", "shards/latents-256", keys="000000000012")
        removal = wdsprep.remove("shards/images", urls="gone.txt", yes=True)  # does it

    Without `yes`, only count what would be removed. A removal that was begun earlier and killed is
    finished first in any case. The options are those of `wdsprep remove`; lists may also be lists
    of Python.
    """
    if not datasets:
        raise UsageError("nothing to remove from: give the path or URL of a dataset")
    for place in datasets:
        _check_dataset_name(os.fspath(place))
    listener = options.heard_by
    urls_of = [absolute(url) for url in datasets]
    if len(set(urls_of)) < len(urls_of):
        raise UsageError("the same dataset is given twice: give each once")
    shown = [os.fspath(url).rstrip("/") or "/" for url in datasets]
    neighbours = find_neighbours(urls_of)
    if options.all:
        urls_of += neighbours.made_of_them
        shown += neighbours.made_of_them
    wanted = WantedSamples.of(
        keys=options.keys, urls=options.urls, sha256=options.sha256, sources=options.sources
    )
    ended, only_marked = _finish_begun(urls_of, listener)
    places = [_open(*both) for both in zip(urls_of, shown, strict=True)]
    finder = Finder(wanted=wanted, keeps_copies=options.keep_copies, heard=listener.listed)
    job = _RemovalJob(places, finder, neighbours, only_marked)
    job.find()
    removal = job.removal(ended=ended)
    if not (wanted or ended or removal.is_needed):
        raise UsageError("nothing to remove: give --keys, --urls, --sha256 or --sources")
    if not removal.is_needed:
        job.settle()
        return removal
    listener.begun(removal)
    if not (options.yes or listener.asked(removal)):
        job.drop_marks()
        return removal
    job.mark()
    job.catch_up()
    job.change(listener.changed)
    return replace(job.removal(ended=ended), done=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class RemovalPlace:
    """The removal from one dataset: how many samples, rejects and shards it concerns."""

    shown: str
    dataset: str
    samples: int
    rejects: int
    shards: int
    shards_of: int
    nbytes: int
    is_listed: bool
    """True if its list of what must stay away becomes longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal(NotebookTable):
    """A removal from some datasets.

    `nowhere` counts keys that are in no dataset, of which `examples` has some; `known` counts keys
    that were removed before. `ended` are the datasets in which an earlier removal was finished.
    """

    places: tuple[RemovalPlace, ...]
    nowhere: int = 0
    examples: tuple[str, ...] = ()
    known: int = 0
    unmatched: int = 0
    """The number of URLs, digests and sources that no image has."""
    ended: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    """The datasets beside these that were made of the images, and were not given."""
    done: bool = False

    def table_rows(self) -> Iterator[tuple[str, object]]:
        yield from ((p.shown, plural(p.samples, "sample")) for p in self.places)
        yield from NotebookTable.table_rows(self)

    def __repr__(self) -> str:
        counts = ", ".join(f"{p.shown!r}: {plural(p.samples, 'sample')}" for p in self.places)
        state = "done" if self.done else "to be done" if self.is_needed else "nothing to do"
        return f"<Removal {counts}: {state}>"

    @property
    def is_needed(self) -> bool:
        return any(p.samples or p.rejects or p.is_listed or p.shards for p in self.places)

    @property
    def is_unknown(self) -> bool:
        """Return whether the keys are in none of the datasets, and nothing else is to be done.

        That is not for lists of URLs: most of them may be unknown here, since they are of other
        crawls.
        """
        return bool(self.nowhere) and not (self.is_needed or self.known or self.ended)

    @property
    def is_whole(self) -> bool:
        return self.done or not self.is_needed


def _check_dataset_name(place: str) -> None:
    """Raise NotFoundError for a key, or a file with keys, where a dataset is expected."""
    is_key = re.fullmatch(r"\d+(,\d+)*", place) and not Path(place).exists()
    if is_key or Path(place).is_file():
        what = "a key" if is_key else "a file"
        raise NotFoundError(
            f"{place} is {what}, where a dataset is expected: give samples with an option, as "
            f"--keys {place}"
        )


def _open(url: str, shown: str) -> DatasetPlace:
    store = open_store(url)
    edition = Edition.from_store(store)
    open_dataset(url)  # raises an error if it is no dataset
    manifest = dated_manifest(store)
    if manifest is None:
        raise NotFoundError(f"{shown} has lost its manifest just now: run the same command again")
    return DatasetPlace(
        shown=shown, url=url, edition=edition, manifest=refresh_manifest(store, manifest)
    )


def _finish_begun(
    urls: Sequence[str], listener: JobListener
) -> tuple[tuple[str, ...], frozenset[str]]:
    """Finish removals that were begun in these datasets and killed; return those datasets.

    The images that latents among them were made of are included, even if they were not given. The
    latents that are returned second were marked alone: nothing was removed there, and their marks
    are left for the removal that follows to replace or to drop.
    """
    begun = {url: found for url in urls if (found := removed_from(open_store(url))).units}
    if not begun:
        return (), frozenset()
    for url, removed in tuple(begun.items()):
        if removed.images and removed.images not in urls:
            if images := _moved_images(removed, urls):
                begun[url] = replace(removed, images=images)
            else:
                begun |= _find_begun(removed.images)
    for removed in tuple(begun.values()):
        if removed.images in urls and removed.images not in begun:
            begun[removed.images] = removed_from(open_store(removed.images))
    listener.told(f"finishing a removal that was begun in {', '.join(sorted(begun))}")
    job = _RemovalJob([_open(url, url) for url in begun])
    only_marked = job.resume(begun)
    job.change(listener.changed)
    return tuple(begun), only_marked


def _moved_images(latents: Removed, urls: Sequence[str]) -> str:
    """Return the one of `urls` to which the images of latents have moved, or "" if there is none.

    It is the first with a shard that latents were made of, by the digest that the shard has, or
    had before it lost samples.
    """
    wanted = {unit.made_of for unit in latents.units}
    for url in urls:
        store, manifest = open_dataset(url)
        if manifest.dataset != "images":
            continue
        removed = removed_from(store)
        before = {one.digest for unit in removed.units for one in unit.shards}
        if not wanted.isdisjoint(before | removed.successors.keys() | manifest.image_digests()):
            return url
    return ""


def _find_begun(url: str) -> dict[str, Removed]:
    """Return what a removal from a dataset has left to do, by the URL of the dataset.

    Return nothing if the dataset is gone.
    """
    with suppress(NotFoundError, UsageError):
        open_dataset(url)
        return {url: removed_from(open_store(url))}
    return {}


class _RemovalJob:
    """The work of one removal, in some datasets."""

    def __init__(
        self,
        places: Sequence[DatasetPlace],
        finder: Finder | None = None,
        neighbours: Neighbours = NO_NEIGHBOURS,
        only_marked: frozenset[str] = frozenset(),
    ) -> None:
        """Take the datasets; `only_marked` are latents where a killed removal changed nothing."""
        self._images = [place for place in places if place.has_images]
        self._latents = [place for place in places if not place.has_images]
        self._places = {place.url: place for place in (*self._latents, *self._images)}
        self._finder, self._neighbours, self._only_marked = finder, neighbours, only_marked
        self._found = {url: FoundSamples() for url in self._places}
        self._made_of: dict[str, str] = {}  # by latents, their images
        self._removed = {url: removed_from(place.store) for url, place in self._places.items()}
        if finder and finder.wanted.kinds and not self._images:
            kinds = " and ".join(sorted(finder.wanted.kinds))
            raise UsageError(
                f"latents do not state the {kinds} of their samples: give the images that they "
                "were made of too, or --keys"
            )

    # --- find
    def find(self) -> None:
        """Find the samples to remove, in images first."""
        for place in self._images:
            self._search(place, list(place.receipts.values()))
        for place in self._latents:
            self._made_of[place.url] = self._images_of(place)
            self._search(place, list(place.receipts.values()))

    def _search(self, place: DatasetPlace, receipts: Sequence[Receipt]) -> None:
        """Search some units of a dataset, and keep what is found there.

        Samples and rejects that were found in these units before are replaced, and marks are kept.
        Do nothing if the job has no finder.
        """
        finder, known = self._finder, self._found[place.url]
        if finder is None:
            return
        for receipt in receipts:
            known.units.pop(receipt.unit, None)
        with naming_repair(place.store):
            lost = {} if place.has_images else self._lost_by(place, receipts)
            self._check_current(place, receipts, lost)
            known.add(finder.find(place, receipts, lost))

    def _lost_by(
        self, latents: DatasetPlace, receipts: Sequence[Receipt]
    ) -> dict[str, ShardRemoval]:
        """Return what the image shards of units of latents lose, and what they lost before.

        They lost it before if these latents were forgotten when samples were removed from images.
        """
        images = self._made_of[latents.url]
        if not images:
            return {}
        now = self._found.get(images, FoundSamples()).units.values()
        return find_lost(removed_from(open_store(images)), images, receipts, by_latent_unit(now))

    def _images_of(self, latents: DatasetPlace) -> str:
        """Return the URL of the images that latents were made of, or "" if nobody knows them.

        It is the one of whose shards, as they are or were, the latents state the most as their
        inputs: one that is given, or else one beside the latents from which samples were removed.
        """
        inputs = latents.manifest.image_digests()
        known = {place.url: place.manifest.image_digests() for place in self._images}
        for url in known:
            known[url] |= self._removed[url].successors.keys()
        shared = {url: len(inputs & digests) for url, digests in known.items()}
        if not any(shared.values()):
            shared = {
                url: len(inputs & successors.keys())
                for url, successors in self._neighbours.successors.items()
            }
        best = max(shared, key=lambda url: shared[url], default="")
        return best if best and shared[best] else ""

    def _check_current(
        self, place: DatasetPlace, receipts: Sequence[Receipt], lost: Mapping[str, ShardRemoval]
    ) -> None:
        """Raise FingerprintError if latents were made of another version of a shard in `lost`.

        Do nothing unless samples are wanted by URL, digest or source, which images alone state.
        """
        if not (self._finder and self._finder.wanted.kinds):
            return
        for receipt in receipts:
            shard = lost.get(receipt.unit)
            if shard and image_shard_digest(receipt.input) != shard.digest:
                maker = maker_of(place.manifest.dataset, place.manifest.settings)
                raise FingerprintError(
                    f"{place.shown} was made of another {shard.name} than there is now: run the "
                    f'same "{maker}" with --redo-changed, then the same command again'
                )

    # --- the result
    def removal(self, *, ended: tuple[str, ...] = ()) -> Removal:
        """Return what was found, for the user.

        `ended` are the datasets in which an earlier removal was finished.
        """
        wanted = self._finder.wanted if self._finder else None
        known = {key for found in self._found.values() for key in found.known}
        there = {key for found in self._found.values() for key in found.keys}
        nowhere, examples = wanted.unseen_keys() if wanted else (0, ())
        return Removal(
            places=tuple(map(self._place, (*self._images, *self._latents))),
            nowhere=nowhere,
            examples=examples,
            known=len(known - there),
            unmatched=wanted.unmatched if wanted else 0,
            ended=ended,
            beside=tuple(url for url in self._neighbours.made_of_them if url not in self._places),
        )

    def _place(self, place: DatasetPlace) -> RemovalPlace:
        found = self._found[place.url]
        shards = [shard for unit in found.units.values() for shard in unit.shards]
        return RemovalPlace(
            shown=place.shown,
            dataset=place.manifest.dataset,
            samples=found.samples,
            rejects=sum(len(unit.rejects) for unit in found.units.values()),
            shards=len(shards) or len(found.units),
            shards_of=len(place.manifest.shards),
            nbytes=sum(shard.nbytes for shard in shards),
            is_listed=any(
                mark not in self._removed[place.url].marks for mark in self._marks(place)
            ),
        )

    def _marks(self, place: DatasetPlace) -> Iterator[bytes]:
        yield from self._found[place.url].marks
        if self._finder and place.has_images:
            yield from self._finder.wanted.marks

    # --- mark
    def mark(self) -> None:
        """Write the file `removed` of each dataset, and wait for the units that are held.

        Raise BusyError if another removal has begun there.
        """
        for place in self._places.values():  # latents first
            self._mark(place)
        for place in self._places.values():
            wait_for_holders(place.store)

    def _mark(self, place: DatasetPlace, *, is_more: bool = False) -> None:
        found = self._found[place.url]
        with place.edition.holding_manifest():
            there = removed_from(place.store)
            if there.units and not (is_more or place.url in self._only_marked):
                raise BusyError(
                    f"another removal from {place.shown} has begun: wait for it to end, or, "
                    f"if it was killed, run {command('remove', place.url)}, then the same command "
                    "again"
                )
            new = replace(
                there,
                marks=there.marks | Marks.sort(self._marks(place)),
                units=tuple(found.units.values()),
                images=self._made_of.get(place.url, ""),
            )
            if new != there:
                self._removed[place.url] = write_removed(place.store, new)

    def catch_up(self) -> None:
        """Search the units that other runs have finished since `find`, and mark what is found."""
        for place in (*self._images, *self._latents):
            manifest = refresh_manifest(place.store, place.manifest)
            before = dict(place.manifest.ledger.named_lines())
            lines = manifest.ledger.named_lines()
            other = [unit for unit, line in lines if before.get(unit) != line]
            self._places[place.url] = now = replace(place, manifest=manifest)
            if other:
                self._search(now, [now.receipts[unit] for unit in other])
                self._mark(now, is_more=True)

    # --- change
    def resume(self, begun: Mapping[str, Removed]) -> frozenset[str]:
        """Take over what a removal of an earlier run has left to do, for `change`.

        If images were never marked, nothing was removed from their latents either: these latents
        are returned, and nothing is done there, but for what their images had lost before.
        """
        only_marked = set()
        for url, removed in begun.items():
            self._made_of[url] = removed.images
            units = {unit.unit: unit for unit in removed.units}
            if removed.images in self._places and not self._removed[removed.images].units:
                now = self._places[removed.images].manifest.image_digests()
                before = self._removed[removed.images]
                if any(
                    unit.made_of in now
                    or ((lost := before.follow(unit.made_of)) and lost.rows != unit.lost_rows)
                    for unit in units.values()
                ):
                    only_marked.add(url)
                    continue
            self._found[url].units = units
        self._latents = [place for place in self._latents if place.url not in only_marked]
        return frozenset(only_marked)

    def change(self, heard: Callable[[int, int], object]) -> None:
        """Rewrite the units, images first and then latents, and finish each dataset.

        Columns of texts that were joined to samples are deleted on this machine. `heard` gets the
        number of units done, and of all units.
        """
        count = sum(len(found.units) for found in self._found.values())
        done = 0
        gone: dict[str, set[str]] = {url: set() for url in self._places}
        digests: dict[str, dict[str, str]] = {url: {} for url in self._places}
        for url in (*(p.url for p in self._images), *(p.url for p in self._latents)):
            place = self._places[url]
            units = list(self._found[url].units.values())
            images = self._successors_of(url, units)
            images |= digests.get(self._made_of.get(url, ""), {})

            def rewrite(
                unit: UnitRemoval, place: DatasetPlace = place, images: Mapping[str, str] = images
            ) -> Receipt | None:
                removed = self._removed[place.url]
                change = UnitChange(place.edition, unit, removed, images.get(unit.unit))
                with naming_repair(place.store):
                    return change.rewrite()

            for unit, receipt in zip(units, map_ahead(rewrite, units, UNITS_AT_ONCE), strict=True):
                done += 1
                heard(done, count)
                if receipt is None and unit.made_of:
                    gone[url].add(unit.unit)
                elif receipt is not None and place.has_images:
                    digests[url] |= _digests_after(unit, receipt)
        for place in (*self._latents, *self._images):
            self._finish_dataset(place, gone[place.url], digests[place.url])
        delete_texts()

    def _successors_of(self, latents: str, units: Sequence[UnitRemoval]) -> dict[str, str]:
        """Return by unit the digests of image shards that lost samples in an earlier removal."""
        if not (images := self._made_of.get(latents, "")):
            return {}
        before = removed_from(open_store(images))
        each = ((unit.unit, before.follow(unit.made_of)) for unit in units)
        return {unit: successor.digest for unit, successor in each if successor}

    def settle(self) -> None:
        """Clear the locks on manifests and the marks that a removal leaves if it is killed."""
        for place in self._places.values():
            place.store.let_go(MANIFEST_HOLD)
        self.drop_marks()

    def drop_marks(self) -> None:
        """Drop the marks of latents in which an earlier removal has changed nothing."""
        for url in self._only_marked:
            with self._places[url].edition.holding_manifest():
                forget_removal(self._places[url].store)

    def _finish_dataset(
        self, place: DatasetPlace, gone: set[str], digests: Mapping[str, str]
    ) -> None:
        """Write the manifest without the units in `gone`, and leave only marks in `removed`.

        Of images, what became of their shards is noted there too: `digests` has the new digests by
        the units of latents. First delete captions of a table that wait for encode, and the hashes
        of changed shards. Do nothing else if no unit of the dataset was to be changed.
        """
        if place.manifest.settings.get("captions"):
            taken = {captions_name(unit) for unit in place.manifest.ledger.units()}
            for entry in place.store.list(CAPTIONS):
                if entry.name not in taken:
                    place.store.delete(entry.name)
        if not self._found[place.url].units and not self._removed[place.url].units:
            return
        if place.has_images:
            units = self._found[place.url].units.values()
            delete_hashes(place.url, [shard for unit in units for shard in unit.shards])
        place.store.sweep()  # while the marks say that something is left to do
        with place.edition.holding_manifest():
            there = dated_manifest(place.store) or place.manifest
            write_manifest(place.store, _without_units(there, gone, place))
            now = removed_from(place.store)
            new = {
                shard.digest: ShardSuccessor(digest=digests[unit], rows=shard.rows)
                for unit, shard in by_latent_unit(now.units).items()
                if unit in digests
            }
            successors = {**now.successors, **new} if place.has_images else now.successors
            done = replace(now, units=(), images="", successors=successors)
            write_removed(place.store, done)


def _digests_after(removal: UnitRemoval, receipt: Receipt) -> dict[str, str]:
    """Return the digests of the changed shards of an image unit, by the latent units made of them.

    The digest of a shard that is gone is "".
    """
    digests = {shard.name: shard.digest for shard in receipt.shards}
    return {latent_unit(shard.name): digests.get(shard.name, "") for shard in removal.shards}


def _without_units(there: Manifest, gone: set[str], place: DatasetPlace) -> Manifest:
    """Return a manifest with the present receipts, without the units in `gone`.

    Units that were deleted together with their image shard are not left to do.
    """
    kept = [line for unit, line in there.ledger.named_lines() if unit not in gone]
    return refresh_manifest(place.store, replace(there, receipts=there.ledger.with_lines(kept)))
