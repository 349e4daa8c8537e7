"""A job: units of work that a runner does, where they stand, and who hears of it.

`verify`, `export` and `duplicates` take its results. `Run` takes the events of a runner itself.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, cast

from wdsprep.errors import WorkError
from wdsprep.runners.base import Finished, Quarantined, Runner, Step, Unit, Work
from wdsprep.text import plural


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus:
    """The state of a job, units under way included.

    A count that the job does not keep is 0. `units_done` counts all units that the dataset has;
    the other counts are of this job alone. `samples_of` counts the samples in the units of this
    job, and `unfinished` those already done in units under way, which are lost if the job ends now.
    Both count rejects too.
    """

    samples: int = 0
    samples_of: int = 0
    unfinished: int = 0
    nbytes: int = 0
    nbytes_of: int = 0
    rejects: Mapping[str, int] = field(default_factory=dict)
    findings: int = 0
    units_done: int = 0
    units: int = 0
    share_done: float = 0.0

    def left_s(self, elapsed_s: float) -> float:
        """Return the time that the rest is expected to take, or 0 if nothing can be said."""
        return elapsed_s / self.share_done - elapsed_s if 0 < self.share_done < 1 else 0.0


StatusListener = Callable[[Callable[[], JobStatus]], None]
"""Is called at each event with a function that makes a JobStatus, which takes a while where many
workers are under way."""


class JobListener:
    """A listener to the progress of a command. A subclass overrides what it wants to hear.

    Functions can be given by name instead: `JobListener(on_message=print)`.
    """

    def __init__(self, **functions: Callable[..., Any]) -> None:
        for name, function in functions.items():
            getattr(JobListener, name)  # raises AttributeError for a name that nobody calls
            setattr(self, name, function)

    def on_message(self, text: str) -> None:
        """Hear a line to keep."""

    def on_listing(self, place: str, done: int, of: int) -> None:
        """Hear how many files or units of a place have been looked at.

        `of` is how many there are; 0 where nobody knows.
        """

    def on_comparison(self, done: int, of: int) -> None:
        """Hear how much has been compared with what was made before, or with each other."""

    def on_begin(self, plan: Any) -> None:
        """Hear what is known before the first worker starts, or before anything is changed."""

    def on_change(self, done: int, of: int) -> None:
        """Hear how many units or files have been changed, of how many; 0 where nobody knows."""

    def on_status(self, status: Callable[[], JobStatus]) -> None:
        """Hear of an event, with a function that returns the status of the job.

        The function takes a while where many workers are under way.
        """

    def on_step(self, step: Any) -> None:
        """Hear each step of `encode` and `score`, a unit's progress, and of `report`, a text."""

    def confirm(self, _question: Any) -> bool:
        """Answer whether to do what is done without asking where `yes` is given."""
        return False


class SizedUnit(Unit, Protocol):
    """A unit whose steps tell how many of its bytes are done."""

    @property
    def nbytes(self) -> int: ...


U = TypeVar("U", bound=SizedUnit)
R = TypeVar("R")


class Job(Generic[U, R]):
    """Units that a runner works through. Closing the job ends its workers.

    The job only collects the units that failed for good, in `quarantined`, and does not judge them.
    """

    def __init__(
        self, runner: Runner, work: Work, units: Sequence[U], *, on_status: StatusListener
    ) -> None:
        self._events = runner.run(work, units)
        self._on_status, self._units = on_status, len(units)
        self._nbytes_of = sum(unit.nbytes for unit in units)
        self._under_way: dict[str, object] = {}
        self._nbytes = self._units_done = 0
        self.quarantined: list[Quarantined] = []

    def close(self) -> None:
        self._events.close()

    def results(self) -> Iterator[tuple[U, R]]:
        """Do the units, and yield each finished unit with its result.

        Units that failed for good go into `quarantined`. `on_status` is called after each event.
        """
        for event in self._events:
            unit = cast("U", event.unit)
            if isinstance(event, Step):
                self._under_way[unit.name] = event.value
            else:
                self._under_way.pop(unit.name, None)
                self._nbytes += unit.nbytes
                self._units_done += 1
            if isinstance(event, Quarantined):
                self.quarantined.append(event)
            elif isinstance(event, Finished):
                yield unit, cast("R", event.result)
            self._on_status(self.status)

    def status(self) -> JobStatus:
        """Return the state of a job whose units have sizes and report their progress in bytes."""
        nbytes = self._nbytes + sum(cast("Iterable[int]", self._under_way.values()))
        return JobStatus(
            nbytes=nbytes,
            nbytes_of=self._nbytes_of,
            units_done=self._units_done,
            units=self._units,
            share_done=nbytes / max(1, self._nbytes_of),
        )


def check_all_done(quarantined: Sequence[Quarantined], noun: str, done: str, remedy: str) -> None:
    """Raise WorkError if a unit failed, for commands whose result needs all units.

    In the message `noun` is the word for a unit, `done` what could not be done, such as "exported",
    and `remedy` the next step.
    """
    if quarantined:
        first = quarantined[0]
        raise WorkError(
            f"{plural(len(quarantined), noun)} could not be {done}, such as "
            f"{first.unit.name} ({first.reason}): {remedy}"
        )
