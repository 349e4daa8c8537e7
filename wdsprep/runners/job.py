"""How far a job is, which is units of work that a runner does, and who hears of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


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
