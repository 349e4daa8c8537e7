"""`pack`: turn a source into an image dataset, slice by slice, on any number of workers.

The slices left to do go to a runner; what a slice becomes depends on the slice and the rules alone,
so the dataset is the same to the byte for every runner, worker count and history of kills.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from wdsprep.buckets import buckets_of_phase
from wdsprep.dataset import claim, clear, refreshed
from wdsprep.manifest import FORMAT, MANIFEST, Manifest
from wdsprep.packer import Packer, Rules
from wdsprep.resume import Survey, make_plan, survey
from wdsprep.run import Outcome, Run, Status, sweep
from wdsprep.runners import Runner
from wdsprep.sources import Columns, Source
from wdsprep.sources.recognise import recognise
from wdsprep.store import absolute, check_apart, open_store, write_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """Hears how a run goes; each call may be left out."""

    listed: Callable[[int], None] = lambda _count: None
    found: Callable[[Survey], None] = lambda _survey: None
    status: Callable[[Callable[[], Status]], None] = lambda _status: None


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
) -> Outcome:
    """Pack `source` into the dataset `images` on the workers of `make_runner(workers)`. Where there
    are fewer slices than workers, each of fewer workers decodes in several threads."""
    listener = listener or Listener()
    source, images = absolute(source), absolute(images)  # workers may run in other folders
    found = recognise(source, columns=columns, rows_per_item=rules.samples_per_shard)
    check_apart(found.url if set(source) & set("*?[") else source, images)
    seen = survey(found, limit, listener.listed)
    listener.found(seen)
    store = open_store(images)
    if overwrite:
        clear(store, "images")
    sweep(store)
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
    run = Run(store, manifest, count=plan.count, limit=limit, tidies=True, status=listener.status)
    return run.carry_out(runner, packer, plan.pending())


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
