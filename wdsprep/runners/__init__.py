"""Who does units of work: processes on this machine, or Ray actors.

1. A *unit* is small, has a name and can be done twice without harm. *Work* is what is done with it.
2. A driver keeps each worker supplied: with its next unit when it is idle, or with up to
   `units_per_worker` at once. It reads units as lazily as that needs.
3. A unit that raised, or killed its worker, is tried again; after `max_attempts` it is
   quarantined and the rest is finished. A worker lost to a removed node costs no attempt.
4. A worker that dies with several units leaves *suspects*: from then on each is given alone,
   so that the one which kills is told from its neighbours, and only that is quarantined.
5. A worker whose units come no further for half an hour is ended, and judged as if it had died.
6. A unit may say more by what it raises: `HopelessError`, that it need not be tried again;
   `BrokenWorkerError`, that its worker is as good as dead; a `WdsprepError`, that the whole
   run cannot go on: everything stops, and the driver raises it.

    with contextlib.closing(make_runner("local", workers=8).run(work, units)) as events:
        for event in events: ...

Closing the events (or leaving them by an exception) ends the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from wdsprep.errors import UsageError

__all__ = [
    "BrokenWorkerError",
    "Event",
    "Finished",
    "HopelessError",
    "Quarantined",
    "Runner",
    "Step",
    "Unit",
    "Work",
    "make_runner",
]


class BrokenWorkerError(Exception):
    """Raised by a unit: this worker can do nothing more, and needs to be replaced. It is judged
    like the worker's death."""


class HopelessError(Exception):
    """Raised by a unit that would fail in the same way at every attempt: it is quarantined
    at once. The message is shown as it is."""


class Unit(Protocol):
    """Small and picklable."""

    @property
    def name(self) -> str: ...


class Work(Protocol):
    """Picklable, and importable by name where the workers run."""

    def open(self) -> Callable[[Any], Generator[Any, None, Any]]:
        """Called once in each worker. What it returns is called once a unit: it yields
        progress (cumulative for the unit) and returns the result.

        With several units per worker it is called in several threads at once, and each of
        its generators yields at least every half second: a worker that is told to stop
        closes them there, so that their context managers clean up. A `close()` of the
        returned object is called after that, where a worker ends in order. A worker that
        does one unit at a time is interrupted on the spot when it is a local process; as a
        Ray actor it stops at the next yield too."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Progress on the way. A unit that is tried again starts over."""

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
    """One line."""
    trace: str
    """The last traceback, or what is known about how the worker died."""


Event: TypeAlias = Step | Finished | Quarantined


class Runner(Protocol):
    def run(self, work: Work, units: Iterable[Unit]) -> Generator[Event, None, None]:
        """Do all units, in the order in which they get done."""
        ...


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
    """`workers=0`: as many as there is room for. With `max_workers` a cluster begins with
    `workers` and gets up to that many as machines join it. `units_per_worker` are held by a
    worker at the same time. `gpus` go round the local workers, each of which sees one of them; Ray
    hands out its own. All from `name` on is for Ray alone, whose metrics say `phase` and how
    many `units` are left."""
    if workers < 0 or max_attempts < 1:
        raise UsageError(f"{workers} workers and {max_attempts} attempts make no run")
    if units_per_worker < 1:
        raise UsageError(f"a worker cannot hold {units_per_worker} units: it takes at least 1")
    if max_workers and max_workers < workers:
        raise UsageError(f"{workers}:{max_workers} workers: the least comes first")
    if kind == "local" and max_workers:
        raise UsageError(
            f"{workers}:{max_workers} workers are for a Ray cluster, whose machines come and go: "
            "give one number here"
        )
    if kind == "local":
        from wdsprep.runners.local import LocalRunner

        return LocalRunner(
            workers=workers,
            max_attempts=max_attempts,
            units_per_worker=units_per_worker,
            gpus=tuple(gpus),
        )
    if kind == "ray":
        from wdsprep.runners.ray import RayRunner

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
    raise UsageError(f"there is no runner {kind!r}: choose local or ray")
