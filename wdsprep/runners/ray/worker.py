"""The life of a worker that is a Ray actor, once its node is known to have the driver's version."""

from __future__ import annotations

import gc
import pickle
import threading
import time
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import ray

from wdsprep.runners.base import Message, Unit
from wdsprep.runners.ray.metrics import WorkersMetrics
from wdsprep.runners.stuck_workers import report_opening
from wdsprep.runners.worker import Worker, open_worker

MESSAGES_A_SECOND = 500.0
"""The messages of progress that the driver hears from all workers together. Each costs it a tenth
of a millisecond, and ten thousand workers have more to say than it could hear."""
UNPACED = 100
"""The units whose messages all pass, if no more are under way."""


class RayWorker:
    def __init__(self, work: bytes, tags: Mapping[str, str], others: int = 1) -> None:
        """Prepare a worker. `others` is the number of units that all workers do at a time.

        The more there are, the less often this worker reports progress.
        """
        self._work = work
        self._worker: Worker | None = None
        self._metrics = WorkersMetrics(tags)
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

    def do(self, unit: Unit) -> Generator[Message, None, None]:
        assert self._worker is not None  # noqa: S101  a worker that is not open gets no unit
        yield from limit_pace(self._metrics.counting(self._worker.do(unit)), self._pause_s)

    def stop(self) -> None:
        if self._worker:
            self._worker.stop()


def limit_pace(
    messages: Generator[Message, None, None], pause_s: float
) -> Generator[Message, None, None]:
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
