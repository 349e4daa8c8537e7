"""The options that several commands have: workers, runners, attempts, tracking, limits, listeners.

`choose_runner` is the one rule for the runner if the user has not chosen one. On one machine
without a cluster, plain processes do what Ray does there, and begin 8 s sooner. With several GPUs
Ray counts these and shares them out, also among runs that know nothing of each other.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from wdsprep.errors import UsageError
from wdsprep.options import About, Options, about, flag, option_field
from wdsprep.runners.job import JobListener
from wdsprep.runners.progress import progress_of_call
from wdsprep.runners.track import TRACKERS, check_tracker
from wdsprep.text import brief, parse_auto

OUTPUT = "Output"
JOIN = about(
    "Let --where use the columns of these too: scores, or tables by key or URL.",
    "Samples",
    is_place=True,
    is_many=True,
    metavar="PLACE",
)
"""The declaration of `join` in commands that select samples by --where."""
TRACK = about(
    "Tell [Weights & Biases or TensorBoard](../runners/README.md#tracking) how far the run is, "
    "every ten seconds.",
    OUTPUT,
    choices=TRACKERS,
    read=check_tracker,
    usual="no",
)


def limit(samples: str, heading: str, rest: str) -> Mapping[str, About]:
    """Return the declaration of an option that takes the first samples only.

    `samples` is their noun; `rest` ends the text of the option on a page.
    """
    return about(
        f"Take the first N {samples} only, for a trial.",
        heading,
        least=0,
        page=f"the first N {samples} only, for a trial; {rest}",
        example="N",
    )


def batch_size(help: str) -> Mapping[str, About]:
    """Return the declaration of the option for the number of images that are computed at once."""
    return about(help, WORKERS, read=parse_auto, metavar="AUTO|N", order=-2, example="auto|N")


def overwrite(what: str) -> Mapping[str, About]:
    """Return the declaration of the option to start over, which removes `what` first."""
    return about(f"Remove {what} first, and start over.", OUTPUT)


@dataclass(frozen=True, kw_only=True)
class ListenedOptions(Options):
    """Options of a function that takes long: a listener, or a progress line.

    Without a listener the function draws a line itself (`wdsprep.runners.progress`), unless
    `progress` is false.
    """

    unit_noun: ClassVar[str] = "shard"
    """The unit of work, in that line."""

    listener: JobListener | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "progress", flag("progress", self.progress))

    @property
    def listener_or_mute(self) -> JobListener:
        """Return the listener, or one that hears nothing."""
        return self.listener or JobListener()

    @contextmanager
    def during_call(self) -> Iterator["Options"]:
        """Yield the options with a listener that draws the progress of the call while it lasts.

        If there is a listener already, or `progress` is false, yield these options as they are.
        """
        if self.listener is not None or not self.progress:
            yield self
            return
        with progress_of_call(self.unit_noun) as listener:
            yield replace(self, listener=listener)


RUNNERS = ("auto", "local", "ray")
THIS_RAY = "the Ray of this process"


def ray_in_use(address: str | None) -> str:
    """Return the Ray cluster that is named or in use, in words, or "" if there is none.

    Ray is not imported to find out.
    """
    if (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
        return THIS_RAY
    return address or os.environ.get("RAY_ADDRESS", "")


def choose_runner(wanted: str, *, there: str, gpus: int = 0) -> str:
    """Return the runner that does the work: `local` or `ray`.

    `auto` becomes Ray if a cluster is named or in use, or if there are several GPUs. `there` is
    what `ray_in_use` returns, and `gpus` the number of this machine's GPUs that can be used.
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

    Return the least and the most; the most is 0 if there is one number alone.
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
class WorkerOptions(ListenedOptions):
    """Options for the workers of a command. `auto` leaves the choice to wdsprep."""

    workers: int | str | tuple[int, int] = option_field(
        "Work in so many processes; MIN:MAX on a cluster that grows.",
        WORKERS,
        default="auto",
        read=parse_workers,
        usual="one a core",
        metavar="AUTO|N|MIN:MAX",
        page="how many; `auto` takes every core, or what room the cluster's machines have",
    )
    runner: str = option_field(
        "Work in processes of this machine, or on Ray; auto takes Ray where --ray-address or "
        "RAY_ADDRESS names one, encode and score also on several GPUs.",
        WORKERS,
        default="auto",
        choices=RUNNERS,
        order=1,
    )
    ray_address: str | None = option_field(
        "Use the Ray cluster whose head is at this HOST:PORT; auto is that of this machine.",
        WORKERS,
        default=None,
        usual="RAY_ADDRESS",
        order=1,
        example="auto",
        page="the Ray cluster to work on; by default `RAY_ADDRESS`, else a Ray that is started "
        "here for the run",
    )
    max_attempts: int = option_field(
        "Leave out a unit of work that has failed so many times.",
        WORKERS,
        default=3,
        least=1,
        order=1,
    )

    def check_together(self) -> None:
        """Raise UsageError if a range of workers is given for the local runner.

        This is checked before anything is done, since --overwrite may be given too.
        """
        super().check_together()
        runner = choose_runner(self.runner, there=ray_in_use(self.ray_address))
        if runner == "local" and self.most:
            raise UsageError(
                f"{self.least}:{self.most} workers are for a Ray cluster, whose machines come and "
                "go: give it with --ray-address, or give one number"
            )

    @property
    def least(self) -> int:
        """Return the number of workers, of a range the least, or 0 if wdsprep may choose."""
        return parse_workers(self.workers)[0]

    @property
    def most(self) -> int:
        """Return the most workers that a cluster may grow to, or 0 if it does not grow."""
        return parse_workers(self.workers)[1]


WorkerOptionsT = TypeVar("WorkerOptionsT", bound=WorkerOptions)


def with_runner(
    options: WorkerOptionsT,
    on_message: Callable[[str], None],
    *,
    count_gpus: Callable[[], int] = lambda: 0,
) -> WorkerOptionsT:
    """Return the options with the runner that is chosen for them, and with the address of its Ray.

    The runner is `local` or `ray`. If it is Ray, `on_message` gets a line that says which Ray is
    used. The GPUs of this machine are counted only if their number decides.
    """
    there = ray_in_use(options.ray_address)
    gpus = count_gpus() if options.runner == "auto" and not there else 0
    runner = choose_runner(options.runner, there=there, gpus=gpus)
    if runner == "ray":
        on_message(ray_line(there, gpus))
    return replace(options, runner=runner, ray_address=there or None)
