"""The new datasets that a selection is written to, and the run that fills each."""

import contextlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from wdsprep.changes.copy_samples import CopyUnit, CopyWork
from wdsprep.changes.merged_datasets import NAME, Group, JoinedColumns, subsets_of
from wdsprep.changes.selected_samples import (
    OriginShards,
    Parts,
    WantedKeys,
    draw_samples,
    select_keys,
    select_where,
    split_samples,
)
from wdsprep.changes.shard_plan import PlannedShard, SamplesToCopy, ShardLimits, cut_into_shards
from wdsprep.dataset.damage import naming_repair
from wdsprep.dataset.file_names import SELECTION, empty_name, latent_unit
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.receipts import Shard
from wdsprep.dataset.sealed_json import canonical_json, hex_digest
from wdsprep.dataset.shapes import buckets_encoded
from wdsprep.dataset.shard_reader import ShardReader
from wdsprep.dataset.stored_dataset import dated_manifest, find_claim, refresh_manifest
from wdsprep.dataset.unit_locks import Edition
from wdsprep.errors import ExistsError, FingerprintError, FullError, NotFoundError, UsageError
from wdsprep.runners.job import JobListener
from wdsprep.runners.make_runner import runner_for
from wdsprep.runners.options import WorkerOptions
from wdsprep.runners.run import Outcome, Run, do_runs, open_dataset_to_write
from wdsprep.runners.track import track_run
from wdsprep.store import open_store
from wdsprep.store.base import Store, absolute, local_path, write_bytes
from wdsprep.text import human_bytes, plural


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectRequest:
    """The options that decide which samples are selected, and how they are put into shards."""

    where: str
    keys: WantedKeys | None
    count: int
    seed: int
    parts: Parts
    samples: int
    nbytes: int
    prefix: bool
    columns: JoinedColumns = field(default_factory=JoinedColumns)
    """The columns that the condition may use beside the json."""

    def settings(self, part: str) -> dict[str, Any]:
        """Return the settings that decide the bytes, beside the datasets.

        Options that were not given are not among them.
        """
        chance = self.count or self.parts
        found = {
            "count": self.count,
            "join": self.columns.digest,
            "keys": self.keys.digest if self.keys else "",
            "part": part,
            "prefix": self.prefix,
            "split": [[name, str(share)] for name, share in self.parts.items()],
            "where": self.where,
        }
        found = {name: value for name, value in found.items() if value}
        found |= {"seed": self.seed} if chance else {}
        return found | {"max_shard_size": self.nbytes, "samples_per_shard": self.samples}


def plan_shards(group: Group, asked: SelectRequest) -> dict[str, list[PlannedShard]]:
    """Return the planned shards of each part of a selection, by the name of the part.

    Without a split there is one part, with an empty name. Raise UsageError if nothing is selected,
    or nothing for a part.
    """
    rise = group.dataset == "images"
    shards = OriginShards(origins=group.origins)
    every = shards.all_samples
    if asked.keys:
        every = select_keys(every, shards, asked.keys)
    if asked.where:
        every = select_where(every, shards, subsets_of(group.origins, asked.columns, asked.where))
    if not every.samples:
        shown = " and ".join(origin.shown for origin in group.origins)
        raise UsageError(
            f"nothing is selected, as no sample of {shown} meets all conditions: give fewer"
        )
    if asked.count:
        every = draw_samples(every, shards, asked.count, asked.seed)
    parts = {"": every}
    if asked.parts:
        parts = split_samples(every, shards, asked.parts, asked.seed)
    limits = ShardLimits(samples=asked.samples, nbytes=asked.nbytes)
    found = {}
    for name, some in parts.items():
        if not some.samples:
            total = plural(every.samples, "sample")
            raise UsageError(f"--split leaves none of {total} for {name}: give it a larger share")
        found[name] = cut_into_shards(
            some, shards, limits, prefixes=key_prefixes(group, asked), rise=rise
        )
    return found


def key_prefixes(group: Group, asked: SelectRequest) -> tuple[str, ...]:
    """Return the prefix of the keys of each dataset; empty texts without --prefix."""
    many = len(group.origins)
    if not asked.prefix:
        return ("",) * many
    return tuple(f"{number:0{len(str(many - 1))}d}" for number in range(many))


def check_room(planned: "Iterable[tuple[SelectedDataset, list[PlannedShard]]]") -> None:
    """Raise FullError, before anything is written, if local disks lack room for the selection."""
    wanted: dict[str, int] = {}
    for each, own in planned:
        if (path := local_path(each.place)) is not None:
            while not Path(path).exists():
                path = str(Path(path).parent)
            wanted[path] = wanted.get(path, 0) + each.nbytes_left(own)
    for path, nbytes in wanted.items():
        if nbytes > (free := shutil.disk_usage(path).free):
            raise FullError(
                f"{path} has {human_bytes(free)} free, and {human_bytes(nbytes)} are selected: "
                "free some space, choose another place, or select less"
            )


@dataclass(frozen=True, kw_only=True)
class SelectedDataset:
    """A dataset to write: a group of datasets, or a part of it."""

    group: Group
    part: str
    asked: SelectRequest
    overwrite: bool
    track: str = ""

    @property
    def shown(self) -> str:
        return self.group.place_of(self.part)

    @property
    def place(self) -> str:
        return absolute(self.shown)

    @cached_property
    def settings(self) -> dict[str, Any]:
        if self.group.dataset == "latents":
            return dict(self.group.settings)
        origins = self.group.origins
        return {
            **self.asked.settings(self.part),
            "buckets": self.group.settings["buckets"],
            "max_area": max(origin.manifest.settings["max_area"] for origin in origins),
            "of": self.group.content,
            "source": SELECTION,
        }

    @cached_property
    def selection(self) -> str:
        """Return a digest of everything that decides what is in the dataset."""
        of = self.group.follows or self.group
        known = [of.content, self.group.content, self.asked.settings(self.part)]
        return hex_digest(canonical_json(known))

    def check(self) -> None:
        """Raise FingerprintError, before anything is written, if the place has another dataset."""
        store = open_store(self.place)
        claim = find_claim(store, self.group.dataset, self.settings, overwrite=self.overwrite)
        if claim.is_there and claim.manifest.extra.get("selection", self.selection) != (
            self.selection
        ):
            raise self._conflict()

    def _conflict(self) -> FingerprintError:
        return FingerprintError(
            f"{self.shown} holds another selection, or one of other images: give another place, "
            "or start over with --overwrite"
        )

    @cached_property
    def _present(self) -> Manifest | None:
        """Return the manifest in the place, or None if there is none or it is overwritten."""
        store = open_store(self.place)
        there = None if self.overwrite else dated_manifest(store)
        return refresh_manifest(store, there) if there else None

    @property
    def is_done(self) -> bool:
        there = self._present
        is_same = there is not None and there.extra.get("selection") == self.selection
        return bool(is_same and there and there.complete)

    def nbytes_left(self, cuts: Sequence[PlannedShard]) -> int:
        """Return about how many bytes are left to write.

        For latents that follow images, this is the size of their datasets times the share of
        samples that are left to write.
        """
        done = set(self._present.ledger.units()) if self._present else set()
        names = (self._unit_name(each) for each in cuts)
        wanted = [each for each, name in zip(cuts, names, strict=True) if name not in done]
        if not self.group.follows:
            return sum(each.nbytes for each in wanted)
        manifests = [origin.manifest for origin in self.group.origins]
        of = sum(manifest.inputs for manifest in manifests)
        samples = sum(each.samples for each in wanted if each.bucket in self._buckets)
        return int(sum(manifest.nbytes for manifest in manifests) * samples / max(1, of))

    @cached_property
    def _buckets(self) -> frozenset[int]:
        """Return the buckets of images that latents were made of; none if they follow no images."""
        images = self.group.follows
        if images is None:
            return frozenset()
        return frozenset(buckets_encoded(self.group.settings, images.settings["buckets"]))

    def _unit_name(self, made: PlannedShard) -> str:
        return made.slice if self.group.dataset == "images" else latent_unit(made.name)

    def finish(self) -> Outcome:
        """Return the outcome of a dataset that is complete already."""
        return self._run([], None, JobListener())

    def fill(
        self,
        cuts: Sequence[PlannedShard],
        images: Outcome | None,
        options: WorkerOptions,
        listener: JobListener,
    ) -> Outcome:
        """Copy the samples of the planned shards, and return the outcome.

        `images` is the outcome of the images that latents follow. Raise FingerprintError if the
        place has units of another selection.
        """
        return self._run(list(self._units(cuts, images)), options, listener)

    def _units(self, cuts: Sequence[PlannedShard], images: Outcome | None) -> Iterator[CopyUnit]:
        """Yield a unit for each planned shard that is to be written.

        Latents have units only for the image shards that were written.
        """
        shards = {shard.name: shard for shard in images.manifest.shards} if images else {}
        for made in cuts:
            if self.group.follows and (made.bucket not in self._buckets or made.name not in shards):
                continue
            yield CopyUnit(
                name=self._unit_name(made),
                shard=made.name,
                pieces=self._pieces(made, shards.get(made.name)),
                input=shards[made.name].digest if self.group.follows else hex_digest(made.inputs),
                nbytes=made.nbytes,
            )

    def _pieces(self, made: PlannedShard, written: Shard | None) -> tuple[SamplesToCopy, ...]:
        """Return the pieces of a planned shard, for latents with the names of their units.

        Samples that the `written` image shard lacks, because they were removed there, are left out.
        """
        images = self.group.follows
        if not images or not written:
            return made.pieces
        pieces = made.pieces
        if written.samples < made.samples:
            place = absolute(images.place_of(self.part))
            keys = {*_keys_of(open_store(place), written)}
            pieces = tuple(filter(None, map(partial(self._with_keys, keys), pieces)))
        return tuple(replace(piece, unit=latent_unit(piece.shard.name)) for piece in pieces)

    def _with_keys(self, keys: set[str], piece: SamplesToCopy) -> SamplesToCopy | None:
        """Return the part of a piece of images that has some of the keys, or None if none has."""
        images = self.group.follows or self.group
        store, number = images.origins[piece.origin].store, piece.origin
        prefix = key_prefixes(images, self.asked)[number]
        all_keys = _keys_of(store, piece.shard)
        left = [n for n in piece.numbers.tolist() if prefix + all_keys[n] in keys]
        return replace(piece, numbers=np.array(left, np.uint32)) if left else None

    def _run(
        self, units: list[CopyUnit], options: WorkerOptions | None, listener: JobListener
    ) -> Outcome:
        edition, manifest = open_dataset_to_write(
            self.place, self.group.dataset, self.settings, overwrite=self.overwrite
        )
        ledger = manifest.ledger
        done = dict(zip(ledger.units(), ledger.column("input"), strict=True))
        wanted = {unit.name: unit.input for unit in units}
        if options and any(wanted.get(unit) != of for unit, of in done.items()):
            raise self._conflict()
        pending = [unit for unit in units if unit.name not in done]
        work = CopyWork(
            dataset=self.group.dataset,
            origins=tuple(origin.url for origin in self.group.origins),
            prefixes=key_prefixes(self.group, self.asked),
            out=self.place,
            edition=edition.mark,
            settings=self.settings,
            by_images=self.group.follows is not None,
            empty=self._empty(edition),
        )
        run = Run(edition, manifest, count=len(pending), extra=self._extra)
        nbytes = sum(unit.nbytes for unit in pending)
        few = partial(runner_for, told=lambda _line: None, name="select")
        chosen = few(options, len(pending), nbytes) if pending and options else None
        with track_run(
            self.track if chosen else "",
            [self.place],
            listener,
            settings=manifest.settings,
            before=manifest.samples,
        ) as status:
            (outcome,) = do_runs([run], chosen, work, pending, status=status)
        return outcome

    def _extra(self) -> dict[str, Any]:
        """Return what the manifest states beside settings: the model, and the selection."""
        known = self.group.origins[0].manifest.extra
        own = {"model": known["model"]} if "model" in known else {}
        return {**own, "selection": self.selection}

    def _empty(self, edition: Edition) -> dict[str, str]:
        """Copy the files for the empty caption from the first dataset; return their digests.

        Raise UsageError if the datasets have different ones.
        """
        if self.group.dataset == "images":
            return {}
        found: dict[str, set[str]] = {}
        for origin in self.group.origins:
            for files in origin.manifest.ledger.column("files"):
                for name, digest in files.items():
                    if name.startswith(empty_name("")):
                        found.setdefault(name, set()).add(digest)
        for name, digests in found.items():
            if len(digests) > 1:
                shown = " and ".join(origin.shown for origin in self.group.origins)
                raise UsageError(
                    f"{shown} have different {name}, so they cannot become one dataset: give each "
                    f"a place, such as OUT/{NAME}"
                )
            _copy_file(self.group.origins[0].store, edition, name)
        return {name: digests.pop() for name, digests in sorted(found.items())}


def _keys_of(store: Store, shard: Shard) -> list[str]:
    with naming_repair(store), ShardReader(store, shard) as reader:
        return [*reader.keys()]


def _copy_file(store: Store, edition: Edition, name: str) -> None:
    try:
        edition.store.read(name, nbytes=0)
    except NotFoundError:
        data = store.read(name)
        with edition.holding(name), contextlib.suppress(ExistsError):
            write_bytes(edition.store, name, data, exclusive=True)
