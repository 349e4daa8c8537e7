"""Make a runner: of processes on this machine, of actors on a Ray cluster, or in this process.

`runner_for` makes the runner of a job that may be small: it has no more workers than the job has
units, or none. `Job` is such a job: `verify`, `export` and `duplicates` take its results, while
`Run` takes the events of a runner itself.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar, cast

from wdsprep.cpus import usable_cpus
from wdsprep.errors import WorkError
from wdsprep.runners.base import (
    Call,
    Event,
    Finished,
    Message,
    Quarantined,
    Runner,
    RunnerSettings,
    SlotMessage,
    Step,
    Unit,
    Work,
)
from wdsprep.runners.job import JobStatus
from wdsprep.runners.options import WorkerOptions, with_runner
from wdsprep.runners.schedule import drive
from wdsprep.runners.worker import Worker, open_worker
from wdsprep.text import plural


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


class SizedUnit(Unit, Protocol):
    """A unit whose steps tell how many of its bytes are done."""

    @property
    def nbytes(self) -> int: ...


U = TypeVar("U", bound=SizedUnit)


class Job(Generic[U]):
    """Units that are all known beforehand, done on the runner of `runner_for`, the largest first.

    So no worker begins a large unit at the end. `do_unit` is a function, or a `partial` of one, for
    which workers prepare nothing. The listener of the options hears of the status at each event;
    `counts` returns further fields of it. Closing the job ends its workers.
    """

    def __init__(
        self,
        options: WorkerOptions,
        do_unit: Call,
        units: Iterable[U],
        *,
        name: str,
        is_safe: bool = False,
        counts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        units = sorted(units, key=lambda unit: -unit.nbytes)
        self._units, self._nbytes_of = len(units), sum(unit.nbytes for unit in units)
        self._listener, self._counts = options.listener_or_mute, counts
        on_message = self._listener.on_message
        runner = runner_for(
            options, self._units, self._nbytes_of, on_message=on_message, name=name, is_safe=is_safe
        )
        self._events = runner.run(partial(prepare_nothing, do_unit), units)
        self._under_way: dict[str, int] = {}
        self._nbytes = self._units_done = 0
        self.quarantined: list[Quarantined] = []
        """The units that failed for good, which are collected here and not judged."""

    def close(self) -> None:
        self._events.close()

    def results(self) -> Iterator[tuple[U, Any]]:
        """Do the units, and yield each finished unit with its result."""
        for event in self._events:
            unit = cast("U", event.unit)
            if isinstance(event, Step):
                self._under_way[unit.name] = cast("int", event.value)
            else:
                self._under_way.pop(unit.name, None)
                self._nbytes += unit.nbytes
                self._units_done += 1
            if isinstance(event, Quarantined):
                self.quarantined.append(event)
            elif isinstance(event, Finished):
                yield unit, event.result
            self._listener.on_status(self.status)

    def status(self) -> JobStatus:
        nbytes = self._nbytes + sum(self._under_way.values())
        return JobStatus(
            nbytes=nbytes,
            nbytes_of=self._nbytes_of,
            units_done=self._units_done,
            units=self._units,
            share_done=nbytes / max(1, self._nbytes_of),
            **self._counts(),
        )

    def check_all_done(self, done: str, remedy: str) -> None:
        """Raise WorkError if a unit failed, for commands whose result needs all units.

        In the message `done` is what could not be done, such as "exported", and `remedy` the next
        step.
        """
        if self.quarantined:
            first = self.quarantined[0]
            raise WorkError(
                f"{plural(len(self.quarantined), 'shard')} could not be {done}, such as "
                f"{first.unit.name} ({first.reason}): {remedy}"
            )


def prepare_nothing(do_unit: Call) -> Call:
    return do_unit
