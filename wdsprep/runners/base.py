"""What drivers, runners and workers tell each other: units, work, and what became of them.

And what a user asks of those who work: `CrewOptions`, `least_and_most` that reads how many, and
`choose_runner`, the one rule for who works where nobody has said so.

On one machine without a cluster, plain processes do what Ray does there, and begin 8 s sooner.
With several GPUs Ray counts these and shares them out, also among runs that know nothing of each
other.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, TypeVar

from wdsprep.errors import UsageError
from wdsprep.text import at_least, one_of

PROGRESS_S = 0.25
"""How often a unit tells how far it has come."""


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


RUNNERS = ("auto", "local", "ray")
THIS_RAY = "the Ray of this process"


def ray_there(address: str | None) -> str:
    """The Ray that is named, or in use, in words; empty where there is none. Ray is not imported to
    find out."""
    if (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
        return THIS_RAY
    return address or os.environ.get("RAY_ADDRESS", "")


def choose_runner(wanted: str, *, there: str, gpus: int = 0) -> str:
    """`local` or `ray`; `there` is what `ray_there` says, and `gpus` are those of this machine that
    the work can use."""
    if wanted != "auto":
        return wanted
    return "ray" if there or gpus > 1 else "local"


def ray_line(there: str, gpus: int = 0) -> str:
    """What a run on Ray says first, since the rest takes a while."""
    if there == THIS_RAY:
        return f"using {THIS_RAY}"
    if there and there != "local":
        return f"connecting to Ray at {there}"
    return "starting Ray on this machine" + f": {gpus} GPUs" * (gpus > 1)


@dataclass(frozen=True, kw_only=True)
class CrewOptions:
    """Who shall work; 0 leaves it to us."""

    runner: str = "auto"
    workers: int = 0
    max_workers: int = 0
    ray_address: str | None = None
    max_attempts: int = 3

    def __post_init__(self) -> None:
        """Before anything is done: --overwrite may stand beside it."""
        one_of(RUNNERS, runner=self.runner)
        at_least(0, workers=self.workers, max_workers=self.max_workers)
        at_least(1, max_attempts=self.max_attempts)
        runner = choose_runner(self.runner, there=ray_there(self.ray_address))
        check_span(runner, self.workers, self.max_workers)


Options = TypeVar("Options", bound=CrewOptions)


def settled(options: Options, told: Callable[[str], None], *, gpus: int = 0) -> Options:
    """With the runner that is chosen, which is told where it is Ray."""
    there = ray_there(options.ray_address)
    runner = choose_runner(options.runner, there=there, gpus=gpus)
    if runner == "ray":
        told(ray_line(there, gpus))
    return replace(options, runner=runner)


def check_span(runner: str, least: int, most: int) -> None:
    if runner == "local" and most:
        raise UsageError(
            f"{least}:{most} workers are for a Ray cluster, whose machines come and go: "
            "name it with --ray-address, or give one number"
        )


def least_and_most(workers: Any) -> tuple[int, int]:
    """Of `workers` as people give them: a number, `auto`, which is 0, or MIN:MAX. The most is 0
    where there is one number alone."""
    if isinstance(workers, tuple):
        workers = ":".join(map(str, workers)) if any(workers[1:]) else workers[0]
    match = re.fullmatch(r"(?:auto|(\d+)(?::(\d+))?)", str(workers))
    least, most = (int(number or 0) for number in match.groups()) if match else (0, 0)
    if match is None or (match[2] and not 1 <= least <= most):
        raise UsageError(f"{workers!r}: give auto, a number, or MIN:MAX such as 4:32")
    return least, most
