"""What drivers, runners and workers tell each other: units, work, settings, what became of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from wdsprep.errors import WdsprepError

PATIENCE_S = 2700.0
"""The seconds for which a worker may make no progress: longer than eight attempts at a server that
never answers. Pages say it in minutes."""
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


Call: TypeAlias = Callable[[Any], Generator[Any, None, Any]]
"""A function that does a unit: it yields progress, cumulative for the unit, and returns the result.

With several units per worker it is called in several threads at once, and each of its generators
has to yield at least every half second: a worker that is told to stop closes them there, so that
their context managers clean up. If it is an object with a `close()`, that is called afterwards, if
the worker ends in order. If it has a number `units_at_once`, the worker takes no more units than
that. A worker that does one unit at a time is interrupted on the spot when it is a local process;
as a Ray actor it stops at the next yield too.
"""
Work: TypeAlias = Callable[[], Call]
"""A function that prepares a worker, and returns the function that does a unit.

It is called once in each worker, which gets it pickled: by name, often as a `partial` with the
description of a job. It imports what workers alone need.
"""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a unit failed, or why a worker is gone."""

    reason: str
    trace: str = ""
    is_hopeless: bool = False
    """Another attempt at the unit would fail the same way."""
    is_of_unit: bool = False
    """The error is known to have nothing to do with the place of the worker."""
    costs: bool = True
    """The end of the worker is an attempt at each unit it held: its node was not taken away."""
    place: str = ""
    """The place of a worker that is gone, as far as the worker itself could say so."""
    error: WdsprepError | None = None
    """Why a worker could not open; raised as it is where that ends the run."""


Kind: TypeAlias = Literal[
    "opening", "ready", "progress", "done", "failed", "unsure", "fatal", "lost"
]
Message: TypeAlias = tuple[Kind, Any]
"""A message of a worker, or about it, and its value:

- `opening`: it has its place and opens; comes again with another value as it gets further.
- `ready`: it is open, and takes so many units at once; 0 means as many as the schedule gives.
- `progress` of a unit, whatever the work yields. `done`: its result.
- `failed`: a `Failure` of a unit, after which the worker lives on.
- `unsure`: nobody knows whether the worker lives, so it gets no more units.
- `fatal`: an error and its trace, for which the whole run cannot go on.
- `lost`: a `Failure` of the worker, which is gone with all units it held.
"""
SlotMessage: TypeAlias = tuple[int, int, Message]
"""Slot, order, message. The order is 0 where the message is about the worker itself."""


class Runner(Protocol):
    def run(self, work: Work, units: Iterable[Unit]) -> Generator[Event, None, None]:
        """Do all units, and yield their events in the order in which they happen."""
        ...


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
    patience_s: float = PATIENCE_S
    """The seconds for which a unit may come no further, and an opening."""
    opening_patience_s: float = PATIENCE_S
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
