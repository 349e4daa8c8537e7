"""Who does units of work: processes on this machine, or Ray actors.

1. A *unit* is small, has a name and can be done twice without harm. *Work* is what is done with it.
2. A driver keeps each worker supplied: with its next unit when it is idle, or with up to
   `units_per_worker` at once. It reads units as lazily as that needs.
3. A unit that raised, or killed its worker, is tried again; after `max_attempts` it is
   quarantined and the rest is finished. A worker lost to a removed node costs no attempt.
4. A worker that dies with several units leaves *suspects*: from then on each is given alone,
   so that the one which kills is told from its neighbours, and only that is quarantined. A place
   where all die is given up, and their last attempt is made elsewhere.
5. A worker whose units come no further for long (`stuck_workers`) is ended, and judged as if it had
   died.
6. A worker that cannot open costs the run one place, which is given up after `max_attempts`, unless
   what is wrong is the request, or no worker was ever ready: that ends the run.
7. A unit may say more by what it raises: `HopelessError`, that it need not be tried again;
   `BrokenWorkerError`, that its worker is as good as dead; a `WdsprepError`, that the whole
   run cannot go on: everything stops, and the driver raises it.
8. A worker that finds another version of wdsprep than its driver's unpickles nothing: the run ends,
   and says what is where (`worker_versions`).

`job` is the units of one command, where they stand and who hears of it; `run` makes a dataset of
its events. `schedule` decides who gets which unit, and what a failure costs; `local` and `ray`
carry its messages to workers and back, `stuck_workers` ends what hangs; `in_process` does without
workers, and judges failures alike. `worker` is the side of a worker that both kinds share,
`local_worker` the rest of a local one. `base` has what all of these tell each other, `options` the
options that several commands have. `track` tells Weights & Biases or TensorBoard how far a run
is.

    job = Job(make_runner("local", workers=8), work, units)
    with contextlib.closing(job):  # which ends the workers, also after an exception
        for unit, result in job.results(): ...
    job.quarantined  # what failed for good

In: Work, and the units to do it on.
Out: Events: progress, results, what was set aside. Of a whole run, the published manifest.
"""

from __future__ import annotations

from collections.abc import Sequence

from wdsprep.errors import UsageError
from wdsprep.runners.base import Runner
from wdsprep.runners.options import check_span
from wdsprep.text import brief


def make_runner(
    kind: str,
    *,
    workers: int = 0,
    max_workers: int = 0,
    max_attempts: int = 3,
    units_per_worker: int = 1,
    gpus: Sequence[str] = (),
    name: str = "work",
    phase: str = "",
    units: int = 0,
    address: str | None = None,
    cpus_per_worker: float = 1,
    gpus_per_worker: float = 0,
    accelerator_type: str | None = None,
    dashboard: bool = False,
) -> Runner:
    """Return the runner of a kind: `local` or `ray`.

    `workers=0` means as many as there is room for. With `max_workers` a cluster begins with
    `workers`, and gets up to that many as machines join it. A worker does `units_per_worker` at
    the same time, or fewer if its work asks for fewer. `gpus` are shared out among local
    workers, each of which sees one of them; Ray hands out its own. The parameters from `name`
    on are for Ray alone, whose metrics show `phase` and how many of the `units` are left.
    """
    if workers < 0 or max_attempts < 1:
        raise UsageError(f"{workers} workers, {max_attempts} attempts: give 0 and 1 or more")
    if units_per_worker < 1:
        raise UsageError(f"{units_per_worker} units at a time for a worker: give 1 or more")
    if max_workers and max_workers < workers:
        raise UsageError(f"{workers}:{max_workers} workers: the least comes first")
    check_span(kind, workers, max_workers)
    if kind == "local":
        from wdsprep.runners.local import LocalRunner

        return LocalRunner(
            workers=workers,
            max_attempts=max_attempts,
            units_per_worker=units_per_worker,
            gpus=tuple(gpus),
        )
    if kind == "ray":
        from wdsprep.runners.ray.runner import RayRunner

        return RayRunner(
            workers=workers,
            max_workers=max_workers,
            max_attempts=max_attempts,
            units_per_worker=units_per_worker,
            name=name,
            phase=phase,
            units=units,
            address=address,
            cpus_per_worker=cpus_per_worker,
            gpus_per_worker=gpus_per_worker,
            accelerator_type=accelerator_type,
            dashboard=dashboard,
        )
    raise UsageError(f"there is no runner {brief(kind)}: choose local or ray")
