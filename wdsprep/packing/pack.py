"""`pack`: turn a source into an image dataset, slice by slice, on any number of workers.

The slices that are left go to a runner. The shards of a slice depend on the slice and the rules
alone, so the dataset is the same to the byte for every runner, worker count and history of kills.

The limits on requests to web servers hold for a machine, and its workers share them. A machine with
more cores than the requests that one host may get at a time has fewer workers, with more threads
each: `plan_workers` has the rules.

`pack` imports the code that does the work only when the work begins.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING

from wdsprep.cpus import usable_cpus
from wdsprep.errors import SourceError, UsageError
from wdsprep.fetch.options import DOWNLOADING, FetchRules
from wdsprep.options import options_given_under, takes_options
from wdsprep.packing.options import PackOptions, PackRules, settings_of
from wdsprep.runners.base import Call, RunnerSettings
from wdsprep.runners.make_runner import make_runner
from wdsprep.runners.options import WorkerOptions, with_runner
from wdsprep.sources.captions import CAPTIONS
from wdsprep.text import examples, plural

if TYPE_CHECKING:
    from wdsprep.dataset.manifest import Manifest
    from wdsprep.dataset.unit_locks import Edition
    from wdsprep.packing.retry_rejected import Retries
    from wdsprep.packing.slices import PackJob, SlicePlan, SourceSurvey
    from wdsprep.runners.run import Outcome
    from wdsprep.sources.base import Role, Source


LOOKED_AT = 100  # samples: enough to see what others have
SLICES_OF_URLS = 3
"""The slices of URLs that a worker has at a time, so that the last rows of one hold up no other."""


PackWorkerPlan = tuple[RunnerSettings, int, FetchRules | None]
"""The settings of the workers, the number of threads of each, and the rules of downloads.

The settings have the slices that a worker has at a time and, on Ray, its cores. The rules allow a
worker its share of the requests; they are None unless the source is a table of URLs.
"""


def plan_workers(
    options: WorkerOptions, *, node_cpus: int = 0, slices: int, fetch: FetchRules | None
) -> PackWorkerPlan:
    """Return the plan of the workers for a given number of slices.

    `node_cpus` is the number of cores of the largest machine of a cluster, where the user may leave
    open how many workers there are. It is 0 if all workers are on this machine.

    If there are fewer slices than workers, fewer workers start, and each decodes in several
    threads. The workers of a machine share the requests that `fetch` allows.
    """
    wanted = options.most or options.least or (0 if node_cpus else usable_cpus())
    threads, workers = max(1, wanted // max(1, slices)), min(wanted, slices)
    cores = at_once = 1
    if fetch is not None:
        # Each worker of a machine gets at least one request, in all and to each host.
        workers_allowed = min(fetch.per_host, fetch.requests)
        machine_workers = min(workers, workers_allowed)
        if node_cpus:
            # Ray fills a machine by cores: the more each worker takes, the fewer fit.
            if min(node_cpus, workers or node_cpus) > workers_allowed:
                cores = -(-node_cpus // workers_allowed)
            machine_workers = min(node_cpus // cores, workers or node_cpus)
            threads = max(threads, cores)
        elif machine_workers:
            workers, threads = machine_workers, max(1, wanted // machine_workers)
        at_once = min(SLICES_OF_URLS, -(-slices // workers)) if workers else SLICES_OF_URLS
        requests, per_host = (
            max(1, limit // max(1, machine_workers)) for limit in (fetch.requests, fetch.per_host)
        )
        fetch = replace(fetch, requests=requests, per_host=per_host)
    settings = RunnerSettings(
        # A run on a range of workers begins with the least, and grows up to what is planned.
        workers=min(options.least, workers) if options.most else workers,
        max_workers=workers if options.most else 0,
        max_attempts=options.max_attempts,
        units_per_worker=at_once,
        cpus_per_worker=cores,
        address=options.ray_address,
        name="pack",
    )
    return settings, threads, fetch


def _largest_node_cpus(options: WorkerOptions) -> int:
    """Return the number of cores of the largest machine of a Ray cluster, or 0 without a cluster.

    If no cluster is there, the run starts a Ray that has this machine alone.
    """
    if options.runner != "ray":
        return 0
    from wdsprep.runners.ray.cluster import cluster_resources

    nodes = cluster_resources(options.ray_address)
    return 0 if nodes is None else max([1, *(int(node.get("CPU", 0)) for node in nodes)])


def open_worker(job: "PackJob") -> Call:
    from wdsprep.packing.worker import PackWorker  # images and the client: for workers alone

    return PackWorker(job)


def _open_source(options: PackOptions, url: str, images: str) -> "Source":
    """Return the source at `url`, whose dataset goes to `images`.

    Raise an error if `images` is only read, if nothing at `url` can be packed, if one of the two
    places lies in the other, or if an option does not fit the kind of the source. The listener gets
    a line about options for downloads that change nothing.
    """
    from wdsprep.sources.patterns import is_glob
    from wdsprep.sources.recognise import recognise
    from wdsprep.store import open_store
    from wdsprep.store.base import check_apart
    from wdsprep.store.remote import ReadOnly

    if isinstance(target := open_store(images), ReadOnly):
        raise target.write_error()
    rules = options.part(PackRules)
    source = recognise(
        url,
        columns=rules.columns,
        rows_per_item=rules.samples_per_shard,
        max_nbytes=rules.max_nbytes,
        input_format=options.input_format,
    )
    if source.kind != "urls":
        if options.retry_rejected:
            raise UsageError(
                f"{url} is not a table of URLs: leave --retry-rejected out, which fetches URLs "
                "again"
            )
        if idle := options_given_under(options, DOWNLOADING):
            options.listener_or_mute.on_message(
                f"{url} holds no URLs to fetch: {', '.join(idle)} changes nothing here"
            )
    if source.kind not in ("folder", "tars") and rules.columns.caption_ext != CAPTIONS:
        raise UsageError(f"{url} holds tables: give their captions by --caption-col")
    if source.kind != "folder" and rules.repeats_from_folders:
        raise UsageError(f"{url} is no folder of images: leave --repeats-from-folders out")
    check_apart(source.url if is_glob(url) else url, images)
    for role in source.columns.roles:
        if role.url:
            check_apart(role.url, images)
    return source


def _survey(options: PackOptions, source: "Source", url: str) -> "SourceSurvey":
    """List the source at `url`, and check that its first samples have what the user named.

    Raise SourceError if there is nothing to pack, or if a role that is not optional has no image.
    The listener gets a line about an optional role, and about other names that nothing has.
    """
    from wdsprep.packing.slices import survey_source

    listener = options.listener_or_mute
    size = options.samples_per_shard if source.kind == "folder" else 1
    seen = survey_source(
        source, options.limit, size, lambda count: listener.on_listing(url, count, 0)
    )
    listener.on_begin(seen)
    for role, lack in _find_unseen(seen):
        if role and not role.is_optional:
            raise SourceError(f"{lack}, or give --optional-role {role.name}")
        listener.on_message(lack)
    if source.kind == "folder" and source.columns.caption_ext != CAPTIONS:
        for unseen in takewhile(
            lambda ending: ending[1:] not in seen.extensions, source.columns.caption_ext
        ):
            listener.on_message(f"no file beside an image ends in {unseen}: check --caption-ext")
    return seen


def _find_unseen(seen: "SourceSurvey") -> "Iterator[tuple[Role | None, str]]":
    """Yield each role in which none of the first samples has an image, with a text that says so.

    Yield such a text also, without a role, for each field that none of them has and that is to be
    kept, or that a filter names. Roles of a folder and columns of tables are not looked at: who
    lists or opens these finds out. Yield nothing if none of the first samples can be read.
    """
    from wdsprep.dataset.samples import Sample, role_of

    source = seen.source
    columns = source.columns
    roles = {role.name: role for role in columns.roles if source.kind != "folder"}
    options = dict.fromkeys(columns.kept, "--save-additional-columns")
    options |= dict.fromkeys(columns.filtered, "--filter")
    fields = {*options} if source.kind in ("folder", "tars") else set()
    count, others = 0, set[str]()
    rows = chain.from_iterable(source.read(item, others.add) for item in seen.items())
    for row in islice(rows, LOOKED_AT) if roles or fields else ():
        if isinstance(row, Sample):
            count += 1
            others |= row.facts.keys()
            fields -= row.facts.keys()
            for image in row.images:
                roles.pop(role_of(image.name)[0], None)
        if not (roles or fields):
            break
    unseen: list[tuple[Role | None, str, str]] = [
        *((role, f"a {role.name}", f"--role {role.name}={role.where}") for role in roles.values()),
        *((None, field, options[field]) for field in sorted(fields)),
    ]
    there = f", but {examples(sorted(others))}" if others else ""
    for role, what, option in unseen if count else ():
        first = f"none of the first {plural(count, 'sample')} has {what}{there}"
        yield role, f"{first}: check {option}"


def _plan_slices(
    options: PackOptions, edition: "Edition", manifest: "Manifest", seen: "SourceSurvey"
) -> "tuple[Manifest, SlicePlan, Retries]":
    """Compare a source with what is packed of it, and plan the slices that are left to do.

    Return also the manifest as it is after that, and the slices that retry rows of others.
    """
    from wdsprep.dataset.settings import loosened
    from wdsprep.packing.retry_rejected import Retries, read_retries
    from wdsprep.packing.slices import SlicePlan, restore_inputs
    from wdsprep.runners.run import write_generations

    has_urls = seen.source.kind == "urls"
    retries = read_retries(edition) if has_urls else Retries(edition=edition)
    manifest = retries.settle(manifest)
    if has_urls:
        restore_inputs(edition, manifest, seen)
    plan = SlicePlan(
        edition.store,
        manifest,
        seen,
        append=options.append,
        compared=options.listener_or_mute.on_comparison,
    )
    if plan.generations != manifest.generations:
        manifest = write_generations(edition, manifest, plan.generations)
    if options.retry_rejected:
        larger = "max_bytes" in loosened(manifest.settings, settings_of(options, seen.source))
        retries = retries.extended(
            manifest, options.fetching, larger=larger, size=options.samples_per_shard
        )
    return manifest, plan, retries


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
    from wdsprep.packing.slices import PackJob
    from wdsprep.runners.run import Run, do_runs, open_dataset_to_write
    from wdsprep.store.base import absolute

    source_url, images = absolute(options.source), absolute(options.images)  # workers run elsewhere
    source = _open_source(options, source_url, images)
    seen = _survey(options, source, source_url)
    settings = settings_of(options, source)
    edition, manifest = open_dataset_to_write(
        images, "images", settings, overwrite=options.overwrite
    )
    manifest, plan, retries = _plan_slices(options, edition, manifest, seen)
    retry_slices = retries.pending(manifest)
    count = plan.count + len(retry_slices)
    if count:
        options = with_runner(options, options.listener_or_mute.on_message)
    runner_settings, threads, fetch_rules = plan_workers(
        options,
        node_cpus=_largest_node_cpus(options),
        slices=count,
        fetch=options.fetching if source.kind == "urls" else None,
    )
    job = PackJob(
        source=seen.source,
        images=images,
        rules=options.part(PackRules),
        settings=manifest.settings,
        edition=edition.mark,
        generations=plan.generations,
        threads=threads,
        retries=frozenset(part.name for part in retries.slices),
        fetch_rules=fetch_rules,
        allowed_more=loosened(manifest.settings, settings),
    )
    runner = make_runner(options.runner, runner_settings) if count else None
    run = Run(
        edition,
        manifest,
        count=count,
        samples=max(0, seen.samples - manifest.inputs) + sum(part.samples for part in retry_slices),
        limit=options.limit,
        extra=lambda: {"left_out": dict(seen.left_out)} if seen.left_out else {},
        settle=retries.settle,
    )
    pending = retries.apart_from(chain(plan.pending(), retry_slices))
    (packed,) = do_runs(
        [run],
        runner,
        partial(open_worker, job),
        pending,
        listener=options.listener_or_mute,
        track=options.track,
    )
    return packed
