"""What drivers, runners and workers tell each other: units, work, and what became of them.

And what a user asks of those who work: `WorkerOptions`, `parse_workers` that reads how many, and
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
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, TypeVar

from wdsprep.errors import UsageError
from wdsprep.options import Options, about
from wdsprep.text import brief, parse_auto

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
        returned object has a `close()`, it is called after that, where the worker ends in
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
        """Do all units, and yield what becomes of them in the order in which that happens."""
        ...


RUNNERS = ("auto", "local", "ray")
THIS_RAY = "the Ray of this process"


def ray_in_use(address: str | None) -> str:
    """Return the Ray cluster that is named or in use, in words; empty where there is none.

    Ray is not imported to find out.
    """
    if (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
        return THIS_RAY
    return address or os.environ.get("RAY_ADDRESS", "")


def choose_runner(wanted: str, *, there: str, gpus: int = 0) -> str:
    """Return the runner that does the work: `local` or `ray`.

    `there` is what `ray_in_use` returns, and `gpus` the number of this machine's GPUs that can be
    used.
    """
    if wanted != "auto":
        return wanted
    return "ray" if there or gpus > 1 else "local"


def ray_line(there: str, gpus: int = 0) -> str:
    """Return the first line of a run on Ray, which is shown because the start takes a while."""
    if there == THIS_RAY:
        return f"using {THIS_RAY}"
    if there and there != "local":
        return f"connecting to Ray at {there}"
    return "starting Ray on this machine" + f": {gpus} GPUs" * (gpus > 1)


def parse_workers(workers: Any) -> tuple[int, int]:
    """Parse the number of workers: a number, `auto` (which is 0), or MIN:MAX.

    The most is 0 where there is one number alone.
    """
    if isinstance(workers, tuple) and workers:
        workers = ":".join(map(str, workers)) if any(workers[1:]) else workers[0]
    match = re.fullmatch(r"(?:auto|(\d{1,9})(?::(\d{1,9}))?)", str(workers))
    least, most = (int(number or 0) for number in match.groups()) if match else (0, 0)
    if match is None or (match[2] and not 1 <= least <= most):
        raise UsageError(f"{brief(workers)}: give auto, a number, or MIN:MAX such as 4:32")
    return least, most


WORKERS = "Workers"
"""The heading of options that say who works."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(Options):
    """Options for the workers of a command. `auto` leaves the choice to wdsprep."""

    workers: int | str | tuple[int, int] = field(
        default="auto",
        metadata=about(
            "Work in so many processes.",
            WORKERS,
            read=parse_auto,
            usual="one a core",
            metavar="N",
            page="how many processes; one a core unless given",
        ),
    )
    runner: str = field(
        default="auto",
        metadata=about(
            "Work in processes of this machine, or on Ray; auto takes Ray where --ray-address or "
            "RAY_ADDRESS names one, and to encode on several GPUs.",
            WORKERS,
            choices=RUNNERS,
            order=1,
            usual=True,
            page="processes of this machine, or Ray",
        ),
    )
    ray_address: str | None = field(
        default=None,
        metadata=about(
            "Use the Ray cluster whose head is at this HOST:PORT; auto is that of this machine.",
            WORKERS,
            usual="RAY_ADDRESS",
            order=1,
            example="auto",
            page="the Ray cluster to work on; by default `RAY_ADDRESS`, else a Ray that is started "
            "here for the run",
        ),
    )
    max_attempts: int = field(
        default=3,
        metadata=about(
            "Leave out a unit of work that has failed so many times.",
            WORKERS,
            least=1,
            usual=True,
            order=1,
            page="how often a unit of work is tried before it is left out and named",
        ),
    )

    def check_together(self) -> None:
        """Check that the options fit together.

        This is done before anything else: --overwrite may stand beside them.
        """
        super().check_together()
        runner = choose_runner(self.runner, there=ray_in_use(self.ray_address))
        check_span(runner, self.least, self.most)

    @property
    def least(self) -> int:
        """Return the number of workers, of a range the least; 0 where wdsprep may choose."""
        return parse_workers(self.workers)[0]

    @property
    def most(self) -> int:
        """Return the most workers that a cluster may grow to; 0 where it does not grow."""
        return parse_workers(self.workers)[1]


SPAN = about(
    "Work in so many processes; MIN:MAX on a cluster that grows.",
    WORKERS,
    read=parse_workers,
    usual="one a core",
    metavar="AUTO|N|MIN:MAX",
    page="how many; `auto` takes every core, or what room the cluster's machines have",
)


@dataclass(frozen=True, kw_only=True)
class WorkerRangeOptions(WorkerOptions):
    """Options for the workers of a command whose cluster may grow."""

    workers: int | str | tuple[int, int] = field(default="auto", metadata=SPAN)


WorkerOptionsT = TypeVar("WorkerOptionsT", bound=WorkerOptions)


def with_runner(
    options: WorkerOptionsT, told: Callable[[str], None], *, gpus: int = 0
) -> WorkerOptionsT:
    """Return the options with the runner that is chosen for them. Tell why, where it is Ray."""
    there = ray_in_use(options.ray_address)
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
