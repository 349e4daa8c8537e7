"""The workers of `encode`: how many, on which device, with what share of a machine; and their work.

`settle_workers` looks up the machines; `plan_workers` has the rules and only computes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from wdsprep.cpus import usable_cpus
from wdsprep.dataset.settings import Settings
from wdsprep.encoding.gpus import visible_gpus
from wdsprep.encoding.options import SHARDS_IN_TURN, EncodeWorkerOptions
from wdsprep.errors import UsageError
from wdsprep.runners.base import RunnerSettings
from wdsprep.runners.options import with_runner
from wdsprep.sources.tars import TarsSource

if TYPE_CHECKING:
    from wdsprep.encoding.models.device import Encoder


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    cpus: float
    gpus: tuple[str, ...] = ()
    """The GPUs, as CUDA_VISIBLE_DEVICES names them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeWorkerPlan(RunnerSettings):
    """The workers of a run of `encode`: on which device, and the settings of their runner.

    `workers` is 0 on a cluster if there are to be as many as it has room for.
    """

    device: str
    runner: str
    """The kind of the runner, `local` or `ray`."""
    sizes_itself: bool = False
    """True if a worker decodes with the cores that its own node has for it."""

    @property
    def threads(self) -> int:
        """Return the number of decoding threads of a worker, or 0 if it counts its cores itself."""
        return 0 if self.sizes_itself else max(1, int(self.cpus_per_worker))

    @property
    def gpu_share(self) -> float:
        """Return the share of a GPU's memory that a worker may use.

        A worker with several GPUs may use all the memory of each.
        """
        return min(1.0, self.gpus_per_worker or 1.0)


def settle_workers(
    options: EncodeWorkerOptions, told: Callable[[str], None], *, doing: str = "encoding"
) -> EncodeWorkerPlan:
    """Return the plan of the workers, with a runner in place of `auto`.

    The user is told which runner that is, and why, in a line with `doing`, the word for what the
    workers do. The workers are on this machine, or on the machines of a Ray cluster.
    """
    chosen = with_runner(options, told, count_gpus=lambda: len(this_machine(options.device).gpus))
    if chosen.runner == "ray" and (machines := cluster_machines(chosen.ray_address)) is not None:
        return plan_workers(chosen, machines, is_cluster=True)
    machine = this_machine(options.device)
    if options.runner == "auto" and chosen.runner == "local":
        here = "one GPU" if machine.gpus else "no GPU"
        told(
            f"{doing} with local processes: {'the CPU alone' if options.device == 'cpu' else here} "
            "here and no --ray-address (--runner ray to use Ray)"
        )
    return plan_workers(chosen, [machine], is_cluster=False)


def plan_workers(
    options: EncodeWorkerOptions, machines: Sequence[Machine], *, is_cluster: bool
) -> EncodeWorkerPlan:
    """Return the plan of the workers on these machines.

    A GPU worker gets one GPU, or a share of one if there are more workers than GPUs, and its
    share of the cores of its machine. A CPU worker gets a whole machine, as torch computes with all
    cores. More machines may join a cluster later, with other numbers of cores. So workers ask for
    the smallest number that is known, and a GPU worker there counts the cores of its node itself.
    """
    with_gpus = [machine for machine in machines if machine.gpus]
    if is_cluster and options.device == "auto" and not with_gpus:
        raise UsageError(
            "the Ray cluster has no GPU now: give --device cuda and a number of --workers if GPUs "
            "will join it, or --device cpu to use its CPUs"
        )
    plan = EncodeWorkerPlan(
        device=options.device if options.device != "auto" else "cuda" if with_gpus else "cpu",
        runner=options.runner,
        workers=options.least,
        max_workers=options.most,
        max_attempts=options.max_attempts,
        units_per_worker=SHARDS_IN_TURN,
        address=options.ray_address,
        accelerator_type=options.accelerator_type,
    )
    if plan.device == "cuda":
        if not with_gpus and not is_cluster:
            raise UsageError("there is no GPU that torch can use here: leave --device out")
        gpus = () if is_cluster else with_gpus[0].gpus
        share = options.gpus_per_worker or 1.0
        if gpus and options.least and not options.gpus_per_worker:
            share = 1 / ceil(options.least / len(gpus))
        cores = [machine.cpus * share / len(machine.gpus) for machine in with_gpus]
        return replace(
            plan,
            workers=options.least or int(len(gpus) / share),
            cpus_per_worker=options.cpus_per_worker or max(1.0, min(cores, default=1.0) // 1),
            gpus_per_worker=share,
            gpus=gpus,
            sizes_itself=is_cluster and not options.cpus_per_worker,
        )
    if options.gpus_per_worker:
        raise UsageError("--gpus-per-worker is for GPUs, and this run uses the CPU: leave it out")
    cpus = options.cpus_per_worker or min((machine.cpus for machine in machines), default=1.0)
    if options.least and not options.cpus_per_worker and not is_cluster:
        cpus = max(1.0, machines[0].cpus // options.least)
    workers = options.least or (0 if is_cluster else max(1, int(machines[0].cpus // cpus)))
    return replace(plan, workers=workers, cpus_per_worker=cpus)


def this_machine(device: str) -> Machine:
    return Machine(cpus=usable_cpus(), gpus=() if device == "cpu" else visible_gpus())


def cluster_machines(address: str | None) -> list[Machine] | None:
    """Return the machines of a Ray cluster; None if Ray would be started here."""
    from wdsprep.runners.ray.cluster import cluster_resources

    if (nodes := cluster_resources(address)) is None:
        return None
    return [
        Machine(cpus=node["CPU"], gpus=tuple(map(str, range(int(node.get("GPU", 0))))))
        for node in nodes
        if node.get("CPU")
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeJob:
    """The picklable description of what a worker of `encode` does.

    A unit of work is a `JointUnit`. Its parts are image shards, each with the number of the dataset
    in `datasets` that what is made of them goes to.
    """

    tars: TarsSource
    """The source that reads the image shards."""
    datasets: Sequence[tuple[str, Settings, str]] = ()
    """The place and the settings of each dataset, and the mark of its edition."""
    make_encoder: Callable[[], "Encoder"]
    """Loads the models, in the worker."""
    worker_plan: EncodeWorkerPlan
    max_area: int
    batch_size: int
