"""`pack`: turn a source into an image dataset, slice by slice, on any number of workers.

The slices that are left go to a runner. The shards of a slice depend on the slice and the rules
alone, so the dataset is the same to the byte for every runner, worker count and history of kills.

`pack` reads the options, and imports the code that does the work only when the work begins.
"""

from itertools import chain
from typing import TYPE_CHECKING

from wdsprep.errors import UsageError
from wdsprep.fetch.options import DOWNLOADING
from wdsprep.images.headers import CAPTIONS
from wdsprep.options import options_given_under, takes_options
from wdsprep.packing.options import PackOptions, PackRules, settings_of
from wdsprep.runners.options import with_runner
from wdsprep.runners.track import track_run

if TYPE_CHECKING:
    from wdsprep.runners.run import Outcome


@takes_options(PackOptions)
def pack(options: PackOptions) -> "Outcome":
    """Pack the images of `source` into the dataset `images`, by resolution.

        packed = wdsprep.pack("downloads", "shards/images", min_size=300)
        packed.samples, packed.manifest.rejects, packed.is_damaged

    The options are those of `wdsprep pack`, spelled as there ("2GB", "jpg:95", "4:32" workers) or
    as plain numbers; `track` is wandb or tensorboard. After an interruption, the same call
    continues the run.
    """
    from wdsprep.dataset.settings import loosened
    from wdsprep.packing.retry_rejected import Curable, Retries, read_retries
    from wdsprep.packing.slices import make_plan, restore_inputs, survey_source
    from wdsprep.packing.worker_plan import PackWork, plan_for_machines, runner_of
    from wdsprep.runners.run import Run, do_runs, open_dataset_to_write, write_generations
    from wdsprep.sources.base import check_slices
    from wdsprep.sources.patterns import is_glob
    from wdsprep.sources.recognise import recognise
    from wdsprep.store import open_store
    from wdsprep.store.base import absolute, check_apart
    from wdsprep.store.remote import ReadOnly

    source, images = absolute(options.source), absolute(options.images)  # workers run elsewhere
    rules, fetch = options.part(PackRules), options.fetching
    if isinstance(place := open_store(images), ReadOnly):  # said before a long listing
        raise place.write_error()
    listener = options.heard_by
    found = recognise(
        source,
        columns=rules.columns,
        rows_per_item=rules.samples_per_shard,
        max_nbytes=rules.max_nbytes,
        input_format=options.input_format,
    )
    has_urls = found.kind == "urls"
    if options.retry_rejected and not has_urls:
        raise UsageError(
            f"{source} is not a table of URLs: leave --retry-rejected out, which fetches URLs again"
        )
    if not has_urls and (idle := options_given_under(options, DOWNLOADING)):
        listener.told(f"{source} holds no URLs to fetch: {', '.join(idle)} changes nothing here")
    if found.kind not in ("folder", "tars") and rules.columns.caption_ext != CAPTIONS:
        raise UsageError(f"{source} holds tables: give their captions by --caption-col")
    if found.kind != "folder" and rules.repeats_from_folders:
        raise UsageError(f"{source} is no folder of images: leave --repeats-from-folders out")
    check_apart(found.url if is_glob(source) else source, images)
    seen = survey_source(found, options.limit, lambda count: listener.listed(source, count, 0))
    slice_size = rules.samples_per_shard if found.kind == "folder" else 1
    check_slices(-(-seen.count // slice_size))  # before --overwrite removes anything
    listener.begun(seen)
    settings = settings_of(options, found.kind)
    edition, manifest = open_dataset_to_write(
        images, "images", settings, overwrite=options.overwrite
    )
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
        append=options.append,
        compared=listener.compared,
    )
    if plan.generations != manifest.generations:
        manifest = write_generations(edition, manifest, plan.generations)
    if options.retry_rejected:
        curable = Curable(fetch=fetch, larger="max_bytes" in more)
        retries = retries.extended(manifest, curable, size=rules.samples_per_shard)
    again = retries.pending(manifest)
    count = plan.count + len(again)
    if count:
        options = with_runner(options, listener.told)
    worker_plan = plan_for_machines(options, slices=count, fetch=fetch if has_urls else None)
    work = PackWork(
        source=seen.source,
        images=images,
        rules=rules,
        settings=manifest.settings,
        edition=edition.mark,
        generations=plan.generations,
        threads=worker_plan.threads,
        retries=frozenset(part.name for part in retries.slices),
        fetch_rules=worker_plan.fetch,
        allowed_more=more,
    )
    runner = runner_of(options, worker_plan) if count else None
    run = Run(
        edition,
        manifest,
        count=count,
        samples=max(0, seen.samples - manifest.inputs) + sum(part.samples for part in again),
        limit=options.limit,
        extra=lambda: {"left_out": dict(seen.left_out)} if seen.left_out else {},
        settle=retries.settle,
    )
    pending = retries.apart_from(chain(plan.pending(), again))
    with track_run(
        options.track if count else "",
        [images],
        listener,
        settings=manifest.settings,
        before=manifest.samples,
    ) as status:
        (packed,) = do_runs([run], runner, work, pending, status=status)
    return packed
