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
from pathlib import Path
from typing import Any

from wdsprep.errors import UsageError, values_without_secrets, without_secrets
from wdsprep.runners.job import JobListener, JobStatus, StatusListener
from wdsprep.text import install_extra

TRACKERS = ("wandb", "tensorboard")
PROJECT, FOLDER = "wdsprep", "runs"
PACE_S, OPENING_S, CLOSING_S = 10.0, 20.0, 30.0
Figures = Mapping[str, float]
_log = logging.getLogger("wdsprep")


Tracker = tuple[str, Callable[[int, Figures], object], Callable[[], object]]
"""How a user looks at the tracked figures (an address, or a command), and functions that log
figures at a position of the axis and close the tracker."""


def open_wandb(group: str, axis: str, settings: Mapping[str, Any]) -> Tracker:
    """Begin a run of Weights & Biases.

    wandb itself asks for a key if there is none, but nobody would see the question here.
    """
    import wandb

    own = wandb.Settings(console="off", silent=True, init_timeout=OPENING_S)
    arguments = sys.argv
    sys.argv = values_without_secrets(arguments)  # wandb keeps them of each run
    try:
        mode = wandb.setup(settings=own).settings.mode
        if mode == "online" and not wandb.login(prompt=False):
            raise UsageError('it has no key: run "wandb login", or set WANDB_MODE=offline')
        project = wandb.setup().settings.project or PROJECT
        run = wandb.init(project=project, group=group, config=dict(settings), settings=own)
    finally:
        sys.argv = arguments
    run.define_metric("*", step_metric=axis)
    shown = run.url or f'"wandb sync {os.path.relpath(Path(run.dir).parent)}"'
    return shown, lambda at, figures: run.log({axis: at, **figures}), run.finish


def open_tensorboard(group: str, axis: str, settings: Mapping[str, Any]) -> Tracker:
    """Begin a file of events for TensorBoard, by its own writer: torch's would load torch."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(f"{FOLDER}/{group}/{time.strftime('%Y%m%d-%H%M%S')}")

    def write(at: int, summary: Any) -> None:
        writer.add_event(Event(wall_time=time.time(), step=at, summary=summary))

    def log(at: int, figures: Figures) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        write(at, Summary(value=values))
        writer.flush()

    lines = [f"    {name}: {value}" for name, value in settings.items()]
    write(0, text_pb("settings", "\n".join(lines)))
    write(0, text_pb("axis", axis))
    return f'"tensorboard --logdir {FOLDER}"', log, writer.close


class Tracking:
    """A queue of figures for a tracker of a kind, or for none.

    No method waits but `close`, which waits a while for the figures that are on their way.
    """

    def __init__(self, kind: str, group: str, axis: str, settings: Mapping[str, Any]) -> None:
        self._kind = kind
        self._queue: queue.SimpleQueue[tuple[int, Figures] | None] = queue.SimpleQueue()
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
            self._queue.put((at, figures))

    def _work(self, group: str, axis: str, settings: Mapping[str, Any]) -> None:
        try:
            begin = open_wandb if self._kind == "wandb" else open_tensorboard
            self.shown, log, close = begin(group, axis, settings)
            while (figures := self._queue.get()) is not None:
                log(*figures)
            close()
        except Exception as error:  # noqa: BLE001 (whatever it is, the run goes on)
            self._next, self.shown = float("inf"), ""
            why = " ".join(str(error).split()) or type(error).__name__
            _log.warning("--track %s failed, and the run goes on without: %s", self._kind, why)

    def close(self) -> None:
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join(CLOSING_S)
        if self._thread.is_alive():
            _log.warning("--track %s does not end: what it has not sent may be lost", self._kind)


def check_tracker(kind: str) -> str:
    """Return the name of a tracker. Raise UsageError if it is known and not installed."""
    if kind in TRACKERS and importlib.util.find_spec(kind) is None:
        raise UsageError(f"--track {kind} needs a further package: {install_extra(kind)}")
    return kind


@contextmanager
def track_run(
    kind: str,
    places: Sequence[str],
    listener: JobListener,
    *,
    settings: Mapping[str, Any],
    before: int,
    more: Callable[[], Figures] = dict,
) -> Iterator[StatusListener]:
    """Track the figures of a run over the datasets `places` while the block lasts.

    Yield a function that takes the status of the run, and passes it to the listener too. Without a
    `kind` nothing is tracked. However the run ends, its last figures are tracked. If the tracker
    works, the listener is told how to look at them. `before` is the number of samples that the
    datasets had, and `more` returns the figures that only this kind of run has.
    """
    group = "+".join(without_secrets(place).rstrip("/").rpartition("/")[2] for place in places)
    tracking = Tracking(kind, group, "samples", settings)
    latest_status: Callable[[], JobStatus] = JobStatus
    began = last = 0.0
    last_counted = 0

    def log_status() -> None:
        nonlocal last, last_counted
        now, status = time.monotonic(), latest_status()
        counted = status.samples + sum(status.rejects.values())
        figures = {
            "done": status.share_done,
            "left_s": status.left_s(now - (began or now)),
            "nbytes": status.nbytes,
            "units_done": status.units_done,
            **{f"rejects/{code}": count for code, count in sorted(status.rejects.items())},
            **more(),
        }
        if (passed := now - (last or began or now)) > 0:
            figures["samples_per_s"] = (counted - last_counted) / passed
        last, last_counted = now, counted
        tracking.log(before + status.samples, figures)

    def on_status(status: Callable[[], JobStatus]) -> None:
        nonlocal latest_status, began
        latest_status, began = status, began or time.monotonic()
        if tracking.is_due:
            log_status()
        listener.on_status(status)

    try:
        yield on_status
    finally:
        if kind:
            log_status()
            tracking.close()
        if tracking.shown:
            listener.on_message(f"--track {kind}: {tracking.shown}")
