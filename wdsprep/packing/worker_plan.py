"""The workers of `pack`: how many, with how many threads and requests; and their work.

The limits on requests to web servers hold for a machine, and its workers share them. If it has more
cores than the requests that one host may get at a time, it has fewer workers with more threads
each. `plan_workers` has the rules and only computes; `plan_for_machines` looks up the machines.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from wdsprep.cpus import usable_cpus
from wdsprep.dataset.receipts import Settings
from wdsprep.fetch.options import FetchRules
from wdsprep.packing.options import PackRules
from wdsprep.runners.base import Runner, RunnerSettings
from wdsprep.runners.make_runner import make_runner
from wdsprep.runners.options import WorkerOptions
from wdsprep.sources.base import Source

if TYPE_CHECKING:
    from wdsprep.packing.worker import PackWorker


SLICES_OF_URLS = 3  # under way in a worker: the last rows of one hold up nobody


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedWorkers:
    """The workers that the user asks for.

    On a cluster, 0 `workers` means as many as it has room for, and `node_cpus` is the number of
    cores of its largest machine. Otherwise all workers are on one machine.
    """

    workers: int
    node_cpus: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PackWorkerPlan:
    workers: int
    threads: int
    slices: int = 1
    """The number of slices that each worker has at a time."""
    cpus: int = 1
    """The cores of each worker, if Ray places the workers."""
    fetch: FetchRules | None = None
    """The rules of downloads with a worker's share of requests, for a table of URLs."""


def plan_workers(wanted: WantedWorkers, *, slices: int, fetch: FetchRules | None) -> PackWorkerPlan:
    """Return the plan of the workers for a given number of slices.

    If there are fewer slices than workers, fewer workers start, and each decodes in several
    threads. The workers of a machine share the requests that `fetch` allows.
    """
    threads = max(1, wanted.workers // max(1, slices))
    workers = min(wanted.workers, slices)
    if fetch is None:
        return PackWorkerPlan(workers=workers, threads=threads)
    bound = min(fetch.per_host, fetch.in_flight)
    cpus, here = 1, min(workers, bound)
    if cores := wanted.node_cpus:
        cpus = 1 if min(cores, workers or cores) <= bound else -(-cores // bound)
        here = min(cores // cpus, workers or cores)
        threads = max(threads, cpus)
    elif here:
        workers, threads = here, max(1, wanted.workers // here)
    return PackWorkerPlan(
        workers=workers,
        threads=threads,
        slices=min(SLICES_OF_URLS, -(-slices // workers)) if workers else SLICES_OF_URLS,
        cpus=cpus,
        fetch=_share(fetch, here),
    )


def _share(rules: FetchRules, workers: int) -> FetchRules:
    """Return the rules of one worker, with its share of the requests that a machine may make."""
    return replace(
        rules,
        in_flight=max(1, rules.in_flight // max(1, workers)),
        per_host=max(1, rules.per_host // max(1, workers)),
    )


def plan_for_machines(
    options: WorkerOptions, *, slices: int, fetch: FetchRules | None
) -> PackWorkerPlan:
    """Return the plan of the workers on this machine, or on the machines of a Ray cluster.

    If no cluster is there, the run starts a Ray that has this machine alone.
    """
    workers, node_cpus = options.most or options.least, 0
    if options.runner == "ray":
        from wdsprep.runners.ray.cluster import cluster_resources

        nodes = cluster_resources(options.ray_address)
        if nodes is not None:
            node_cpus = max(1, max((int(node.get("CPU", 0)) for node in nodes), default=0))
    if not node_cpus:
        workers = workers or usable_cpus()
    wanted = WantedWorkers(workers=workers, node_cpus=node_cpus)
    return plan_workers(wanted, slices=slices, fetch=fetch)


def runner_of(options: WorkerOptions, worker_plan: PackWorkerPlan) -> Runner:
    """Return a runner that starts the planned workers."""
    grows = bool(options.most)
    settings = RunnerSettings(
        workers=min(options.least, worker_plan.workers) if grows else worker_plan.workers,
        max_workers=worker_plan.workers if grows else 0,
        units_per_worker=worker_plan.slices,
        max_attempts=options.max_attempts,
        address=options.ray_address,
        cpus_per_worker=worker_plan.cpus,
        name="pack",
    )
    return make_runner(options.runner, settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackWork:
    """The picklable description of a worker of `pack`, which a runner opens."""

    source: Source
    images: str
    rules: PackRules
    settings: Settings
    edition: str = ""
    """The mark of the dataset's edition."""
    generations: tuple[int, ...] = (0,)
    threads: int = 1
    retries: frozenset[str] = frozenset()
    """The names of the retry slices that are known."""
    fetch_rules: FetchRules | None = None
    """The rules of downloads, for a table of URLs."""
    allowed_more: tuple[str, ...] = ()
    """The policies that these rules allow beyond the settings of the dataset."""

    def open(self) -> "PackWorker":
        from wdsprep.packing.worker import PackWorker  # images and the client: for workers alone

        return PackWorker(self)
