"""The life of a worker that is a Ray actor, once its node is known to have the driver's version.

Here too is what a run on Ray tells Prometheus, beside what Ray tells of itself. Ray exports metrics
at every node, so existing dashboards of a cluster show these with no further setting, as
`ray_wdsprep_images_total` and so on. Workers count what they do; the driver counts units and
workers. All have the tags `command` and `phase`; those of workers say the `kind` of device too.
"""

from __future__ import annotations

import gc
import pickle
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeAlias

import ray
from ray.util.metrics import Counter, Gauge, Histogram

from wdsprep.runners.base import Event, Finished, Message, Quarantined, Unit
from wdsprep.runners.stuck_workers import report_opening
from wdsprep.runners.worker import Worker, open_worker

TAGS = ("command", "phase")
SECONDS = [1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1_000.0, 3_000.0]


Messages: TypeAlias = Generator[Message, None, None]


def unit_metrics(tags: Mapping[str, str]) -> Callable[[Messages], Messages]:
    """Return a function that passes on the messages about a unit, and counts what they tell.

    The progress of a unit is cumulative, so what is counted is its growth: `samples`, `nbytes` and
    `rejects`, and of its `stats` how busy the device is, as far as the work has them. The seconds
    of a unit are counted before the message that ends it: behind the last one the worker may be
    ended.
    """
    keys = (*TAGS, "kind")
    images = Counter("wdsprep_images", "Images written into shards.", keys)
    nbytes = Counter("wdsprep_bytes", "Bytes of shards written.", keys)
    rejects = Counter("wdsprep_rejects", "Images rejected, by code.", (*keys, "code"))
    busy = Gauge("wdsprep_busy_share", "Share of time that the device computed.", keys)
    seconds = Histogram("wdsprep_unit_seconds", "Seconds a unit took.", SECONDS, keys)

    def counting(messages: Messages) -> Messages:
        began, is_over = time.monotonic(), False
        last: object = None  # the progress of the unit when it was last counted
        with closing(messages):
            for kind, value in messages:
                progress = value if kind == "progress" else last
                unit_tags = {**tags, "kind": getattr(progress, "device", "cpu")}
                if kind == "progress":
                    for counter, name in ((images, "samples"), (nbytes, "nbytes")):
                        _grow(counter, getattr(value, name, 0) - getattr(last, name, 0), unit_tags)
                    counted = getattr(last, "rejects", {})
                    for code, number in getattr(value, "rejects", {}).items():
                        _grow(rejects, number - counted.get(code, 0), {**unit_tags, "code": code})
                    stats = getattr(value, "stats", None)
                    if stats is not None and stats.wall_s:
                        busy.set(stats.busy_s / stats.wall_s, unit_tags)
                    last = value
                elif not is_over:
                    seconds.observe(time.monotonic() - began, unit_tags)
                    is_over = True
                yield kind, value

    return counting


def _grow(counter: Counter, number: float, tags: dict[str, str]) -> None:
    if number > 0:
        counter.inc(number, tags)


class DriversMetrics:
    """The metrics of a run: its units, its workers, and how they ended."""

    def __init__(self, tags: Mapping[str, str], units: int) -> None:
        self._tags = dict(tags)
        self._left = units
        self._open: set[int] = set()
        self._units_left = Gauge("wdsprep_units_left", "Units that are not finished.", TAGS)
        self._at_work = Gauge("wdsprep_workers", "Workers that are ready or at work.", TAGS)
        self._attempts = Counter("wdsprep_attempts", "Units given to a worker.", TAGS)
        self._finished = Counter("wdsprep_units", "Units finished.", TAGS)
        self._quarantined = Counter("wdsprep_quarantined", "Units given up.", TAGS)
        self._lost = Counter("wdsprep_workers_lost", "Workers that died or were lost.", TAGS)
        if units:
            self._units_left.set(units, self._tags)

    def given(self) -> None:
        self._attempts.inc(1, self._tags)

    def count(self, slot: int, *, is_open: bool) -> None:
        """Count a worker that is ready, or one that is lost or was ended."""
        if is_open:
            self._open.add(slot)
        else:
            self._open.discard(slot)
            self._lost.inc(1, self._tags)
        self._at_work.set(len(self._open), self._tags)

    def noting(self, events: Generator[Event, None, None]) -> Generator[Event, None, None]:
        """Pass on the events of a run, and count the units that are finished or given up.

        At the end the number of workers at work becomes 0.
        """
        with closing(events):
            for event in events:
                if isinstance(event, Finished | Quarantined):
                    done = isinstance(event, Finished)
                    (self._finished if done else self._quarantined).inc(1, self._tags)
                    if self._left:
                        self._left -= done
                        self._units_left.set(self._left, self._tags)
                yield event
        self._at_work.set(0, self._tags)


MESSAGES_A_SECOND = 500.0
"""The messages of progress that the driver hears from all workers together. Each costs it a tenth
of a millisecond, and ten thousand workers have more to say than it could hear."""
UNPACED = 100
"""The units whose messages all pass, if no more are under way."""


class RayWorker:
    def __init__(self, work: bytes, tags: Mapping[str, str], others: int) -> None:
        """Prepare a worker. `others` is the number of units that all workers do at a time.

        The more there are, the less often this worker reports progress.
        """
        self._work = work
        self._worker: Worker | None = None
        self._counting = unit_metrics(tags)
        self._pause_s = max(0, others - UNPACED) / MESSAGES_A_SECOND

    def open(self) -> Generator[tuple[str, Message], None, None]:
        """Open the work, and yield messages of its progress, each with the id of this node."""
        node = ray.get_runtime_context().get_node_id()
        yield node, ("opening", None)
        is_over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            opened = pool.submit(open_worker, lambda: pickle.loads(self._work))  # noqa: S301  ours
            opened.add_done_callback(lambda _opened: is_over.set())
            for progress in report_opening(is_over):
                yield node, progress
        self._worker, message = opened.result()
        gc.freeze()  # as in local workers
        yield node, message

    def do(self, unit: Unit) -> Messages:
        assert self._worker is not None  # noqa: S101  a worker that is not open gets no unit
        yield from limit_pace(self._counting(self._worker.do(unit)), self._pause_s)

    def stop(self) -> None:
        if self._worker:
            self._worker.stop()


def limit_pace(messages: Messages, pause_s: float) -> Messages:
    """Pass on messages, except progress that comes within `pause_s` of the last message passed on.

    If the next message that passes is not progress, the newest progress that was left out is passed
    on before it.
    """
    told, held = float("-inf"), None
    with closing(messages):
        for message in messages:
            is_progress = message[0] == "progress"
            if is_progress and time.monotonic() - told < pause_s:
                held = message
                continue
            if held is not None and not is_progress:
                yield held
            held, told = None, time.monotonic()
            yield message
