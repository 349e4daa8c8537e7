"""The settings of a runner: how many workers it has, and what each of them gets."""

from dataclasses import dataclass

from wdsprep.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerSettings:
    """The settings of a runner. Those from `name` on are for Ray alone."""

    workers: int = 0
    """The number of workers, or 0 for as many as there is room for."""
    max_workers: int = 0
    """The number of workers to which a cluster may grow from `workers`, or 0 if it may not."""
    max_attempts: int = 3
    units_per_worker: int = 1
    """The number of units that a worker does at a time, if its work does not ask for fewer."""
    gpus: tuple[str, ...] = ()
    """The values of CUDA_VISIBLE_DEVICES for local workers, one for each in turn; without them the
    variable is left as it is. Ray hands out its own GPUs."""
    name: str = "work"
    phase: str = ""
    units: int = 0
    """Metrics show the name, the phase and how many of the units are left."""
    address: str | None = None
    """The address of Ray. None: the Ray of this process, or of RAY_ADDRESS, or one started for the
    run."""
    cpus_per_worker: float = 1
    gpus_per_worker: float = 0
    accelerator_type: str | None = None

    def __post_init__(self) -> None:
        if self.workers < 0 or self.max_attempts < 1:
            raise UsageError(
                f"{self.workers} workers, {self.max_attempts} attempts: give 0 or more workers and "
                "1 or more attempts"
            )
        if self.units_per_worker < 1:
            raise UsageError(
                f"{self.units_per_worker} units at a time for each worker are too few: "
                "give 1 or more"
            )
        if self.max_workers and self.max_workers < self.workers:
            raise UsageError(f"{self.workers}:{self.max_workers} workers: the least comes first")
