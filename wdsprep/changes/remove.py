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
later (`find_lost`).

Latents get their samples from the images. So a sample that was removed from latents alone is a
reject `removed` there, and comes back only if an encode makes that shard again while the images
have the sample.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from wdsprep.changes.find_samples import (
    FoundInUnit,
    SampleFinder,
    by_latent_unit,
    find_lost,
    find_neighbours,
)
from wdsprep.changes.image_hashes import delete_hashes
from wdsprep.changes.options import RemoveOptions
from wdsprep.changes.rewrite_units import UnitChange
from wdsprep.dataset.damage import naming_repair
from wdsprep.dataset.file_names import (
    CAPTIONS,
    LATENTS,
    MANIFEST_HOLD,
    SELECTION,
    captions_name,
    latent_shard,
    latent_unit,
    maker_of,
)
from wdsprep.dataset.kept_file import delete_texts
from wdsprep.dataset.manifest import CONTENT, Receipt, image_shard_digest
from wdsprep.dataset.removed_samples import (
    Marks,
    ShardRemoval,
    ShardSuccessor,
    UnitRemoval,
    forget_removal,
    removed_from,
    write_removed,
)
from wdsprep.dataset.sample_table import KEY
from wdsprep.dataset.stored_dataset import (
    dated_manifest,
    open_current_dataset,
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
from wdsprep.store.base import absolute_places
from wdsprep.text import command, plural

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
    shown = [os.fspath(url).rstrip("/") or "/" for url in datasets]
    for place in shown:
        if Path(place).is_file() or (
            place.replace(",", "").isdecimal() and not Path(place).exists()
        ):
            raise NotFoundError(
                f"{place} is no dataset: give samples with an option, as --keys {place}"
            )
    listener = options.listener_or_mute
    urls_of = absolute_places(datasets)
    made_of_them, successors = find_neighbours(urls_of)
    if options.all:
        urls_of += made_of_them
        shown += made_of_them
    finder = SampleFinder(options)
    ended, only_marked = _finish_begun(urls_of, listener)
    opened = [
        _Dataset(url, place, is_only_marked=url in only_marked)
        for url, place in zip(urls_of, shown, strict=True)
    ]
    if finder.kinds and not any(dataset.has_images for dataset in opened):
        kinds = " and ".join(sorted(finder.kinds))
        raise UsageError(
            f"latents do not state the {kinds} of their samples: give the images that they were "
            "made of too, or --keys"
        )
    job = _RemovalJob(opened, listener, finder, successors)
    job.find()

    removal = job.removal(ended, made_of_them)
    if not (finder.texts or ended or removal.is_needed):
        raise UsageError("nothing to remove: give --keys, --urls, --sha256 or --sources")
    if not removal.is_needed:
        for dataset in opened:  # a removal that was killed leaves locks
            dataset.store.let_go(MANIFEST_HOLD)
        job.drop_marks()
        return removal
    listener.on_begin(removal)
    if not (options.yes or listener.confirm(removal)):
        job.drop_marks()
        return removal
    job.mark()
    job.catch_up()
    _change(opened, listener)
    return replace(job.removal(ended, made_of_them), done=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class RemovalPlace:
    """The removal from one dataset: how many samples, rejects and shards it concerns."""

    shown: str
    dataset: str
    samples: int
    rejects: int
    shards: int
    nbytes: int
    is_listed: bool
    """True if its list of what must stay away becomes longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """A removal from some datasets.

    `nowhere` counts keys that are in no dataset, of which `examples` has some. `ended` are the
    datasets in which an earlier removal was finished.
    """

    places: tuple[RemovalPlace, ...]
    nowhere: int = 0
    examples: tuple[str, ...] = ()
    unmatched: int = 0
    """The number of URLs, digests and sources that no image has."""
    ended: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    """The datasets beside these that were made of shards that lose samples, and were not given."""
    done: bool = False

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
        return bool(self.nowhere) and not (self.is_needed or self.ended)

    @property
    def is_whole(self) -> bool:
        return self.done or not self.is_needed


class _Dataset:
    """A dataset that a removal changes: what was found in it, and what it says of removals."""

    def __init__(self, url: str, shown: str, *, is_only_marked: bool = False) -> None:
        self.url, self.shown, self.store = url, shown, open_store(url)
        self.edition = Edition.from_store(self.store)
        _, self.manifest = open_current_dataset(url, shown)
        self.has_images = self.manifest.dataset == "images"
        self.removed = removed_from(self.store)
        self.units = dict[str, UnitRemoval]()
        """What its units lose, by their names."""
        self.images = ""
        """The URL of the images that latents were made of, or "" if nobody knows them."""
        self.is_only_marked = is_only_marked
        """True for latents that a killed removal has marked, but not changed."""
        self.gone = set[str]()
        """Units of which nothing is left, as their image shard has lost all samples."""
        self.digests = dict[str, str]()
        """The new digests of image shards, or "" for those that are gone, by units of latents."""
        self.found_marks = set[bytes]()
        """The marks of what was found in its units."""

    def has_other_keys(self) -> bool:
        """Return whether keys may not begin with their slice.

        That is so in what `select` made, and in latents of tars that another program packed.
        """
        manifest, ledger = self.manifest, self.manifest.ledger
        if manifest.settings.get("source") == SELECTION or SELECTION in manifest.extra:
            return True
        return not self.has_images and any(
            CONTENT in files or not LATENTS.fullmatch(latent_shard(unit))
            for unit, files in zip(ledger.units(), ledger.column("files"), strict=True)
        )

    def marks(self, finder: SampleFinder) -> Iterator[bytes]:
        """Yield the marks of inputs that must stay away."""
        yield from self.found_marks
        if self.has_images:
            yield from finder.marks

    def result(self, finder: SampleFinder) -> RemovalPlace:
        """Return what was found, for the user."""
        shards = [shard for unit in self.units.values() for shard in unit.shards]
        return RemovalPlace(
            shown=self.shown,
            dataset=self.manifest.dataset,
            samples=sum(unit.samples for unit in self.units.values()),
            rejects=sum(len(unit.rejects) for unit in self.units.values()),
            shards=len(shards) or len(self.units),
            nbytes=sum(shard.nbytes for shard in shards),
            is_listed=any(mark not in self.removed.marks for mark in self.marks(finder)),
        )

    def mark(self, finder: SampleFinder, *, is_more: bool = False) -> None:
        """Write the file `removed`: what this removal takes out.

        Raise BusyError if another removal has begun. The file of an earlier one is replaced in two
        cases: this removal has found more (`is_more`), or that one was killed when it had marked
        this dataset, which is one of latents, and had changed nothing in it.
        """
        with self.edition.holding_manifest():
            stored = removed_from(self.store)
            if stored.units and not (is_more or self.is_only_marked):
                shown = self.shown
                raise BusyError(
                    f"another removal from {shown} has begun: wait for it to end, or, if it was "
                    f"killed, run {command('remove', shown)}, then the same command again"
                )
            new = replace(
                stored,
                marks=stored.marks | Marks.sort(self.marks(finder)),
                units=tuple(self.units.values()),
                images=self.images,
            )
            if new != stored:
                self.removed = write_removed(self.store, new)

    def rewrite(self, images: Mapping[str, str], unit: UnitRemoval) -> Receipt | None:
        """Change a unit, and return its receipt, or None if nothing is left of it.

        `images` has the new digests of image shards by units of latents.
        """
        edition, image = self.edition, images.get(unit.unit)
        with naming_repair(self.store):
            receipt = UnitChange(edition, unit, self.removed, image).rewrite()
        if receipt is None and unit.made_of:
            self.gone.add(unit.unit)
        elif receipt is not None and self.has_images:
            digests = {shard.name: shard.digest for shard in receipt.shards}
            after = ((latent_unit(old.name), digests.get(old.name, "")) for old in unit.shards)
            self.digests.update(after)
        return receipt

    def finish(self) -> None:
        """Write the manifest without the units that are gone, and leave only marks in `removed`.

        Of images, what became of their shards is noted there too. First delete captions of a table
        that wait for encode, and the hashes of changed shards. Do nothing else if no unit of the
        dataset was to be changed.
        """
        store, ledger = self.store, self.manifest.ledger
        if self.manifest.settings.get("captions"):
            taken = {captions_name(unit) for unit in ledger.units()}
            for entry in store.list(CAPTIONS):
                if entry.name not in taken:
                    store.delete(entry.name)
        units = self.units.values()
        if not units and not self.removed.units:
            return
        if self.has_images:
            delete_hashes(self.url, [shard for unit in units for shard in unit.shards])
        store.sweep()  # while the marks say that something is left to do
        with self.edition.holding_manifest():
            stored = dated_manifest(store) or self.manifest
            # Units that were deleted together with their image shard are not left to do.
            left = [line for unit, line in stored.ledger.named_lines() if unit not in self.gone]
            kept = replace(stored, receipts=stored.ledger.with_lines(left))
            write_manifest(store, refresh_manifest(store, kept))
            now = removed_from(store)
            new = {
                shard.digest: ShardSuccessor(digest=self.digests[unit], rows=shard.rows)
                for unit, shard in by_latent_unit(now.units).items()
                if unit in self.digests
            }
            successors = {**now.successors, **new} if self.has_images else now.successors
            write_removed(store, replace(now, units=(), images="", successors=successors))


def _finish_begun(
    urls: Sequence[str], listener: JobListener
) -> tuple[tuple[str, ...], frozenset[str]]:
    """Finish removals that were begun in these datasets and killed; return those datasets.

    The images that latents among them were made of are included, even if they were not given. The
    latents that are returned second were marked alone: nothing was removed there, as their images
    were never marked, and their marks are left for the removal that follows to replace or to drop.
    But what their images had lost before is removed from them.
    """
    begun = {url: removed for url in urls if (removed := removed_from(open_store(url))).units}
    if not begun:
        return (), frozenset()
    for removed in tuple(begun.values()):
        if removed.images and removed.images not in begun:
            with suppress(NotFoundError, UsageError):  # they are gone
                open_dataset(removed.images)
                begun[removed.images] = removed_from(open_store(removed.images))
    listener.on_message(f"finishing a removal that was begun in {', '.join(sorted(begun))}")
    datasets = {url: _Dataset(url, url) for url in begun}
    only_marked = set[str]()
    for url, removed in begun.items():
        dataset, images = datasets[url], datasets.get(removed.images)
        dataset.images = removed.images
        dataset.units = {unit.unit: unit for unit in removed.units}
        if images and not images.removed.units:
            now, follow = images.manifest.image_digests(), images.removed.follow
            if any(
                unit.made_of in now
                or ((lost := follow(unit.made_of)) and lost.rows != unit.lost_rows)
                for unit in removed.units
            ):
                only_marked.add(url)
    _change([dataset for url, dataset in datasets.items() if url not in only_marked], listener)
    return tuple(begun), frozenset(only_marked)


def _change(datasets: Sequence[_Dataset], listener: JobListener) -> None:
    """Rewrite the units, images first and then latents, and finish each dataset.

    Columns of texts that were joined to samples are deleted on this machine.
    """
    ordered = _images_first(datasets)
    changed = {dataset.url: dataset for dataset in datasets}
    done, count = 0, sum(len(dataset.units) for dataset in datasets)
    for dataset in ordered:
        units = list(dataset.units.values())
        images: dict[str, str] = {}  # the digests of shards that lost samples, now or earlier
        if dataset.images:
            follow = removed_from(open_store(dataset.images)).follow
            for unit in units:
                if successor := follow(unit.made_of):
                    images[unit.unit] = successor.digest
        if dataset.images in changed:
            images |= changed[dataset.images].digests
        for _ in map_ahead(partial(dataset.rewrite, images), units, UNITS_AT_ONCE):
            done += 1
            listener.on_change(done, count)
    for dataset in reversed(ordered):
        dataset.finish()
    delete_texts()


def _images_first(datasets: Sequence[_Dataset]) -> list[_Dataset]:
    return sorted(datasets, key=lambda dataset: not dataset.has_images)


class _RemovalJob:
    """The search for the samples to remove from some datasets, and their marks.

    `successors` has what became of the shards of images beside them, by their URL.
    """

    def __init__(
        self,
        datasets: Sequence[_Dataset],
        listener: JobListener,
        finder: SampleFinder,
        successors: Mapping[str, Mapping[str, ShardSuccessor]],
    ) -> None:
        self._datasets = _images_first(datasets)
        self._by_url = {dataset.url: dataset for dataset in datasets}
        self._listener, self._finder, self._successors = listener, finder, successors

    # --- find
    def find(self) -> None:
        """Find the samples to remove, in images first."""
        for dataset in self._datasets:
            if not dataset.has_images:
                dataset.images = self._images_of(dataset)
            self._search(dataset, list(dataset.manifest.receipts))

    def _search(self, dataset: _Dataset, receipts: Sequence[Receipt]) -> None:
        """Search some units of a dataset, and keep what is found there, and the marks of before."""
        finder = self._finder
        images, lost = self._by_url.get(dataset.images), dict[str, ShardRemoval]()
        any_slice = dataset.has_other_keys() or not (dataset.has_images or finder.are_own)

        def look(receipt: Receipt) -> FoundInUnit:
            kinds = {*finder.kinds} if dataset.has_images else set[str]()
            if any_slice or finder.may_be_in(receipt.unit):
                kinds |= finder.texts.keys() & {KEY}
            return finder.find_in_unit(dataset.store, receipt, kinds, lost.get(receipt.unit))

        with naming_repair(dataset.store):
            if dataset.images:
                now = by_latent_unit(images.units.values() if images else ())
                lost |= find_lost(dataset.images, receipts, now)
            for receipt in receipts if finder.kinds else ():  # which images alone state
                shard = lost.get(receipt.unit)
                if shard and image_shard_digest(receipt.input) != shard.digest:
                    maker = maker_of(dataset.manifest.dataset, dataset.manifest.settings)
                    raise FingerprintError(
                        f"{dataset.shown} was made of another {shard.name} than there is now: run "
                        f'the same "{maker}" with --redo-changed, then the same command again'
                    )
            for receipt in receipts:
                dataset.units.pop(receipt.unit, None)
            found = map_ahead(look, receipts, dataset.store.readers)
            for done, (removal, marks) in enumerate(found):
                self._listener.on_listing(dataset.shown, done, len(receipts))
                dataset.units |= {removal.unit: removal} if removal else {}
                dataset.found_marks |= marks

    def _images_of(self, latents: _Dataset) -> str:
        """Return the URL of the images that latents were made of, or "" if nobody knows them.

        Of the images that are given, it is the dataset with the most shards, present or former,
        that the latents state as their inputs. If none has any, the datasets beside the latents
        are compared in the same way, by those of their shards that a removal has replaced.
        """
        inputs = latents.manifest.image_digests()
        chosen = {
            images.url: images.manifest.image_digests() | images.removed.successors.keys()
            for images in self._datasets
            if images.has_images
        }
        beside = {url: shards.keys() for url, shards in self._successors.items()}
        for known in (chosen, beside):
            shared = {url: len(inputs & digests) for url, digests in known.items()}
            if any(shared.values()):
                return max(shared, key=lambda url: shared[url])
        return ""

    def removal(
        self, ended: tuple[str, ...], latents_there: Mapping[str, frozenset[str]]
    ) -> Removal:
        """Return what was found, for the user.

        `latents_there` are those that lie beside images, with the digests of the image shards that
        they were made of.
        """
        finder = self._finder
        nowhere, examples = finder.unseen_keys()
        images = [dataset for dataset in self._datasets if dataset.has_images]
        losing = {s.digest for dataset in images for u in dataset.units.values() for s in u.shards}
        losing.update(*(dataset.removed.successors for dataset in images))  # or have lost some
        others = latents_there.keys() - self._by_url.keys()
        return Removal(
            places=tuple(dataset.result(finder) for dataset in self._datasets),
            nowhere=nowhere,
            examples=examples,
            unmatched=finder.unmatched,
            ended=ended,
            beside=tuple(sorted(u for u in others if not latents_there[u].isdisjoint(losing))),
        )

    # --- mark
    def mark(self) -> None:
        """Write the file `removed` of each dataset, and wait for the units that are held.

        Raise BusyError if another removal has begun there.
        """
        for dataset in reversed(self._datasets):
            dataset.mark(self._finder)
        for dataset in reversed(self._datasets):
            wait_for_holders(dataset.store)

    def catch_up(self) -> None:
        """Search the units that other runs have finished since `find`, and mark what is found."""
        for dataset in self._datasets:
            before = dict(dataset.manifest.ledger.named_lines())
            dataset.manifest = refresh_manifest(dataset.store, dataset.manifest)
            lines = dataset.manifest.ledger.named_lines()
            other = {unit for unit, line in lines if before.get(unit) != line}
            if other:
                receipts = [r for r in dataset.manifest.receipts if r.unit in other]
                self._search(dataset, receipts)
                dataset.mark(self._finder, is_more=True)

    def drop_marks(self) -> None:
        """Drop the marks of latents in which an earlier removal has changed nothing."""
        for dataset in self._datasets:
            if dataset.is_only_marked:
                with dataset.edition.holding_manifest():
                    forget_removal(dataset.store)
