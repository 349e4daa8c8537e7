"""`pack`: turn a source into an image dataset, slice by slice, on any number of workers.

The slices left to do go to a runner; what a slice becomes depends on the slice and the rules alone,
so the dataset is the same to the byte for every runner, worker count and history of kills.

`pack` itself is what a user calls: it reads the options, and imports what does the work when that
begins.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from wdsprep.dataset.buckets import parse_buckets
from wdsprep.dataset.digests import FORM
from wdsprep.errors import UsageError
from wdsprep.fetch.rules import FetchRules
from wdsprep.images import Recode, jpeg_quality
from wdsprep.limits import MAX_DOWNLOAD_NBYTES, MAX_NBYTES
from wdsprep.packing.filters import Filter
from wdsprep.packing.rules import Digest, PackRules
from wdsprep.runners.base import CrewOptions, SpanCrewOptions, settled
from wdsprep.runners.track import check_tracker, tracked
from wdsprep.text import at_least, names, one_of, size

if TYPE_CHECKING:
    from wdsprep.packing.slices import SourceSurvey
    from wdsprep.runners.run import Outcome, RunStatus
    from wdsprep.sources import Columns, Source


@dataclass(frozen=True, kw_only=True, slots=True)
class PackListener:
    """Hears how a run goes; each call may be left out."""

    told: Callable[[str], None] = lambda _text: None
    listed: Callable[[int], None] = lambda _count: None
    found: "Callable[[SourceSurvey], None]" = lambda _survey: None
    compared: Callable[[int, int], None] = lambda _done, _of: None
    """How much of what has another date has been compared with what was packed, of how much."""
    status: "Callable[[Callable[[], RunStatus]], None]" = lambda _status: None


def pack(
    source: "str | os.PathLike[str]" = "downloads",
    images: "str | os.PathLike[str]" = "shards/images",
    *,
    input_format: str = "auto",
    buckets: str | Iterable[int] = "256,512",
    samples_per_shard: int = PackRules.samples_per_shard,
    max_shard_size: int | str = "2GB",
    check: str = "full",
    min_size: int = PackRules.min_size,
    max_area: int = PackRules.max_area,
    max_aspect_ratio: float = PackRules.max_aspect_ratio,
    min_caption: int = PackRules.min_caption,
    max_caption: int = PackRules.max_caption,
    filter: str = "",
    reencode: int | str = "",
    max_side: int = 0,
    caption_col: str = "",
    image_col: str = "",
    url_col: str = "",
    save_additional_columns: Iterable[str] | None = None,
    verify_hash: "str | tuple[str, str] | Digest" = "",
    compute_hash: str = PackRules.compute_hash,
    timeout: float = FetchRules.timeout_s,
    retries: int = FetchRules.retries,
    requests: int = FetchRules.in_flight,
    per_host: int = FetchRules.per_host,
    max_bytes: int | str = 0,
    contact: str = FetchRules.contact,
    ignore_robots: bool = False,
    ignore_opt_outs: bool = False,
    allow_private_hosts: bool = FetchRules.allow_private,
    ignore_outage: bool = False,
    allow_s3: bool = FetchRules.allow_s3,
    retry_rejected: bool = False,
    limit: int = 0,
    workers: int | str = 0,
    runner: str = CrewOptions.runner,
    ray_address: str | None = CrewOptions.ray_address,
    max_attempts: int = CrewOptions.max_attempts,
    append: bool = False,
    overwrite: bool = False,
    track: str = "",
    listener: PackListener | None = None,
) -> "Outcome":
    """Pack the images of `source` into the dataset `images`, by resolution.

        packed = wdsprep.pack("downloads", "shards/images", min_size=300)
        packed.samples, packed.manifest.rejects, packed.is_damaged

    The options are those of `wdsprep pack`, with its spellings ("2GB", "jpg:95", "4:32" workers) or
    plain numbers; `track` is wandb or tensorboard. Interrupted or killed, the same call goes on
    where it was.
    """
    check_tracker(track)
    if append and overwrite:
        raise UsageError("--append keeps what is packed, --overwrite removes it: give one of them")
    if retry_rejected and overwrite:
        raise UsageError("--overwrite removes the rejects that --retry-rejected is for: give one")
    if 0 < max_caption < min_caption:
        raise UsageError("--max-caption is below --min-caption: no caption fits both")
    one_of(("full", "header"), check=check)
    at_least(0, limit=limit, max_side=max_side)
    if max_side and not reencode:
        raise UsageError(
            "--max-side needs --reencode, such as jpg:95: a smaller image is a new image"
        )
    from wdsprep.sources import Columns
    from wdsprep.sources.recognise import format_of

    condition = Filter(filter) if filter else None
    digest = Digest.parse(verify_hash) if verify_hash else None
    kept = None if save_additional_columns is None else names(save_additional_columns)
    nbytes = size(max_bytes)
    return _packed(
        source,
        images,
        input_format=format_of(input_format),
        rules=PackRules(
            buckets=parse_buckets(buckets),
            samples_per_shard=samples_per_shard,
            max_shard_nbytes=size(max_shard_size),
            full_check=check == "full",
            min_size=min_size,
            max_area=max_area,
            max_nbytes=nbytes or MAX_NBYTES,
            max_aspect_ratio=max_aspect_ratio,
            min_caption=min_caption,
            max_caption=max_caption,
            filter=condition,
            recode=Recode(quality=jpeg_quality(reencode), max_side=max_side) if reencode else None,
            kept=kept,
            verify=digest,
            compute_hash=compute_hash,
        ),
        columns=Columns(
            image=image_col,
            caption=caption_col,
            url=url_col,
            digest=digest.column if digest else "",
            filtered=tuple(sorted(condition.columns - {"caption"})) if condition else (),
            kept=kept or (),
        ),
        fetch=FetchRules(
            timeout_s=timeout,
            retries=retries,
            in_flight=requests,
            per_host=per_host,
            max_nbytes=nbytes or MAX_DOWNLOAD_NBYTES,
            contact=contact,
            robots=not ignore_robots,
            opt_outs=not ignore_opt_outs,
            allow_private=allow_private_hosts,
            allow_s3=allow_s3,
            minds_outage=not ignore_outage,
        ),
        options=SpanCrewOptions(
            runner=runner,
            workers=workers,
            ray_address=ray_address,
            max_attempts=max_attempts,
        ),
        limit=limit,
        append=append,
        overwrite=overwrite,
        retry_rejected=retry_rejected,
        track=track,
        listener=listener or PackListener(),
    )


def _packed(
    source: "str | os.PathLike[str]",
    images: "str | os.PathLike[str]",
    *,
    input_format: str,
    rules: PackRules,
    columns: "Columns",
    fetch: FetchRules,
    options: CrewOptions,
    limit: int,
    append: bool,
    overwrite: bool,
    retry_rejected: bool,
    track: str,
    listener: PackListener,
) -> "Outcome":
    """The bounds of `fetch` hold for a machine."""
    from wdsprep.dataset.settings import loosened
    from wdsprep.dataset.state import form_there
    from wdsprep.packing.crew import find_crew, runner_of
    from wdsprep.packing.retry_rejected import Curable, Retries, read_retries
    from wdsprep.packing.slices import make_plan, restore_inputs, survey_source
    from wdsprep.packing.work import PackWork
    from wdsprep.runners.run import Run, carry_out, opened_dataset, written_generations
    from wdsprep.sources import check_slices
    from wdsprep.sources.patterns import is_glob
    from wdsprep.sources.recognise import recognise
    from wdsprep.store.base import absolute, check_apart

    source, images = absolute(source), absolute(images)  # workers may run in other folders
    found = recognise(
        source,
        columns=columns,
        rows_per_item=rules.samples_per_shard,
        max_nbytes=rules.max_nbytes,
        input_format=input_format,
    )
    has_urls = found.kind == "urls"
    if retry_rejected and not has_urls:
        raise UsageError(
            f"{source} is no table of URLs: --retry-rejected has nothing to fetch there"
        )
    check_apart(found.url if is_glob(source) else source, images)
    seen = survey_source(found, limit, listener.listed)
    slice_size = rules.samples_per_shard if found.kind == "folder" else 1
    check_slices(-(-seen.count // slice_size))  # before --overwrite removes anything
    listener.found(seen)
    form = form_there(images, overwrite=overwrite)
    settings = settings_of(found, rules, columns, fetch, form)
    edition, manifest = opened_dataset(images, "images", settings, overwrite=overwrite)
    retries = read_retries(edition) if has_urls else Retries(edition=edition)
    more = loosened(manifest.settings, settings)
    manifest = retries.settle(manifest)
    if has_urls:
        restore_inputs(edition, manifest, seen)
    plan = make_plan(
        edition.store,
        manifest,
        seen,
        slice_size=slice_size,
        append=append,
        compared=listener.compared,
    )
    if plan.generations != manifest.generations:
        manifest = written_generations(edition, manifest, plan.generations)
    if retry_rejected:
        curable = Curable(fetch=fetch, larger="max_bytes" in more)
        retries = retries.extended(manifest, curable, size=rules.samples_per_shard)
    again = retries.pending(manifest)
    count = plan.count + len(again)
    if count:
        options = settled(options, listener.told)
    crew = find_crew(options, slices=count, fetch=fetch if has_urls else None)
    work = PackWork(
        source=seen.source,
        images=images,
        rules=rules,
        settings=manifest.settings,
        edition=edition.mark,
        generations=plan.generations,
        keeps_content=manifest.keeps_content,
        threads=crew.threads,
        retries=frozenset(part.name for part in retries.slices),
        fetch_rules=crew.fetch,
        allowed_more=more,
    )
    runner = runner_of(options, crew) if count else None
    run = Run(
        edition,
        manifest,
        count=count,
        limit=limit,
        extra=lambda: {"left_out": dict(seen.left_out)} if seen.left_out else {},
        settle=retries.settle,
        status=listener.status,
    )
    pending = retries.apart_from(chain(plan.pending(), again))
    with tracked(
        track if count else "",
        [images],
        settings=manifest.settings,
        before=manifest.samples,
        status=run.status,
        told=listener.told,
    ) as heard:
        (packed,) = carry_out([run], runner, work, pending, lambda _progress: heard())
    return packed


def settings_of(
    source: "Source",
    rules: PackRules,
    columns: "Columns",
    fetch: FetchRules,
    form: Mapping[str, Any] = FORM,
) -> dict[str, Any]:
    """Everything that decides the bytes of the dataset, but for the source's content. What may be
    fetched is the least that any slice was allowed: see `wdsprep.dataset.settings`."""
    found = {
        **form,
        "buckets": list(rules.buckets),
        "caption_col": columns.caption,
        "check": "full" if rules.full_check else "header",
        "filter": rules.filter.text if rules.filter else "",
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
