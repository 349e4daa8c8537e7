"""Workers as Ray actors, on a cluster or on a Ray started for the run.

Actors are never restarted by Ray: `schedule.drive` makes new ones, because only it knows whose
fault a death was. Ray tells of a death in three ways, and none alone says why:

- `ActorDiedError` that names the node's death or a preemption: no unit is to blame.
- `ActorDiedError` for a dead process: judged `VERDICT_S` later, since a machine that shuts
  down ends its workers a moment before its node is known to be gone.
- `ActorUnavailableError`: a node vanished and Ray has not noticed yet (up to 20 s). The actor
  is told to stop until Ray knows; where it answers, what it said meanwhile is lost.

A worker's units are streams, each in a thread of the actor, with one thread more to tell it to
stop. (`ray.cancel` cannot reach a thread.) When one stream breaks, its worker is *unsure*: its
other streams still deliver what they have, until there is a verdict on the worker.

A node that is drained, preempted or dead costs its unit no attempt. A worker that died by itself
does: `lost_worker` says which it was, and `death_reason` words it.
"""

from __future__ import annotations

import re
import sys
import time
import uuid
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import (
    ActorUnavailableError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from wdsprep.errors import WorkError
from wdsprep.runners import worker_versions
from wdsprep.runners.base import Event, Failure, Message, RunnerSettings, SlotMessage, Unit, Work
from wdsprep.runners.ray.cluster import connect_to_ray, wait_warning, worker_count
from wdsprep.runners.ray.worker import DriversMetrics
from wdsprep.runners.schedule import drive
from wdsprep.runners.stuck_workers import FEWER, LOOK_S, OUT_OF_MEMORY
from wdsprep.runners.worker import GRACE_S
from wdsprep.runners.worker_versions import WdsprepWorker
from wdsprep.version import __version__

cloudpickle.register_pickle_by_value(worker_versions)

VERDICT_S = 2.0


@dataclass(slots=True)
class _Actor:
    handle: Any
    node: str = ""
    """The node on which it runs; known once it is open."""
    is_unsure: bool = False


class RayRunner:
    """A runner of actors on a Ray cluster: one for each share of its CPUs and GPUs, by default."""

    def __init__(self, settings: RunnerSettings) -> None:
        self.settings = settings
        self._tags = {"command": settings.name, "phase": settings.phase}
        self._starts: dict[int, int] = {}
        self._actors: dict[int, _Actor] = {}
        self._awaited: dict[Any, tuple[int, int]] = {}  # refs and streams -> slot, order
        self._verdicts: deque[tuple[float, int, _Actor, RayError]] = deque()
        """When a verdict on a worker is due, with its error."""

    def run(self, work: Work, units: Iterable[Unit]) -> Generator[Event, None, None]:
        settings = self.settings
        cpus = ceil(settings.workers * settings.cpus_per_worker)
        with connect_to_ray(settings.address, cpus=cpus) as is_own:
            workers, allowed = worker_count(settings, is_own=is_own)
            self._metrics = DriversMetrics(self._tags, settings.units)
            self._look = wait_warning(settings)
            kind = settings.accelerator_type
            remote = ray.remote(
                num_cpus=settings.cpus_per_worker,
                num_gpus=settings.gpus_per_worker,
                max_restarts=0,
                max_concurrency=settings.units_per_worker + 1,
                namespace=f"wdsprep-{uuid.uuid4().hex[:8]}",  # names are unique within a run
                **({"accelerator_type": kind} if kind else {}),
            )
            self._class = remote(WdsprepWorker)
            data, path = ray.put(cloudpickle.dumps(work)), ray.put(sys.path)
            self._arguments = __version__, path, data, self._tags
            events = drive(self, units, settings, workers=workers, allowed=allowed)
            yield from self._metrics.noting(events)

    def start(self, slot: int) -> None:
        starts = self._starts[slot] = self._starts.get(slot, 0) + 1
        settings = self.settings
        name = f"wdsprep-{settings.name}-{slot}" + f".{starts}" * (starts > 1)
        planned = max(settings.workers, settings.max_workers, len(self._actors))
        others = planned * settings.units_per_worker
        handle = self._class.options(name=name).remote(*self._arguments, others)
        self._actors[slot] = _Actor(handle)
        self._awaited[handle.open.options(num_returns="streaming").remote()] = slot, 0

    def give(self, slot: int, order: int, unit: Unit) -> None:
        self._metrics.given()
        do = self._actors[slot].handle.do.options(num_returns="streaming")
        self._awaited[do.remote(unit)] = slot, order

    def end(self, slot: int, *, is_stuck: bool = False) -> str:  # noqa: ARG002  all are killed
        self._dismiss(slot)
        return ""

    def hear(self) -> Iterator[SlotMessage]:
        self._look(any(actor.node for actor in self._actors.values()))
        for awaited in self._ready():
            if awaited not in self._awaited:  # its worker was lost just now
                continue
            slot, order = self._awaited[awaited]
            if message := self._read(slot, order, awaited):
                yield slot, order, message
        while self._verdicts and self._verdicts[0][0] <= time.monotonic():
            _, slot, actor, error = self._verdicts.popleft()
            if self._actors.get(slot) is actor:
                yield slot, 0, self._lose(slot, error)

    def _ready(self) -> list[Any]:
        """Return all answers that are there, after a wait for the first.

        The wait ends after 5 s, or sooner if a verdict on a worker is due; there may be no answer.
        """
        awaited = list(self._awaited)
        deadlines = [time.monotonic() + LOOK_S]
        if self._verdicts:
            deadlines.append(self._verdicts[0][0])
        timeout_s = max(0.0, min(deadlines) - time.monotonic())
        if not awaited:
            time.sleep(timeout_s)
            return []
        ready: list[Any] = ray.wait(awaited, timeout=timeout_s)[0]
        if ready and len(awaited) > 1:
            ready = ray.wait(awaited, num_returns=len(awaited), timeout=0)[0]
        return ready

    def _read(self, slot: int, order: int, awaited: Any) -> Message | None:
        is_stream = isinstance(awaited, ray.ObjectRefGenerator)
        if not is_stream:
            del self._awaited[awaited]
        try:
            value = ray.get(next(awaited) if is_stream else awaited)
        except (RayError, StopIteration) as error:
            if is_stream:
                del self._awaited[awaited]
            return self._read_failure(slot, error, is_of_unit=bool(order))
        if value is None:  # it has stopped
            return self._lose(slot, None)
        message: Message = value
        if not order:  # the node comes with what is said of the worker itself
            self._actors[slot].node, message = value
        if message[0] in ("ready", "done", "failed", "fatal"):
            del self._awaited[awaited]
        if message[0] == "ready":
            self._metrics.count(slot, is_open=True)
        elif message[0] == "lost":
            self._dismiss(slot)
        return message

    def _read_failure(self, slot: int, error: Exception, *, is_of_unit: bool) -> Message | None:
        actor = self._actors[slot]
        if not is_of_unit and (line := worker_versions.find_refusal(str(error))):
            return "fatal", (WorkError(line), "")
        if isinstance(error, RayTaskError) and is_of_unit:  # a value that cannot be pickled
            return "failed", Failure(reason=death_reason(error), trace=str(error))
        if is_of_unit and actor.is_unsure:
            return None
        if isinstance(error, ActorUnavailableError):
            actor.is_unsure = True
            self._awaited[actor.handle.stop.remote()] = slot, 0
            return "unsure", None
        if not isinstance(error, RayError):
            return self._lose(slot, None)
        if is_node_gone(error, actor.node):
            return self._lose(slot, error)
        actor.is_unsure = True
        self._verdicts.append((time.monotonic() + VERDICT_S, slot, actor, error))
        return "unsure", None

    def _lose(self, slot: int, error: RayError | None) -> Message:
        lost = lost_worker(error, self._actors[slot].node)
        self._dismiss(slot)
        return "lost", lost

    def _dismiss(self, slot: int) -> None:
        self._metrics.count(slot, is_open=False)
        actor = self._actors.pop(slot)
        for awaited in [a for a, (held_by, _) in self._awaited.items() if held_by == slot]:
            del self._awaited[awaited]
        with suppress(RayError):
            ray.kill(actor.handle)

    def stop(self) -> None:
        """Stop all actors. Their running units are closed at the next yield, and clean up.

        After at most 5 s all actors are killed, even if units are not closed by then. No handle is
        kept: in a cluster that this process connects to later, actors have the same ids, and would
        end with the handles.
        """
        actors = list(self._actors.values())
        try:
            answers = [actor.handle.stop.remote() for actor in actors if actor.node]
            if answers:
                ray.wait(answers, num_returns=len(answers), timeout=GRACE_S)
        finally:
            for actor in actors:
                with suppress(RayError):
                    ray.kill(actor.handle)
            for kept in (self._actors, self._awaited, self._verdicts):
                kept.clear()


LOW = re.compile("low on memory|out of memory issue")  # where Ray itself has killed a worker
FACT = re.compile(r"\t\w+: ")  # as Ray lists them of a dead actor: its class, its id, its address


def is_node_gone(error: RayError, node: str) -> bool:
    """Return whether the worker was lost because its node was drained, preempted or died.

    `node` is its id, or "" if the worker died before it could tell; then only the error says so.
    """
    if isinstance(error, RayActorError) and error.preempted:
        return True
    if not node:
        return "node has died" in str(error)
    return any(known["NodeID"] == node and not known["Alive"] for known in ray.nodes())


def lost_worker(error: RayError | None, node: str) -> Failure:
    """Return what the schedule is told of a worker that is lost.

    `error` is None if the connection to the worker broke and Ray does not call it dead: this costs
    no attempt.
    """
    if error is None:
        return Failure(reason="the connection to the worker broke", costs=False)
    costs = not is_node_gone(error, node)
    return Failure(reason=death_reason(error), trace=str(error), costs=costs)


def death_reason(error: Exception) -> str:
    """Return, in one short line, why Ray says that a worker died."""
    if isinstance(error, RayActorError) and error.preempted:
        return "worker died: its machine was taken back"
    if isinstance(error, OutOfMemoryError) or LOW.search(str(error)):
        return OUT_OF_MEMORY
    text = str(error).strip().split("Worker exit detail: ")[-1].split(" Some common causes")[0]
    said = [line.strip() for line in text.splitlines() if not FACT.match(line)]
    perhaps = f": it may have lacked memory: {FEWER}" if "OOM killer" in str(error) else ""
    return f"worker died: {said[-1].rstrip('.')}"[:300] + perhaps
