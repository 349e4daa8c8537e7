"""A run of `encode` or `score`: planned before anything is written, and then carried out.

For each dataset `plan_dataset` finds what lies at its place, and which image shards are left to do:
those that are wanted and have no receipt (`pending_shards`). If images have changed or are gone,
the run is refused, or what was made from them is removed. The shards that are left, perhaps a
million, are kept pickled in the plan. `do_plan` hands them out as units of work, each for all the
datasets that lack it (`joint_units`), and the largest first, so that no worker begins a large one
when the others have finished.
"""

import gc
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import merge
from itertools import groupby, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from wdsprep.dataset.damage import UNLIKE_RECEIPT, repair_step
from wdsprep.dataset.manifest import Manifest, image_shard_digest
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.settings import SCORER, Settings
from wdsprep.dataset.stored_dataset import DatasetClaim, find_claim, take_claim
from wdsprep.encoding.image_shards import ImageShard, ImageShards
from wdsprep.encoding.progress import Speeds
from wdsprep.encoding.worker_plan import EncodeJob
from wdsprep.errors import DamageError, FingerprintError, NotFoundError
from wdsprep.runners.base import Call, Runner
from wdsprep.runners.job import JobListener
from wdsprep.runners.make_runner import make_runner
from wdsprep.runners.run import (
    JointUnit,
    Outcome,
    Run,
    RunProgress,
    do_runs,
    remove_units,
    sweep_to_begin,
)
from wdsprep.sources.base import find_changed_units
from wdsprep.sources.tars import TarsSource
from wdsprep.store import open_store
from wdsprep.store.base import Store
from wdsprep.text import examples, plural

if TYPE_CHECKING:
    from wdsprep.encoding.captions.join_captions import CaptionLayout

MANY = 10_000
"""The number of shards from which it is worth while to collect their garbage: that takes 0.3 s in a
process that has imported torch and diffusers."""


def pack_shards(shards: list[ImageShard]) -> deque[bytes]:
    """Move all shards out of a list into a queue, pickled, so that they take a third of the memory.

    A million shards lie scattered over half a GB, and none of it is freed before the last of them
    is dropped. Pickled, each is freed when it is handed out.
    """
    packed = deque(shard.to_bytes() for shard in shards)
    shards.clear()
    if len(packed) >= MANY:
        gc.collect()  # tuples that Python keeps for reuse hold on to all the memory around them
    return packed


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetPlan:
    """A dataset that a run begins or continues, with the image shards that it lacks."""

    place: str
    claim: DatasetClaim
    """The claim on what lies at the place, without the stale units."""
    settings: Settings
    shards: int
    """The number of image shards that the dataset is made from."""
    samples: int
    """The number of images in these shards; 0 if nobody has counted them."""
    packed: deque[bytes]
    """The image shards that are missing, pickled, the largest first."""
    stale: Mapping[str, str]
    """The units that are removed first, each with the input that it was made from."""
    removals: tuple[str, ...]
    """Lines that tell the user how many units are removed, and why."""
    missing_samples: int
    """The number of images in the missing shards; 0 if nobody has counted them."""
    is_limited: bool
    """True if --limit leaves some images out."""

    @property
    def pending(self) -> Iterator[ImageShard]:
        """Yield the image shards that are missing, the largest first."""
        return map(ImageShard.from_bytes, self.packed)

    def hand_out(self) -> Iterator[ImageShard]:
        """Yield each shard that is missing, and drop it from the plan."""
        while self.packed:
            yield ImageShard.from_bytes(self.packed.popleft())


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """The plan of a run of `encode` or `score`: everything that the run will do."""

    source: ImageShards
    """What is known of the images, without their shards."""
    job: EncodeJob
    """The work of each worker; `do_plan` adds the datasets."""
    datasets: tuple[DatasetPlan, ...]
    captions: "CaptionLayout | None" = None
    """The captions of a table, if the user gives one."""
    speeds: Speeds = field(default_factory=Speeds)
    """The speeds of the workers, as far as they have been heard of."""


def plan_dataset(
    place: str,
    source: ImageShards,
    wanted: Sequence[ImageShard],
    settings: Settings,
    *,
    overwrite: bool,
    redo_changed: bool,
    compared: Callable[[int, int], object],
) -> DatasetPlan:
    """Return the plan of one dataset: what lies at its place, and which image shards it lacks.

    It is made of the `wanted` image shards of a source. Raise DamageError if stored arrays of the
    empty caption differ from the digests in receipts. Raise FingerprintError if the place holds a
    dataset of other settings, or if image shards have changed or are gone: `overwrite` and
    `redo_changed` allow these.
    """
    store = open_store(place)
    claim = find_claim(store, "latents", settings, overwrite=overwrite)
    _check_empty_caption(store, claim.manifest)
    pending = pending_shards(
        store,
        claim.manifest,
        source.shards,
        wanted,
        redo_changed=redo_changed,
        is_whole=source.is_whole,
        tars=source.tars,
        compared=compared,
    )
    return DatasetPlan(
        place=place,
        claim=replace(claim, manifest=pending.manifest),
        settings=settings,
        shards=len(wanted),
        samples=count_samples(wanted),
        missing_samples=count_samples(pending.shards),
        packed=pack_shards(pending.shards),
        stale=pending.stale,
        removals=pending.removals,
        is_limited=wanted != source.shards,
    )


def _check_empty_caption(store: Store, manifest: Manifest) -> None:
    """Raise DamageError if stored arrays of the empty caption differ from the digests in receipts.

    New receipts list the digests of these stored files, so damaged ones would pass as sound.
    """
    files = (item for files in manifest.ledger.column("files") for item in files.items())
    recorded = {(name, digest) for name, digest in files if name.startswith("empty.")}
    for name in {name for name, _ in recorded}:
        with suppress(NotFoundError):  # the first worker writes it
            if (name, hex_digest(store.read(name))) not in recorded:
                damage = DamageError(f"{store.url}/{name}", UNLIKE_RECEIPT)
                raise damage.with_next_step(repair_step(store.url))


def count_samples(shards: Sequence[ImageShard]) -> int:
    """Return the number of samples to encode in image shards; 0 if nobody has counted them."""
    counts = [shard.item.take or shard.item.samples for shard in shards]
    return sum(counts) if all(counts) else 0


class PendingShards(NamedTuple):
    """The image shards that a dataset lacks, and the units to remove from the dataset first."""

    manifest: Manifest
    """The manifest without the units to remove."""
    shards: list[ImageShard]
    stale: Mapping[str, str]
    """The units to remove, each with the input that it was made from."""
    removals: tuple[str, ...]
    """Lines that tell the user how many units are removed, and why."""


def pending_shards(
    store: Store,
    manifest: Manifest,
    source_shards: Sequence[ImageShard],
    wanted: Sequence[ImageShard],
    *,
    redo_changed: bool = False,
    is_whole: bool = True,
    tars: TarsSource | None = None,
    compared: Callable[[int, int], object] = lambda _done, _of: None,
) -> PendingShards:
    """Return the image shards to do, and the units to remove from the dataset first.

    Shards are to do if they are wanted and have no receipt. A shard that an earlier --limit cut is
    done again, unless the same number of its samples is wanted now. Nothing is written: it is
    `remove_units` that removes.

    Raise FingerprintError if shards have changed or are gone, unless `redo_changed` is true. Then
    changed shards are done again, and the units made from shards that are gone are to be removed.
    But if packing is not `is_whole`, those units are kept, as their shards may still be packed.

    `tars` reads foreign tars, to tell changed ones from those that only have another date.
    `compared` is called with the number of tars that have been read and the number of all.
    """
    ledger = manifest.ledger
    done = dict(zip(ledger.units(), ledger.column("input"), strict=True))
    inputs_now = {shard.name: shard.whole_input for shard in source_shards}
    digests = ((unit, image_shard_digest(made_of)) for unit, made_of in done.items())
    stale = {unit for unit, digest in digests if inputs_now.get(unit) != digest}
    is_foreign = any(shard.is_foreign for shard in source_shards)
    unchanged = {}
    if stale and is_foreign and tars:
        unchanged = _find_unchanged_tars(manifest, source_shards, stale, tars, compared)
    stale -= unchanged.keys()
    refreshed = done | unchanged
    if stale and not redo_changed:
        changed = plural(len(stale), "image shard has", "image shards have")
        command = SCORER if manifest.is_scored else "wdsprep encode"  # also of a trainer's tee
        raise FingerprintError(
            f"{changed} changed or gone since {store.url} was made ({examples(sorted(stale))}): "
            "give another place for a new dataset; or, if these are the same images packed again, "
            f"{command} --redo-changed does again what has changed, and removes what has no image "
            "now"
        )
    if not is_whole:
        stale &= inputs_now.keys()
    # A shard is done if its unit has as many of its samples as are wanted now, or all of them.
    pending = [
        shard
        for shard in wanted
        if refreshed.get(shard.name) not in (shard.input, shard.whole_input)
    ]
    removals = []
    if cut := {shard.name for shard in pending if shard.name in done} - stale:
        removals.append(f"{plural(len(cut), 'shard')} done anew, with what --limit had cut off")
    if stale:
        gone = plural(len(stale), "shard")
        removals.append(f"{gone} removed: their images have changed or are gone")
    stale |= cut
    kept = [line for unit, line in ledger.named_lines() if unit not in stale]
    return PendingShards(
        manifest=replace(manifest, receipts=ledger.with_lines(kept)),
        shards=largest_first(pending),
        stale={name: done[name] for name in sorted(stale)},
        removals=tuple(removals),
    )


def _find_unchanged_tars(
    manifest: Manifest,
    source_shards: Sequence[ImageShard],
    stale: Collection[str],
    tars: TarsSource,
    compared: Callable[[int, int], object],
) -> dict[str, str]:
    """Return the stale foreign tars whose content has not changed, each with its present input."""
    shards = {
        shard.name: shard for shard in source_shards if shard.name in stale and shard.is_foreign
    }
    receipts = {r.unit: r for r in manifest.receipts if r.unit in shards and r.content}
    takes = {unit: int(r.input.partition(":")[2] or 0) for unit, r in receipts.items()}
    shards = {
        unit: replace(shards[unit], item=shards[unit].item._replace(take=take))
        for unit, take in takes.items()
    }
    other = find_changed_units(
        tars,
        {unit: receipt.content for unit, receipt in receipts.items()},
        lambda unit: [shards[unit].item],
        heard=lambda done: compared(done, len(receipts)),
    )
    return {unit: shard.input for unit, shard in shards.items() if unit not in other}


def largest_first(shards: Iterable[ImageShard]) -> list[ImageShard]:
    """Return shards sorted by the number of their samples, the largest first.

    So no worker begins a large shard when the others have finished.
    """
    return sorted(shards, key=_size_key)


def _size_key(shard: ImageShard) -> tuple[int, str]:
    return -(shard.item.take or shard.item.samples), shard.item.name


def joint_units(pending: Iterable[Iterable[ImageShard]]) -> Iterator[JointUnit]:
    """Yield units of work, each an image shard for all the datasets that lack it.

    `pending` has the shards that each dataset lacks, the largest first. If datasets need different
    numbers of a shard's samples, each number makes a unit.
    """
    numbered = (zip(repeat(number), shards) for number, shards in enumerate(pending))
    in_order = merge(*numbered, key=lambda pair: _size_key(pair[1]))
    for _, same in groupby(in_order, key=lambda pair: (pair[1].item, pair[1].digest)):
        yield JointUnit(parts=dict(same))


def do_plan(
    plan: RunPlan,
    open_worker: Callable[[EncodeJob], Call],
    *,
    listener: JobListener,
    limit: int,
    track: str,
    extra: Callable[[DatasetPlan], Mapping[str, Any]],
    name: str = "encode",
) -> list[Outcome]:
    """Do what a plan says, and return the outcome of each dataset.

    Workers begin by `open_worker`. `extra` returns further entries of the manifest of a dataset,
    once it is published.
    """

    def on_step(progress: RunProgress) -> None:
        plan.speeds.take(progress)
        listener.on_step(progress)

    # No earlier step of a run writes to the datasets.
    with closing(plan.captions) if plan.captions else nullcontext():
        editions = [take_claim(dataset.claim).edition for dataset in plan.datasets]
        planned = list(zip(plan.datasets, editions, strict=True))
        for dataset, edition in planned:
            sweep_to_begin(edition.store, dataset.claim.manifest)
            remove_units(edition, dataset.stale)
        if plan.captions:
            plan.captions.put({dataset.place: edition.store for dataset, edition in planned})
    for dataset in plan.datasets:
        for line in dataset.removals:
            listener.on_message(line)
    listener.on_begin(plan)
    runner = _runner_of(plan, name)
    runs = [
        Run(
            edition,
            dataset.claim.manifest,
            count=len(dataset.packed),
            samples=dataset.missing_samples,
            limit=limit if dataset.is_limited else 0,
            whole=plan.source.is_whole,
            extra=partial(extra, dataset),
        )
        for dataset, edition in planned
    ]
    opened = [(dataset.place, dataset.settings, edition.mark) for dataset, edition in planned]
    return do_runs(
        runs,
        runner,
        partial(open_worker, replace(plan.job, datasets=opened)),
        joint_units(dataset.hand_out() for dataset in plan.datasets),
        listener=listener,
        track=track,
        figures=plan.speeds.figures,
        on_step=on_step,
    )


def _runner_of(plan: RunPlan, name: str) -> Runner | None:
    """Return a runner with no more workers than there are units, or None if there is no unit."""
    units = len(plan.datasets[0].packed)
    if len(plan.datasets) > 1:
        units = sum(1 for _ in joint_units(dataset.pending for dataset in plan.datasets))
    if not units:
        return None
    workers = plan.job.worker_plan
    settings = replace(
        workers,
        workers=min(workers.workers, units),
        max_workers=min(workers.max_workers, units),
        name=name,
        phase=",".join(dataset.place for dataset in plan.datasets),
        units=units,
    )
    return make_runner(workers.runner, settings)
