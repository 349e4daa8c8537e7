"""What a run tells Weights & Biases or TensorBoard: the figures of its progress line, steadily.

Each run of a command is a run there too. The runs of one dataset are a group, and their figures
stand over the samples that the dataset has by then, so that a resumed run goes on where the one
before ended. What wandb reads from the environment holds, as `WANDB_MODE` and `WANDB_PROJECT`;
TensorBoard's files go into `runs/` of the folder one is in.

A tracker is never worth a run: it works on a thread of its own, is asked once in `PACE_S`, and is
given up with a warning when anything goes wrong with it, such as a network that is down.
"""

import importlib.util
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from wdsprep.errors import UsageError, values_without_secrets, without_secrets
from wdsprep.runners.job import Heard, JobListener, JobStatus
from wdsprep.text import check_one_of, install_extra

TRACKERS = ("wandb", "tensorboard")
PROJECT, FOLDER = "wdsprep", "runs"
PACE_S, OPENING_S, CLOSING_S = 10.0, 20.0, 30.0
Figures = Mapping[str, float]
_log = logging.getLogger("wdsprep")


class Tracker(Protocol):
    """A place that keeps figures of a run; `at` is their position on its axis."""

    @property
    def shown(self) -> str:
        """Return how a user looks at the tracked figures: an address, or a command."""

    def log(self, at: int, figures: Figures) -> None: ...
    def close(self) -> None: ...


class WandbTracker:
    """A run of Weights & Biases.

    wandb itself asks for a key if there is none, but nobody would see the question here.
    """

    def __init__(self, group: str, axis: str, settings: Mapping[str, Any]) -> None:
        import wandb

        own = wandb.Settings(console="off", silent=True, init_timeout=OPENING_S)
        with _arguments_without_secrets():
            self._run = self._begin(own, group, settings)
        self._run.define_metric("*", step_metric=axis)
        self._axis = axis
        folder = os.path.relpath(Path(self._run.dir).parent)
        self.shown = self._run.url or f'"wandb sync {folder}"'

    def _begin(self, own: Any, group: str, settings: Mapping[str, Any]) -> Any:
        import wandb

        mode = wandb.setup(settings=own).settings.mode
        if mode == "online" and not wandb.login(prompt=False):
            raise UsageError('it has no key: run "wandb login", or set WANDB_MODE=offline')
        project = wandb.setup().settings.project or PROJECT
        return wandb.init(project=project, group=group, config=dict(settings), settings=own)

    def log(self, at: int, figures: Figures) -> None:
        self._run.log({self._axis: at, **figures})

    def close(self) -> None:
        self._run.finish()


@contextmanager
def _arguments_without_secrets() -> Iterator[None]:
    """Remove the secrets in URLs from the command line, which wandb keeps of each run."""
    before = sys.argv
    sys.argv = values_without_secrets(before)
    try:
        yield
    finally:
        sys.argv = before


class TensorboardTracker:
    """A file of events for TensorBoard, by its own writer: torch's would load torch for it."""

    shown = f'"tensorboard --logdir {FOLDER}"'

    def __init__(self, group: str, axis: str, settings: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        moment = time.strftime("%Y%m%d-%H%M%S")
        self._writer = EventFileWriter(f"{FOLDER}/{group}/{moment}")
        lines = [f"    {name}: {value}" for name, value in settings.items()]
        self._write(0, text_pb("settings", "\n".join(lines)))
        self._write(0, text_pb("axis", axis))

    def _write(self, at: int, summary: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=at, summary=summary))

    def log(self, at: int, figures: Figures) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value) for name, value in figures.items()
        ]
        self._write(at, self._summary(value=values))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Tracking:
    """A queue of figures for a tracker of a kind, or for none.

    No method waits but `close`, which waits a while for the figures that are on their way.
    """

    def __init__(self, kind: str, group: str, axis: str, settings: Mapping[str, Any]) -> None:
        self._kind = kind
        self._given: queue.SimpleQueue[tuple[int, Figures] | None] = queue.SimpleQueue()
        self._next = 0.0
        self.shown = ""
        """Says where the run can be looked at, once the tracker is there."""
        self._thread: threading.Thread | None = None
        if kind:
            opened = (group, axis, values_without_secrets(settings))
            self._thread = threading.Thread(target=self._work, args=opened, daemon=True)
            self._thread.start()

    @property
    def is_due(self) -> bool:
        return self._thread is not None and time.monotonic() >= self._next

    def log(self, at: int, figures: Figures) -> None:
        if self._thread is not None:
            self._next = time.monotonic() + PACE_S
            self._given.put((at, figures))

    def _work(self, group: str, axis: str, settings: Mapping[str, Any]) -> None:
        try:
            kind = WandbTracker if self._kind == "wandb" else TensorboardTracker
            tracker: Tracker = kind(group, axis, settings)
            self.shown = tracker.shown
            while (given := self._given.get()) is not None:
                tracker.log(*given)
            tracker.close()
        except Exception as error:  # noqa: BLE001 (whatever it is, the run goes on)
            self._next, self.shown = float("inf"), ""
            why = " ".join(str(error).split()) or type(error).__name__
            _log.warning("--track %s failed, and the run goes on without: %s", self._kind, why)

    def close(self) -> None:
        if self._thread is None:
            return
        self._given.put(None)
        self._thread.join(CLOSING_S)
        if self._thread.is_alive():
            _log.warning("--track %s does not end: what it has not sent may be lost", self._kind)


def check_tracker(kind: str) -> str:
    """Check that a tracker is known and installed, before anything is done. Return its name."""
    if kind == "":
        return kind
    check_one_of(TRACKERS, track=kind)
    if importlib.util.find_spec(kind) is None:
        raise UsageError(f"--track {kind} needs a further package: {install_extra(kind)}")
    return kind


@dataclass
class RunTracking:
    """The tracked figures of a run.

    `before` is the number of samples that its datasets had, and `more` returns the figures that
    only this kind of run has.
    """

    tracking: Tracking
    before: int
    more: Callable[[], Figures]
    _status: Callable[[], JobStatus] = JobStatus
    _began: float = 0.0
    _last: float = 0.0
    _counted: int = 0

    def heard(self, status: Callable[[], JobStatus]) -> None:
        """Keep the function that returns the run's status, and track the figures if it is time."""
        self._status = status
        self._began = self._began or time.monotonic()
        if self.tracking.is_due:
            self.log()

    def log(self) -> None:
        now, status = time.monotonic(), self._status()
        began = self._began or now
        counted = status.samples + sum(status.rejects.values())
        figures = {
            "done": status.share_done,
            "left_s": status.left_s(now - began),
            "nbytes": status.nbytes,
            "units_done": status.units_done,
            **{f"rejects/{code}": count for code, count in sorted(status.rejects.items())},
            **self.more(),
        }
        if (passed := now - (self._last or began)) > 0:
            figures["samples_per_s"] = (counted - self._counted) / passed
        self._last, self._counted = now, counted
        self.tracking.log(self.before + status.samples, figures)


@contextmanager
def track_run(
    kind: str,
    places: Sequence[str],
    listener: JobListener,
    *,
    settings: Mapping[str, Any],
    before: int,
    more: Callable[[], Figures] = dict,
) -> Iterator[Heard]:
    """Track a run over the datasets `places` while the block lasts.

    Yield a function that takes the status of the run, and passes the status to the listener too.
    Without a `kind` nothing is tracked. However the run ends, its last figures are tracked. If the
    tracker works, the listener is told how to look at them.
    """
    if not kind:
        yield listener.status
        return
    shown = map(without_secrets, places)
    group = "+".join(place.rstrip("/").rpartition("/")[2] for place in shown)
    tracking = Tracking(kind, group, "samples", settings)
    run = RunTracking(tracking, before, more)

    def heard(status: Callable[[], JobStatus]) -> None:
        run.heard(status)
        listener.status(status)

    try:
        yield heard
    finally:
        run.log()
        tracking.close()
        if tracking.shown:
            listener.told(f"--track {kind}: {tracking.shown}")
