"""What drivers, runners and workers tell each other: units, work, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

PROGRESS_S = 0.25
"""The seconds between two reports of a unit's progress."""


class BrokenWorkerError(Exception):
    """An error of a unit after which its worker can do nothing more, and has to be replaced.

    It is judged like the death of the worker.
    """


class HopelessError(Exception):
    """An error of a unit that would fail in the same way at every attempt.

    The unit is quarantined at once, and the message is shown as it is.
    """


class Unit(Protocol):
    """A small piece of work that has a name and can be pickled."""

    @property
    def name(self) -> str: ...


class Work(Protocol):
    """The work that is done on units. Workers import it by name, and get it pickled."""

    def open(self) -> Callable[[Any], Generator[Any, None, Any]]:
        """Prepare a worker, and return the function that does a unit.

        This is called once in each worker. The function that it returns is called once for
        each unit: it yields progress (cumulative for the unit) and returns the result.

        With several units per worker that function is called in several threads at once,
        and each of its generators has to yield at least every half second: a worker that is
        told to stop closes them there, so that their context managers clean up. If the
        returned object has a `close()`, it is called after that, if the worker ends in
        order. If it has a number `units_at_once`, the worker takes no more units than that.
        A worker that does one unit at a time is interrupted on the spot when it is a local
        process; as a Ray actor it stops at the next yield too.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The progress of a unit. A unit that is tried again starts over."""

    unit: Unit
    value: object


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    unit: Unit
    result: object


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantined:
    unit: Unit
    attempts: int
    reason: str
    """What went wrong, in one line."""
    trace: str
    """The last traceback, or what is known about how the worker died."""


Event: TypeAlias = Step | Finished | Quarantined


class Runner(Protocol):
    def run(self, work: Work, units: Iterable[Unit]) -> Generator[Event, None, None]:
        """Do all units, and yield their events in the order in which they happen."""
        ...
