"""Make a runner: of processes on this machine, of actors on a Ray cluster, or in this process.

`runner_for` makes the runner of a job that may be small: it has no more workers than the job has
units, or none. `job_largest_first` is such a job, of units whose sizes are known.
"""

from collections.abc import Callable, Generator, Iterable
from functools import partial
from itertools import islice
from typing import Any, cast

from wdsprep.cpus import usable_cpus
from wdsprep.runners.base import (
    Call,
    Event,
    Message,
    Runner,
    RunnerSettings,
    SlotMessage,
    Unit,
    Work,
)
from wdsprep.runners.job import Job, StatusListener, U
from wdsprep.runners.options import WorkerOptions, with_runner
from wdsprep.runners.schedule import drive
from wdsprep.runners.worker import Worker, open_worker


def make_runner(kind: str, settings: RunnerSettings) -> Runner:
    """Return the runner of a kind, `local` or `ray`."""
    if kind == "local":
        from wdsprep.runners.local import LocalRunner

        return LocalRunner(settings)
    from wdsprep.runners.ray.runner import RayRunner

    return RayRunner(settings)


HERE_NBYTES = 64 << 20  # less than this is read in the time that worker processes take to start


class InProcessRunner:
    """A runner that does one unit after another in this process.

    Failures are judged as those of workers, but a unit that ends its process ends the run.
    """

    def __init__(self, max_attempts: int = 3) -> None:
        self._settings = RunnerSettings(max_attempts=max_attempts)
        self._work: Work | None = None
        self._worker: Worker | None = None
        self._order = 0
        self._messages: Generator[Message, None, None] | None = None

    def run(self, work: Work, units: Iterable[Unit]) -> Generator[Event, None, None]:
        self._work = work
        return drive(self, units, self._settings, workers=1)

    def start(self, slot: int) -> None:  # noqa: ARG002  there is one
        self._worker, message = open_worker(lambda: cast("Work", self._work))
        self._order, self._messages = 0, (opened for opened in [message])

    def give(self, slot: int, order: int, unit: Unit) -> None:  # noqa: ARG002
        if self._worker is not None:
            self._order, self._messages = order, self._worker.do(unit)

    def end(self, slot: int, *, is_stuck: bool = False) -> str:  # noqa: ARG002
        self.stop()
        return ""

    def hear(self) -> Iterable[SlotMessage]:
        return ((0, self._order, message) for message in islice(self._messages or (), 1))

    def stop(self) -> None:
        if self._messages is not None:
            self._messages.close()
        if self._worker is not None:
            self._worker.stop()


def runner_for(
    options: WorkerOptions,
    units: int,
    nbytes: int,
    *,
    on_message: Callable[[str], None],
    name: str,
    is_safe: bool = False,
) -> Runner:
    """Return the runner of a job: in this process if all units together have at most 64 MiB.

    Otherwise the runner has workers, on this machine no more than there are units. If that is one
    worker on this machine and the work `is_safe`, the runner is in this process too: to verify
    400 MB then takes 0.7 of the processor time. Safe work runs none of the libraries that may end
    a process over a damaged file. `on_message` gets a line if Ray is used, and Ray shows `name`.
    """
    if nbytes <= HERE_NBYTES:
        return InProcessRunner(options.max_attempts)
    options = with_runner(options, on_message)
    most = options.least or (usable_cpus() if options.runner == "local" else 0)
    workers = min(most, units)
    if is_safe and options.runner == "local" and workers == 1:
        return InProcessRunner(options.max_attempts)
    settings = RunnerSettings(
        workers=workers,
        max_workers=options.most,
        max_attempts=options.max_attempts,
        address=options.ray_address,
        name=name,
    )
    return make_runner(options.runner, settings)


def job_largest_first(
    options: WorkerOptions,
    do_unit: Call,
    units: Iterable[U],
    *,
    name: str,
    is_safe: bool = False,
    on_status: StatusListener | None = None,
) -> Job[U, Any]:
    """Return a job of units that are all known beforehand, the largest first.

    So no worker begins a large unit at the end. `do_unit` is a function, or a `partial` of one, for
    which workers prepare nothing. The runner is that of `runner_for`. The listener of the options
    hears of the status, unless `on_status` is given.
    """
    units = sorted(units, key=lambda unit: -unit.nbytes)
    nbytes, listener = sum(unit.nbytes for unit in units), options.listener_or_mute
    runner = runner_for(
        options, len(units), nbytes, on_message=listener.on_message, name=name, is_safe=is_safe
    )
    work = partial(prepare_nothing, do_unit)
    return Job(runner, work, units, on_status=on_status or listener.on_status)


def prepare_nothing(do_unit: Call) -> Call:
    return do_unit
