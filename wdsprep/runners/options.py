"""Options that several commands have."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

from wdsprep.options import About, Options, about, flag
from wdsprep.runners.job import JobListener
from wdsprep.runners.progress import progress_of_call
from wdsprep.runners.track import TRACKERS, check_tracker

OUTPUT = "Output"
TRACK = about(
    "Tell Weights & Biases or TensorBoard how far the run is, every ten seconds.",
    OUTPUT,
    choices=TRACKERS,
    read=check_tracker,
    usual="no",
    page="tell it how far the run is: [tracking](../runners/README.md#tracking)",
)


def limit(samples: str, heading: str, rest: str) -> Mapping[str, About]:
    """Return the declaration of an option that takes the first samples only."""
    return about(
        f"Take the first N {samples} only, for a trial.",
        heading,
        least=0,
        page=f"the first N {samples} only, for a trial; {rest}",
        example="N",
    )


def overwrite(what: str) -> Mapping[str, About]:
    """Return the declaration of the option to start over."""
    return about(
        f"Remove {what} first, and start over.",
        OUTPUT,
        page="remove the dataset first and start over",
    )


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
    def heard_by(self) -> JobListener:
        """Return the listener, or one that hears nothing."""
        return self.listener or JobListener()

    @contextmanager
    def during_call(self) -> Iterator["Options"]:
        """Draw the progress of the call while it lasts, unless there is a listener."""
        if self.listener is not None or not self.progress:
            yield self
            return
        with progress_of_call(self.unit_noun) as listener:
            yield replace(self, listener=listener)
