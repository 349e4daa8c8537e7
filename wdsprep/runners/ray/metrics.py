"""What a run on Ray tells Prometheus, beside what Ray tells of itself.

Ray exports metrics at every node, so existing dashboards of a cluster show these with no further
setting, as `ray_wdsprep_images_total` and so on. Workers count what they do; the driver counts
units and workers. All have the tags `command` and `phase`; those of workers say the `kind` of
device too.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import closing

from ray.util.metrics import Counter, Gauge, Histogram

from wdsprep.runners.base import Event, Finished, Kind, Message, Quarantined

TAGS = ("command", "phase")
SECONDS = [1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1_000.0, 3_000.0]


class WorkersMetrics:
    """The metrics of one worker.

    The progress of a unit is cumulative, so what is counted is its growth: `samples`, `nbytes`,
    `rejects` and others, as far as the work has them.
    """

    def __init__(self, tags: Mapping[str, str]) -> None:
        keys = (*TAGS, "kind")
        self._tags = dict(tags)
        self._images = Counter("wdsprep_images", "Images written into shards.", keys)
        self._nbytes = Counter("wdsprep_bytes", "Bytes of shards written.", keys)
        self._rejects = Counter("wdsprep_rejects", "Images rejected, by code.", (*keys, "code"))
        self._busy = Gauge("wdsprep_busy_share", "Share of time that the device computed.", keys)
        self._seconds = Histogram("wdsprep_unit_seconds", "Seconds a unit took.", SECONDS, keys)

    def counting(self, messages: Generator[Message, None, None]) -> Generator[Message, None, None]:
        """Pass on the messages about a unit, and count its progress and the seconds it took.

        The seconds are counted before the message that ends the unit: behind the last one the
        worker may be ended.
        """
        began, is_over = time.monotonic(), False
        last: object = None  # the progress of the unit when it was last counted
        with closing(messages):
            for kind, value in messages:
                if kind == "progress":
                    self._count(last, value)
                    last = value
                elif not is_over:
                    self._seconds.observe(time.monotonic() - began, self._tagged(last))
                    is_over = True
                yield kind, value

    def _count(self, before: object, now: object) -> None:
        tags = self._tagged(now)
        for counter, name in ((self._images, "samples"), (self._nbytes, "nbytes")):
            _grow(counter, getattr(now, name, 0) - getattr(before, name, 0), tags)
        counted = getattr(before, "rejects", {})
        for code, number in getattr(now, "rejects", {}).items():
            _grow(self._rejects, number - counted.get(code, 0), {**tags, "code": code})
        if wall_s := getattr(now, "wall_s", 0.0):
            self._busy.set(getattr(now, "busy_s", 0.0) / wall_s, tags)

    def _tagged(self, progress: object) -> dict[str, str]:
        return {**self._tags, "kind": getattr(progress, "device", "cpu")}


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
        self._set_left(0)

    def given(self) -> None:
        self._attempts.inc(1, self._tags)

    def count(self, slot: int, kind: Kind) -> None:
        """Count a message in which a worker says that it is ready or lost."""
        if kind == "ready":
            self._open.add(slot)
        elif kind == "lost":
            self._open.discard(slot)
            self._lost.inc(1, self._tags)
        else:
            return
        self._at_work.set(len(self._open), self._tags)

    def _set_left(self, done: int) -> None:
        if self._left:
            self._left -= done
            self._units_left.set(self._left, self._tags)

    def noting(self, events: Generator[Event, None, None]) -> Generator[Event, None, None]:
        """Pass on the events of a run, and count the units that are finished or given up.

        At the end the number of workers at work becomes 0.
        """
        with closing(events):
            for event in events:
                if isinstance(event, Finished | Quarantined):
                    done = isinstance(event, Finished)
                    (self._finished if done else self._quarantined).inc(1, self._tags)
                    self._set_left(done)
                yield event
        self._at_work.set(0, self._tags)
