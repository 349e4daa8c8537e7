"""Workers as Ray actors, on a cluster or on a Ray started for the run.

Actors are never restarted by Ray: `queue.drive` makes new ones, because only it knows whose
fault a death was. Ray tells of a death in three ways, and none alone says why:

- `ActorDiedError` that names the node's death or a preemption: no unit is to blame.
- `ActorDiedError` for a dead process: judged `VERDICT_S` later, since a machine that shuts
  down ends its workers a moment before its node is known to be gone.
- `ActorUnavailableError`: a node vanished and Ray has not noticed yet (up to 20 s). The actor
  is told to stop until Ray knows; where it answers, what it said meanwhile is lost.

A worker's units are streams, each in a thread of the actor, with one thread more to tell it to
stop. (`ray.cancel` cannot reach a thread.) When one stream breaks, its worker is *doubted*: its
other streams still deliver what they have, until there is a verdict on the worker.
"""

from __future__ import annotations

import logging
import pickle
import sys
import time
import uuid
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from wdsprep.errors import WorkError
from wdsprep.runners import Event, Unit, Work
from wdsprep.runners.cluster import connected
from wdsprep.runners.desk import GRACE_S, Desk, open_desk
from wdsprep.runners.queue import Done, Failed, Fatal, Heard, Lost, Message, Returned, drive

VERDICT_S = 2.0
PLACING_S = 60.0

log = logging.getLogger("wdsprep")


@dataclass(frozen=True, kw_only=True, slots=True)
class RayRunner:
    workers: int = 0
    """0: one for each share of CPUs and GPUs that the cluster has."""
    max_attempts: int = 3
    units_per_worker: int = 1
    name: str = "work"
    address: str | None = None
    """None: the Ray of this process, or of RAY_ADDRESS, or one started for the run."""
    cpus_per_worker: float = 1
    gpus_per_worker: float = 0
    accelerator_type: str | None = None
    dashboard: bool = False

    def run(self, work: Work, units: Iterable[Unit]) -> Generator[Event, None, None]:
        cpus = ceil(self.workers * self.cpus_per_worker)
        with connected(self.address, cpus=cpus, dashboard=self.dashboard) as is_own:
            workers = self.workers
            if (is_own or not workers) and not (room := self._room()):
                raise WorkError(
                    f"no node of the Ray cluster has {self._wish()}: ask for less a worker, "
                    "or add nodes (where they start on demand, name the number of workers)"
                )
            crew = _Actors(self, work)
            yield from drive(
                crew,
                units,
                workers=workers or room,
                max_attempts=self.max_attempts,
                units_per_worker=self.units_per_worker,
            )

    def _room(self) -> int:
        return sum(self._room_on(node["Resources"]) for node in ray.nodes() if node["Alive"])

    def _room_on(self, resources: dict[str, float]) -> int:
        if self.accelerator_type and f"accelerator_type:{self.accelerator_type}" not in resources:
            return 0
        shares = {"CPU": self.cpus_per_worker, "GPU": self.gpus_per_worker}
        if not any(shares.values()):
            shares["CPU"] = 1
        return int(min(resources.get(kind, 0) / share for kind, share in shares.items() if share))

    def _wish(self) -> str:
        accelerator = f" of type {self.accelerator_type}" if self.accelerator_type else ""
        return f"{self.cpus_per_worker:g} CPU and {self.gpus_per_worker:g} GPU{accelerator}"


class WdsprepWorker:
    """The actor. Its class and name are what the Ray dashboard shows."""

    def __init__(self, work: bytes, path: list[str]) -> None:
        self._work = work
        self._desk: Desk | None = None
        sys.path.extend(entry for entry in path if entry not in sys.path)

    def open(self) -> tuple[str, Message]:
        self._desk, message = open_desk(lambda: pickle.loads(self._work))  # noqa: S301  ours
        return ray.get_runtime_context().get_node_id(), message

    def do(self, unit: Unit) -> Generator[Message, None, None]:
        assert self._desk is not None  # noqa: S101  a worker that is not open gets no unit
        yield from self._desk.do(unit)

    def stop(self) -> None:
        """Answered when what ran has ended."""
        if self._desk:
            self._desk.stop()


@dataclass(slots=True)
class _Actor:
    handle: Any
    awaited: set[Any] = field(default_factory=set)
    node: str = ""
    """Where it runs; known once it is open."""
    is_doubted: bool = False
    unsent: list[int] = field(default_factory=list)
    """Orders that it was given since; they come back with the verdict."""


class _Actors:
    def __init__(self, runner: RayRunner, work: Work) -> None:
        options: dict[str, Any] = {
            "num_cpus": runner.cpus_per_worker,
            "num_gpus": runner.gpus_per_worker,
            "max_restarts": 0,
            "max_concurrency": runner.units_per_worker + 1,
            "namespace": f"wdsprep-{uuid.uuid4().hex[:8]}",  # names are unique within a run
        }
        if runner.accelerator_type:
            options["accelerator_type"] = runner.accelerator_type
        self._class = ray.remote(**options)(WdsprepWorker)
        self._name = f"wdsprep-{runner.name}"
        self._wish = runner._wish()
        self._arguments = ray.put(cloudpickle.dumps(work)), ray.put(sys.path)
        self._births: dict[int, int] = {}
        self._actors: dict[int, _Actor] = {}
        self._awaited: dict[Any, tuple[int, int]] = {}  # refs and streams -> slot, order
        self._doubts: deque[tuple[float, int, _Actor, RayError]] = deque()
        self._placing_until: float | None = time.monotonic() + PLACING_S

    def start(self, slot: int) -> None:
        births = self._births[slot] = self._births.get(slot, 0) + 1
        name = f"{self._name}-{slot}" + f".{births}" * (births > 1)
        handle = self._class.options(name=name).remote(*self._arguments)
        self._actors[slot] = _Actor(handle)
        self._await(handle.open.remote(), slot)

    def give(self, slot: int, order: int, unit: Unit) -> None:
        actor = self._actors[slot]
        if actor.is_doubted:
            actor.unsent.append(order)
        else:
            self._await(actor.handle.do.options(num_returns="streaming").remote(unit), slot, order)

    def _await(self, awaited: Any, slot: int, order: int = 0) -> None:
        self._awaited[awaited] = slot, order
        self._actors[slot].awaited.add(awaited)

    def _forget(self, awaited: Any) -> None:
        slot, _ = self._awaited.pop(awaited)
        self._actors[slot].awaited.discard(awaited)

    def hear(self) -> Iterable[Heard]:
        for awaited in self._ready():
            if awaited not in self._awaited:  # its worker was buried just now
                continue
            slot, order = self._awaited[awaited]
            actor = self._actors[slot]
            if message := self._read(slot, awaited):
                yield from _heard(slot, order, actor, message)
        while self._doubts and self._doubts[0][0] <= time.monotonic():
            _, slot, actor, error = self._doubts.popleft()
            if self._actors.get(slot) is actor:
                yield from _heard(slot, 0, actor, self._bury(slot, error))

    def _ready(self) -> list[Any]:
        """Wait for the first, then take all there are: one look at a list that may be long."""
        awaited = list(self._awaited)
        deadlines = [self._doubts[0][0]] if self._doubts else []
        if self._placing_until:
            deadlines.append(self._placing_until)
        timeout_s = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        if not awaited:
            time.sleep(timeout_s or 0.0)
            return []
        ready: list[Any] = ray.wait(awaited, timeout=timeout_s)[0]
        if ready and len(awaited) > 1:
            ready = ray.wait(awaited, num_returns=len(awaited), timeout=0)[0]
        self._warn_of_placing(bool(ready))
        return ready

    def _warn_of_placing(self, is_placed: bool) -> None:
        if is_placed:
            self._placing_until = None
        elif self._placing_until and time.monotonic() >= self._placing_until:
            self._placing_until = None
            log.warning("Ray has not placed a worker yet: each needs %s", self._wish)

    def _read(self, slot: int, awaited: Any) -> Message | None:
        is_stream = isinstance(awaited, ray.ObjectRefGenerator)
        if not is_stream:
            self._forget(awaited)
        try:
            value = ray.get(next(awaited) if is_stream else awaited)
        except (RayError, StopIteration) as error:
            if is_stream:
                self._forget(awaited)
            return self._broken(slot, error, is_stream=is_stream)
        if value is None:  # it has stopped
            return self._bury(slot, None)
        message: Message = value
        if isinstance(value, tuple):
            self._actors[slot].node, message = value
        if is_stream and isinstance(message, Done | Failed | Fatal):
            self._forget(awaited)
        if isinstance(message, Lost):
            self._dismiss(slot)
        return message

    def _broken(self, slot: int, error: Exception, *, is_stream: bool) -> Message | None:
        actor = self._actors[slot]
        if isinstance(error, RayTaskError) and is_stream:  # a value that cannot be pickled
            return Failed(reason=_why(error), trace=str(error))
        if is_stream and actor.is_doubted:
            return None
        if isinstance(error, ActorUnavailableError):
            actor.is_doubted = True
            self._await(actor.handle.stop.remote(), slot)
            return None
        if not isinstance(error, RayError):
            return self._bury(slot, None)
        if self._is_taken_away(slot, error):
            return self._bury(slot, error)
        actor.is_doubted = True
        self._doubts.append((time.monotonic() + VERDICT_S, slot, actor, error))
        return None

    def _is_taken_away(self, slot: int, error: RayError) -> bool:
        """Was it the node that went, rather than the worker?"""
        if isinstance(error, RayActorError) and error.preempted:
            return True
        node = self._actors[slot].node
        if not node:
            return "node has died" in str(error)
        return any(known["NodeID"] == node and not known["Alive"] for known in ray.nodes())

    def _bury(self, slot: int, error: RayError | None) -> Lost:
        costs = error is not None and not self._is_taken_away(slot, error)
        self._dismiss(slot)
        reason = _why(error) if error else "the connection to the worker broke"
        return Lost(reason=reason, trace=str(error or ""), costs=costs)

    def _dismiss(self, slot: int) -> None:
        actor = self._actors.pop(slot)
        for awaited in actor.awaited:
            del self._awaited[awaited]
        with suppress(RayError):
            ray.kill(actor.handle)

    def stop(self) -> None:
        """Running units are closed at their next yield, so that their files are cleaned up."""
        actors = list(self._actors.values())
        try:
            answers = [actor.handle.stop.remote() for actor in actors if actor.node]
            if answers:
                ray.wait(answers, num_returns=len(answers), timeout=GRACE_S)
        finally:
            for actor in actors:
                with suppress(RayError):
                    ray.kill(actor.handle)


def _heard(slot: int, order: int, actor: _Actor, message: Message) -> Iterator[Heard]:
    if isinstance(message, Lost):
        for unsent in actor.unsent:
            yield slot, unsent, Returned()
    yield slot, order, message


def _why(error: Exception) -> str:
    text = str(error).strip().split("Worker exit detail: ")[-1].split(" Some common causes")[0]
    return f"worker died: {text.splitlines()[-1].strip()}"[:300]
