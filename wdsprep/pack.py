"""`pack`: turn a source into an image dataset, slice by slice, on any number of workers.

The slices left to do go to a runner; what a slice becomes depends on the slice and the rules alone,
so the dataset is the same to the byte for every runner, worker count and history of kills.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from wdsprep.buckets import buckets_of_phase
from wdsprep.dataset import claim, clear, refreshed, tidy
from wdsprep.errors import AccessError, UsageError, WorkError
from wdsprep.manifest import FORMAT, MANIFEST, Manifest, Receipt, count_up
from wdsprep.packer import Packer, Progress, Rules
from wdsprep.resume import Plan, Survey, make_plan, survey
from wdsprep.runners import Finished, Quarantined, Runner, Step
from wdsprep.sources import Columns, Source
from wdsprep.sources.recognise import recognise
from wdsprep.store import Store, absolute, open_store, write_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """Where a run stands. Counts are of this run, but for `slices_done`."""

    samples: int = 0
    nbytes: int = 0
    rejects: Mapping[str, int] = field(default_factory=dict)
    slices_done: int = 0
    slices: int = 0
    share_done: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """What came of a run: the dataset as it is now, and what could not be done."""

    manifest: Manifest
    samples: int
    nbytes: int
    slices_before: int
    quarantined: tuple[Quarantined, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """Hears how a run goes; each call may be left out."""

    listed: Callable[[int], None] = lambda _count: None
    found: Callable[[Survey], None] = lambda _survey: None
    status: Callable[[Status], None] = lambda _status: None


def pack(
    source: str,
    images: str,
    *,
    rules: Rules,
    columns: Columns,
    make_runner: Callable[[int], Runner],
    workers: int = 1,
    limit: int = 0,
    append: bool = False,
    overwrite: bool = False,
    listener: Listener | None = None,
) -> Packed:
    """Pack `source` into the dataset `images` on the workers of `make_runner(workers)`. Where there
    are fewer slices than workers, each of fewer workers decodes in several threads."""
    listener = listener or Listener()
    source, images = absolute(source), absolute(images)  # workers may run in other folders
    found = recognise(source, columns=columns, rows_per_item=rules.samples_per_shard)
    _check_apart(found.url if set(source) & set("*?[") else source, images)
    seen = survey(found, limit, listener.listed)
    listener.found(seen)
    store = open_store(images)
    if overwrite:
        clear(store)
    _sweep(store)
    settings = settings_of(found, rules, columns)
    manifest = refreshed(store, claim(store, "images", settings))
    size = rules.samples_per_shard if found.kind == "folder" else 1
    plan = make_plan(store, manifest, seen, slice_size=size, append=append)
    if plan.generations != manifest.generations:
        manifest = replace(manifest, generations=plan.generations, complete=False)
        write_bytes(store, MANIFEST, manifest.to_bytes())
    packer = Packer(
        source=seen.source,
        images=images,
        rules=rules,
        settings=settings,
        generation=plan.generations[-1],
        threads=max(1, workers // max(1, plan.count)),
    )
    runner = make_runner(min(workers, plan.count)) if plan.count else None
    return _Run(store, manifest, plan, listener).carry_out(packer, runner)


class _Run:
    """One run over the pending slices, up to the published manifest."""

    def __init__(self, store: Store, manifest: Manifest, plan: Plan, listener: Listener) -> None:
        self._store, self._manifest, self._plan = store, manifest, plan
        self._listener = listener
        self._receipts: list[Receipt] = []
        self._going: dict[str, Progress] = {}
        self._quarantined: list[Quarantined] = []
        self._total = Status(
            slices=len(manifest.receipts) + plan.count,
            slices_done=len(manifest.receipts),
        )

    def carry_out(self, packer: Packer, runner: Runner | None) -> Packed:
        complete = False
        try:
            if runner is not None:
                with contextlib.closing(runner.run(packer, self._plan.pending())) as events:
                    for event in events:
                        self._take(event)
            complete = self._total.slices_done == self._total.slices
        finally:
            published = self._publish(complete=complete)
        if unseen := {r.unit for r in self._receipts} - {r.unit for r in published.receipts}:
            raise WorkError(
                f"slice {min(unseen)} was packed, but its receipt is not in {self._store.url}: "
                "another run has taken it away (run again), or the workers run on machines that "
                "see another folder there (give one that all share, or s3://)"
            )
        return Packed(
            manifest=published,
            samples=self._total.samples,
            nbytes=self._total.nbytes,
            slices_before=len(self._manifest.receipts),
            quarantined=tuple(self._quarantined),
        )

    def _take(self, event: Step | Finished | Quarantined) -> None:
        name = event.unit.name
        if isinstance(event, Step):
            self._going[name] = cast("Progress", event.value)
        else:
            self._going.pop(name, None)
        if isinstance(event, Finished):
            self._finish(cast("Receipt", event.result))
        elif isinstance(event, Quarantined):
            self._quarantined.append(event)
        self._listener.status(self._status())

    def _finish(self, receipt: Receipt) -> None:
        total = self._total
        self._receipts.append(receipt)
        self._total = replace(
            total,
            samples=total.samples + sum(shard.samples for shard in receipt.shards),
            nbytes=total.nbytes + sum(shard.nbytes for shard in receipt.shards),
            rejects=count_up((total.rejects, receipt.rejects)),
            slices_done=total.slices_done + 1,
        )

    def _status(self) -> Status:
        """The finished slices and what is known of those under way."""
        going = self._going.values()
        pending = self._total.slices - len(self._manifest.receipts)
        under_way = sum(progress.share for progress in going)
        finished = len(self._receipts) + len(self._quarantined)
        return replace(
            self._total,
            share_done=(finished + under_way) / max(1, pending),
            samples=self._total.samples + sum(progress.samples for progress in going),
            nbytes=self._total.nbytes + sum(progress.nbytes for progress in going),
            rejects=count_up((self._total.rejects, *(progress.rejects for progress in going))),
        )

    def _publish(self, *, complete: bool) -> Manifest:
        """Write the manifest with all receipts that are there by now."""
        manifest = refreshed(self._store, self._manifest, self._receipts)
        limit = self._plan.survey.limit
        whole = complete and not limit and len(manifest.receipts) == self._total.slices
        extra = {"limit": limit} if limit else {}
        manifest = replace(manifest, complete=whole, extra=extra)
        write_bytes(self._store, MANIFEST, manifest.to_bytes())
        if whole and self._receipts:
            tidy(self._store, manifest)
        if self._total.slices > len(self._manifest.receipts):
            _sweep(self._store)  # a worker that was killed cleans up nothing
        return manifest


def _sweep(store: Store) -> None:
    with contextlib.suppress(AccessError):  # S3 credentials that may write need not list uploads
        store.sweep()


def settings_of(source: Source, rules: Rules, columns: Columns) -> dict[str, Any]:
    """Everything that decides the bytes of the dataset, but for the source's content."""
    return {
        "buckets": list(rules.buckets),
        "caption_col": columns.caption,
        "check": "full" if rules.full_check else "header",
        "filter": rules.filter.text if rules.filter else "",
        "format": FORMAT,
        "image_col": columns.image,
        "max_area": rules.max_area,
        "max_aspect_ratio": rules.max_aspect_ratio,
        "max_caption": rules.max_caption,
        "max_shard_size": rules.max_shard_nbytes,
        "max_side": rules.recode.max_side if rules.recode else 0,
        "min_caption": rules.min_caption,
        "min_size": rules.min_size,
        "reencode": f"jpg:{rules.recode.quality}" if rules.recode else "",
        "samples_per_shard": rules.samples_per_shard,
        "source": source.kind,
    }


def phases(manifest: Manifest) -> dict[int, tuple[int, int]]:
    """For each training resolution, how many samples and shards its buckets hold."""
    buckets = sorted(manifest.settings["buckets"])
    found = {}
    for resolution in buckets:
        of_phase = set(buckets_of_phase(resolution, buckets))
        shards = [shard for shard in manifest.shards if shard.bucket in of_phase]
        found[resolution] = (sum(shard.samples for shard in shards), len(shards))
    return found


def _check_apart(source: str, images: str) -> None:
    """Refuse an output that the next run would take for part of its source, and a source that
    --overwrite could take for part of the output."""
    ours, theirs = (_real(url).rstrip("/") + "/" for url in (images, source))
    if ours.startswith(theirs):
        raise UsageError(f"{images} lies in the source {source}: write the shards somewhere else")
    if theirs.startswith(ours):
        raise UsageError(f"{source} lies in the output {images}: write the shards somewhere else")


def _real(url: str) -> str:
    return url if "://" in url else str(Path(url).resolve())
