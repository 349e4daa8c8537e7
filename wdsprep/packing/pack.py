"""`pack`: turn a source into an image dataset, slice by slice, on any number of workers.

The slices left to do go to a runner; what a slice becomes depends on the slice and the rules alone,
so the dataset is the same to the byte for every runner, worker count and history of kills.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from wdsprep.dataset.sealed import FORMAT
from wdsprep.errors import UsageError
from wdsprep.fetch.rules import FetchRules
from wdsprep.limits import MAX_NBYTES
from wdsprep.packing.crew import PackCrew, PackCrewOptions, staff
from wdsprep.packing.judge import PackRules
from wdsprep.packing.retry_rejected import Retries, read_retries
from wdsprep.packing.slices import SourceSurvey, make_plan, restore_inputs, survey
from wdsprep.packing.worker import PackWork
from wdsprep.runners.base import Runner
from wdsprep.runners.run import Outcome, Run, RunStatus, opened_dataset, written_generations
from wdsprep.sources import Columns, Source, check_slices
from wdsprep.sources.patterns import is_glob
from wdsprep.sources.recognise import recognise
from wdsprep.store.base import absolute, check_apart


@dataclass(frozen=True, kw_only=True, slots=True)
class PackListener:
    """Hears how a run goes; each call may be left out."""

    listed: Callable[[int], None] = lambda _count: None
    found: Callable[[SourceSurvey], None] = lambda _survey: None
    status: Callable[[Callable[[], RunStatus]], None] = lambda _status: None


def pack(
    source: str,
    images: str,
    *,
    rules: PackRules,
    columns: Columns,
    find_hands: Callable[[], PackCrewOptions],
    make_runner: Callable[[PackCrew], Runner],
    fetch: FetchRules,
    limit: int = 0,
    append: bool = False,
    overwrite: bool = False,
    retry_rejected: bool = False,
    listener: PackListener | None = None,
) -> Outcome:
    """Pack `source` into the dataset `images` on the runner that is made for the crew; the URLs of
    a table are fetched by the rules of `fetch`, which hold for a machine."""
    listener = listener or PackListener()
    source, images = absolute(source), absolute(images)  # workers may run in other folders
    found = recognise(
        source,
        columns=columns,
        rows_per_item=rules.samples_per_shard,
        max_nbytes=rules.max_nbytes,
    )
    has_urls = found.kind == "urls"
    if retry_rejected and not has_urls:
        raise UsageError(
            f"{source} is no table of URLs: --retry-rejected has nothing to fetch there"
        )
    check_apart(found.url if is_glob(source) else source, images)
    seen = survey(found, limit, listener.listed)
    size = rules.samples_per_shard if found.kind == "folder" else 1
    check_slices(-(-seen.count // size))  # before --overwrite removes anything
    listener.found(seen)
    settings = settings_of(found, rules, columns, fetch)
    edition, manifest = opened_dataset(images, "images", settings, overwrite=overwrite)
    retries = read_retries(edition) if has_urls else Retries(edition=edition)
    manifest = retries.settle(manifest)
    if has_urls:
        restore_inputs(edition, manifest, seen)
    plan = make_plan(edition.store, manifest, seen, slice_size=size, append=append)
    if plan.generations != manifest.generations:
        manifest = written_generations(edition, manifest, plan.generations)
    if retry_rejected:
        retries = retries.extended(manifest, size=rules.samples_per_shard)
    again = retries.pending(manifest)
    count = plan.count + len(again)
    crew = staff(find_hands(), slices=count, fetch=fetch if has_urls else None)
    packer = PackWork(
        source=seen.source,
        images=images,
        rules=rules,
        settings=settings,
        edition=edition.mark,
        generations=plan.generations,
        threads=crew.threads,
        retries=frozenset(part.name for part in retries.slices),
        fetch_rules=crew.fetch,
    )
    runner = make_runner(crew) if count else None
    run = Run(
        edition,
        manifest,
        count=count,
        limit=limit,
        extra=lambda: {"left_out": dict(seen.left_out)} if seen.left_out else {},
        settle=retries.settle,
        status=listener.status,
    )
    return run.carry_out(runner, packer, retries.apart_from(chain(plan.pending(), again)))


def settings_of(
    source: Source, rules: PackRules, columns: Columns, fetch: FetchRules
) -> dict[str, Any]:
    """Everything that decides the bytes of the dataset, but for the source's content."""
    found = {
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
    if rules.kept is not None:
        found["save_additional_columns"] = list(rules.kept)
    if rules.verify is not None:
        found["verify_hash"] = f"{rules.verify.column}:{rules.verify.hash}"
    if rules.compute_hash:
        found["compute_hash"] = rules.compute_hash
    if source.kind != "urls" and rules.max_nbytes != MAX_NBYTES:
        found["max_bytes"] = rules.max_nbytes
    if source.kind == "urls":
        found |= {
            "max_bytes": fetch.max_nbytes,
            "opt_outs": fetch.opt_outs,
            "robots": fetch.robots,
            "url_col": columns.url,
        } | ({"allow_s3": True} if fetch.allow_s3 else {})
    return found
