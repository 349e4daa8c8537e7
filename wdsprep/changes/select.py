"""`select`: a subset, a split, other shards, or several datasets in one, by copying samples.

1. *Places.* OUT says where datasets are written: `{name}` there stands for the last part of a
   dataset's path, and `{split}` for a part of the split. Datasets with the same place become one
   dataset, in the order in which they were given. So `shards/images shards/latents-256
   'subset/{name}'` gives subset/images and subset/latents-256: as `{resolution}` in the OUT of
   encode, it tells the names of several outputs, and nothing depends on the number of words.
2. *Who decides.* Given images, samples are selected from them, and latents and text follow: the
   samples that were made of the selected ones, so that all are pairs again. Otherwise samples are
   selected from latents (`selected_samples`).
3. *Units.* The selection is cut into shards, which are numbered over all buckets; each is a unit of
   work. The cut depends on the content of the datasets and on the options alone,
   so any number of workers gives the same bytes, and a run that was killed goes on.
4. *Work.* A unit copies bytes (`copy_samples`), and reads the receipts of its sources before and
   after: if one has changed meanwhile, the unit is not finished. Images come first, then what was
   made of them, since its receipts state the digest of the new image shard, as those of encode do.
5. *Settings.* Those of selected images say that they are a selection (`source`), of which datasets
   and by which options, so another selection in the same place is refused. Their keys are unique
   and rise in a shard, but are not slice and number. The inputs of their units are lists of shards
   by digest and numbers, without a key, a caption or a URL. Nothing is rejected.
   Settings of selected latents are those that they were encoded with: encode finds nothing left to
   do, and can make damaged shards again. The rejects of selected samples are copied too. The
   manifest states the selection (`selection`), and the inputs in their receipts the rest: latents
   made of other images are refused.
6. *Keys* stay. If two datasets have the same key, that is refused. `prefix` puts the number of the
   dataset (0, 1, ...) before each key: names in the tar and the json change, so these samples are
   written again.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, cast

import numpy as np

from wdsprep.changes.copy_samples import CopyJob, open_worker
from wdsprep.changes.merged_datasets import NAME, SPLIT, Group, find_subsets, group_datasets
from wdsprep.changes.options import Parts, SelectOptions, read_lines
from wdsprep.changes.selected_samples import (
    CopyUnit,
    SamplesToCopy,
    cut_into_shards,
    divide_samples,
    select_keys,
    select_where,
)
from wdsprep.dataset.damage import naming_repair
from wdsprep.dataset.file_names import SELECTION, empty_name, latent_shard, latent_unit
from wdsprep.dataset.manifest import Shard
from wdsprep.dataset.sample_selection import SampleSelection
from wdsprep.dataset.sample_table import KEY
from wdsprep.dataset.samples import roles_of
from wdsprep.dataset.sealed_json import canonical_json, hex_digest
from wdsprep.dataset.shapes import buckets_encoded
from wdsprep.dataset.shard_reader import ShardReader
from wdsprep.dataset.stored_dataset import find_claim
from wdsprep.dataset.unit_locks import Edition
from wdsprep.errors import ExistsError, FingerprintError, NotFoundError, UsageError
from wdsprep.options import as_places, takes_options
from wdsprep.runners.make_runner import runner_for
from wdsprep.runners.options import with_runner
from wdsprep.runners.run import Outcome, Run, do_runs, open_dataset_to_write
from wdsprep.store import open_store
from wdsprep.store.base import Store, absolute, check_apart, write_bytes
from wdsprep.tables.query import WantedTexts
from wdsprep.text import plural


@dataclass(frozen=True, kw_only=True)
class Selected:
    """The result of a selection: the outcome of each dataset that was written, by its place."""

    outcomes: Mapping[str, Outcome]

    def __repr__(self) -> str:
        shown = (f"{place!r}: {outcome!r}" for place, outcome in self.outcomes.items())
        return f"<Selected {', '.join(shown)}>"

    @property
    def is_damaged(self) -> bool:
        return any(outcome.quarantined for outcome in self.outcomes.values())


@takes_options(SelectOptions)
def select(options: SelectOptions) -> Selected:
    """Copy samples of datasets into new ones.

    The samples are those that have one of `keys` and meet `where`, as far as these are given. With
    `count`, so many of them are drawn at random. `split` divides the result into parts.

        wdsprep.select("shards/images", "shards/large", where="width >= 768")
        wdsprep.select(["shards/images", "shards/latents-256"], "{split}/{name}",
                       split={"train": 0.9, "val": 0.1})
        wdsprep.select(["january", "february"], "both", prefix=True)

    The options are those of `wdsprep select`; `keys` may also be a list of keys. After an
    interrupt or a kill, the same call goes on where it was.
    """
    return _Selection(options).copy()


class _Selection:
    """The samples that are selected from each dataset, and how they are put into shards."""

    def __init__(self, options: SelectOptions) -> None:
        out, keys = os.fspath(options.out), options.keys
        self.options, self.parts = options, cast("Parts", options.split or {})
        is_given = not isinstance(keys, str) or keys
        self._keys = WantedTexts(KEY, read_lines("keys", keys)) if is_given else None
        if unknown := {*re.findall(r"\{[^/]*?\}", out)} - {NAME, SPLIT}:
            raise UsageError(
                f"{out} has {min(unknown)} in it, which stands for nothing: write {NAME} or {SPLIT}"
            )
        if bool(self.parts) != (SPLIT in out):
            raise UsageError(
                f"{out}: --split and {SPLIT} in OUT go together: give both, such as OUT/{SPLIT} "
                "with --split train=0.9,val=0.1, or neither"
            )
        self._groups = group_datasets(options.places, out)
        join = [os.fspath(place) for place in as_places(options.join)]
        self._subsets = find_subsets(self._groups, join, options.where)

    def copy(self) -> Selected:
        listener = self.options.listener_or_mute
        outs = [
            _SelectedDataset(group=group, part=part, selection=self)
            for part in self.parts or [""]
            for group in self._groups
        ]
        are_done = []
        for out in outs:
            for origin in (origin for group in self._groups for origin in group.origins):
                check_apart(origin.url, absolute(out.place))
            are_done.append(out.check())
        if all(are_done):
            return Selected(outcomes={out.place: out.write([], None, None) for out in outs})
        cuts = self.plan_shards()
        options = with_runner(self.options, listener.on_message)
        outcomes: dict[str, Outcome] = {}
        of = sum(origin.manifest.samples for origin in self._groups[0].origins)
        for out in outs:
            samples = sum(shard.samples for shard in cuts[out.part])
            listener.on_message(f"{out.place}: {samples:,} of {plural(of, 'sample')} selected")
            follows = out.group.follows
            images = outcomes[follows.place_of(out.part)] if follows else None
            if images is not None and images.quarantined:
                continue  # its image shards are not complete
            outcomes[out.place] = out.write(cuts[out.part], images, options)
        return Selected(outcomes=outcomes)

    def settings(self, part: str) -> dict[str, Any]:
        """Return the settings that decide the bytes, beside the datasets.

        Options that were not given are not among them.
        """
        options = self.options
        joined = [digest for subset in self._subsets for digest in subset.joined_digests]
        settings = {
            "count": options.count,
            "join": hex_digest("\n".join(joined).encode()) if joined else "",
            "keys": hex_digest(self._keys.marks.data) if self._keys else "",
            "part": part,
            "prefix": options.prefix,
            "split": [[name, str(share)] for name, share in self.parts.items()],
            "where": options.where,
        }
        return {
            **{name: value for name, value in settings.items() if value},
            **({"seed": options.seed} if options.count or self.parts else {}),
            "max_shard_size": options.max_shard_nbytes,
            "samples_per_shard": options.samples_per_shard,
        }

    def prefixes(self, group: Group) -> tuple[str, ...]:
        """Return the prefix of the keys of each dataset; empty texts without --prefix."""
        many = len(group.origins)
        if not self.options.prefix:
            return ("",) * many
        return tuple(f"{number:0{len(str(many - 1))}d}" for number in range(many))

    def plan_shards(self) -> dict[str, list[CopyUnit]]:
        """Return the planned shards of each part of the selection, by the name of the part.

        Without a split there is one part, with an empty name. Raise UsageError if nothing is
        selected, or nothing for a part.
        """
        group, options = self._groups[0], self.options
        sizes = np.array([shard.samples for _, shard in group.shards], np.int64)
        samples = SampleSelection.all_of(sizes).pick(sizes > 0)
        if self._keys is not None:
            samples = select_keys(samples, group, self._keys, options.keys)
        if options.where:
            samples = select_where(samples, group, self._subsets)
        if not samples.samples:
            raise UsageError(
                f"nothing is selected, as no sample of {group.shown} meets all conditions: give "
                "fewer"
            )
        total = plural(samples.samples, "sample")
        if samples.samples < options.count:
            raise UsageError(
                f"--count {options.count:,} is more than the {total} to draw from: give fewer"
            )
        if options.count:
            (samples,) = divide_samples(samples, group, options.seed, [0, options.count])
            total = plural(options.count, "sample")
        parts = [samples]
        if self.parts:
            ends = [0, *(int(share * samples.samples) for share in accumulate(self.parts.values()))]
            parts = divide_samples(samples, group, options.seed, ends)
        cuts: dict[str, list[CopyUnit]] = {}
        for name, part in zip(self.parts or [""], parts, strict=True):
            if not part.samples:
                raise UsageError(
                    f"--split leaves none of {total} for {name}: give it a larger share"
                )
            cuts[name] = [*cut_into_shards(part, group, options, prefixes=self.prefixes(group))]
        return cuts


@dataclass(frozen=True, kw_only=True)
class _SelectedDataset:
    """A dataset to write: samples of a group of datasets: those chosen, or a part."""

    group: Group
    part: str
    selection: _Selection

    @property
    def place(self) -> str:
        return self.group.place_of(self.part)

    @cached_property
    def settings(self) -> dict[str, Any]:
        if self.group.dataset == "latents":
            return dict(self.group.settings)
        origins = self.group.origins
        optional = {n for o in origins for n in o.manifest.settings.get("optional_roles", ())}
        roles = {"roles": [*roles_of(self.group.settings)], "optional_roles": sorted(optional)}
        return {
            **self.selection.settings(self.part),
            **{name: value for name, value in roles.items() if value},
            "buckets": self.group.settings["buckets"],
            "max_area": max(origin.manifest.settings["max_area"] for origin in origins),
            "of": self.group.content,
            "source": SELECTION,
        }

    @cached_property
    def digest(self) -> str:
        """Return a digest of everything that decides what is in the dataset."""
        of = self.group.follows or self.group
        known = [of.content, self.group.content, self.selection.settings(self.part)]
        return hex_digest(canonical_json(known))

    def check(self) -> bool:
        """Return whether the dataset is complete already.

        Raise FingerprintError, before anything is written, if the place has another dataset.
        """
        overwrite, store = self.selection.options.overwrite, open_store(self.place)
        claim = find_claim(store, self.group.dataset, self.settings, overwrite=overwrite)
        there = claim.manifest
        if claim.is_there and there.extra.get("selection", self.digest) != self.digest:
            raise self._conflict()
        return there.extra.get("selection") == self.digest and there.complete

    def _conflict(self) -> FingerprintError:
        return FingerprintError(
            f"{self.place} holds another selection, or one of other images: give another place, "
            "or start over with --overwrite"
        )

    def _units(self, cuts: Sequence[CopyUnit], outcome: Outcome | None) -> Iterator[CopyUnit]:
        """Yield the units that write this dataset.

        Latents that follow images, which had this `outcome`, have units only for the image shards
        that were written, and no samples that these shards lack because they were removed there.
        """
        images = self.group.follows
        if outcome is None or images is None:
            yield from cuts
            return
        buckets = {*buckets_encoded(self.group.settings, images.settings["buckets"])}
        written = {shard.name: shard for shard in outcome.manifest.shards}
        prefixes = self.selection.prefixes(images)
        for cut in cuts:
            image, pieces = written.get(cut.shard), list[SamplesToCopy]()
            if image is None or cut.bucket not in buckets:
                continue
            lacks_some = image.samples < cut.samples
            keys = {*_keys_of(open_store(images.place_of(self.part)), image)} if lacks_some else {}
            for piece in cut.pieces:
                numbers = piece.numbers
                if lacks_some:
                    all_keys = _keys_of(images.origins[piece.origin].store, piece.shard)
                    prefix = prefixes[piece.origin]
                    stay = [n for n in numbers.tolist() if prefix + all_keys[n] in keys]
                    numbers = np.array(stay, np.uint32)
                if len(numbers):
                    unit = latent_unit(piece.shard.name)
                    pieces.append(replace(piece, unit=unit, numbers=numbers))
            name = latent_unit(cut.shard)
            shard = latent_shard(name, self.settings)
            yield replace(cut, name=name, shard=shard, pieces=tuple(pieces), input=image.digest)

    def write(
        self, cuts: Sequence[CopyUnit], images: Outcome | None, options: SelectOptions | None
    ) -> Outcome:
        """Copy the samples of the planned shards, and return the outcome.

        `images` is the outcome of the images that latents follow. Without `options` for workers the
        dataset is complete already. Raise FingerprintError if the place has units of another
        selection.
        """
        listener = self.selection.options.listener_or_mute
        units = [*self._units(cuts, images)]
        edition, manifest = open_dataset_to_write(
            self.place,
            self.group.dataset,
            self.settings,
            overwrite=self.selection.options.overwrite,
        )
        ledger = manifest.ledger
        done = dict(zip(ledger.units(), ledger.column("input"), strict=True))
        wanted = {unit.name: unit.input for unit in units}
        if options and any(wanted.get(unit) != of for unit, of in done.items()):
            raise self._conflict()
        pending = [unit for unit in units if unit.name not in done]
        job = CopyJob(
            dataset=self.group.dataset,
            origins=tuple(origin.url for origin in self.group.origins),
            prefixes=self.selection.prefixes(self.group),
            out=absolute(self.place),
            edition=edition.mark,
            settings=self.settings,
            by_images=self.group.follows is not None,
            empty=self._empty(edition),
        )
        stated = self.group.origins[0].manifest.extra
        extra = {name: stated[name] for name in ("model",) if name in stated}
        extra["selection"] = self.digest
        run = Run(edition, manifest, count=len(pending), extra=lambda: extra)
        runner = None
        if pending and options:
            nbytes = sum(unit.nbytes for unit in pending)
            runner = runner_for(
                options, len(pending), nbytes, on_message=lambda _line: None, name="select"
            )
        work, track = partial(open_worker, job), self.selection.options.track
        (outcome,) = do_runs([run], runner, work, pending, listener=listener, track=track)
        return outcome

    def _empty(self, edition: Edition) -> dict[str, str]:
        """Copy the files for the empty caption from the first dataset; return their digests.

        Raise UsageError if the datasets have different ones.
        """
        if self.group.dataset == "images":
            return {}
        pairs = {
            (name, digest)
            for origin in self.group.origins
            for files in origin.manifest.ledger.column("files")
            for name, digest in files.items()
            if name.startswith(empty_name(""))
        }
        digests = dict(sorted(pairs))
        if len(digests) < len(pairs):
            raise UsageError(
                f"{self.group.shown} have different files for the empty caption, so they cannot "
                f"become one dataset: give each a place, such as OUT/{NAME}"
            )
        for name in digests:
            try:
                edition.store.read(name, nbytes=0)
            except NotFoundError:
                data = self.group.origins[0].store.read(name)
                with edition.holding(name), contextlib.suppress(ExistsError):
                    write_bytes(edition.store, name, data, exclusive=True)
        return digests


def _keys_of(store: Store, shard: Shard) -> list[str]:
    with naming_repair(store), ShardReader(store, shard) as reader:
        return [*reader.keys()]
