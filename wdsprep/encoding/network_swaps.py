"""Turns between passes on a device that holds the network for images or for text, not both.

Loading a large text encoder may take as long as a shard of captions. So shards share a turn: those
that want the pass for which the device is ready begin together, and the pass changes when no shard
is in it. Each network is loaded once for the `most` shards that a worker has, if the disk has room
for all their captions, which wait there for their images. If shards wait for the other pass, no
more than `most` begin this one before it changes, so that each gets its turn.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from wdsprep.encoding.models.base import Part
from wdsprep.encoding.two_passes import TextPass
from wdsprep.store.spool import spool_folder

TEXTS_NBYTES = 32 << 30
"""The most bytes of captions that wait for their images."""
DISK_SHARE = 8
"""Captions may take one part in this number of the free disk: a machine may have as many GPUs."""
POLL_S = 0.05


class Idle(Protocol):
    """An engine that tells whether it has computed everything that it was given."""

    @property
    def is_idle(self) -> bool:
        """Return whether the engine has computed all samples that it was given."""


@dataclass(slots=True, eq=False)
class Visit:
    """The visit of a shard to the pass over captions or images, waiting for its turn or in it."""

    part: Part
    texts: TextPass | None
    """The captions of the shard that wait for their images after the pass."""


class Turns:
    """The turns of shards in the passes over captions and over images, on one device.

    `bring` loads the network of a pass, and up to `at_once` shards are in the pass together. While
    shards wait for the other pass, no more than `most` shards begin the present one.
    """

    def __init__(
        self, bring: Callable[[Part], None], engine: Idle, *, at_once: int, most: int
    ) -> None:
        self._bring, self._engine = bring, engine
        self._at_once, self._most = at_once, most
        self._changed = threading.Condition()
        self._part: Part | None = None
        self._begun = 0
        """The number of shards that have begun this turn."""
        self._waiting: list[Visit] = []
        self._inside: list[Visit] = []
        self._texts: list[TextPass] = []

    @contextmanager
    def visit(self, part: Part, texts: TextPass | None = None) -> Iterator[Visit]:
        """Queue a shard for the pass over captions or images, and yield its visit.

        `enter` waits for its turn, and the visit ends with the context.
        """
        visit = Visit(part, texts)
        with self._changed:
            self._waiting.append(visit)
        try:
            yield visit
        finally:
            with self._changed:
                (self._waiting if visit in self._waiting else self._inside).remove(visit)
                self._changed.notify_all()

    def enter(self, visit: Visit, timeout_s: float) -> bool:
        """Wait for the turn of a visit, and return whether it has come within the time.

        If no shard is in the pass and none that waits may begin it, the next turn begins here, once
        the engine is idle. For a turn of the other pass, the network of that pass is loaded.
        """
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while not self._try(visit):
                if (left_s := end_s - time.monotonic()) <= 0:
                    return False
                self._changed.wait(min(left_s, POLL_S))
            return True

    def _try(self, visit: Visit) -> bool:
        if not self._inside and not any(map(self._may_begin, self._waiting)):
            self._change_pass()
        if not self._may_begin(visit):
            return False
        self._waiting.remove(visit)
        self._inside.append(visit)
        self._begun += 1
        if visit.texts is not None:
            self._texts.append(visit.texts)
        return True

    def _may_begin(self, visit: Visit) -> bool:
        if visit.part is not self._part or len(self._inside) >= self._at_once:
            return False
        others_wait = any(other.part is not self._part for other in self._waiting)
        return (self._begun < self._most or not others_wait) and self._has_room(visit)

    def _has_room(self, visit: Visit) -> bool:
        """Return whether the disk has room for a shard's captions beside those that wait there.

        It always has for a single shard.
        """
        self._texts = [texts for texts in self._texts if texts.nbytes]
        if visit.texts is None or not visit.texts.nbytes or not self._texts:
            return True
        nbytes = visit.texts.nbytes + sum(texts.nbytes for texts in self._texts)
        free = shutil.disk_usage(spool_folder()).free
        return nbytes <= min(TEXTS_NBYTES, free // DISK_SHARE)

    def _change_pass(self) -> None:
        """Begin a turn of the other pass if a waiting shard can begin it, else of the same pass.

        Begin none while the engine still computes, or if no waiting shard can begin.
        """
        ready = [visit.part for visit in self._waiting if self._has_room(visit)]
        if not ready or not self._engine.is_idle:
            return
        part = next((part for part in ready if part is not self._part), ready[0])
        if part is not self._part:
            self._part = None  # whatever becomes of it
            self._bring(part)
        self._part, self._begun = part, 0
