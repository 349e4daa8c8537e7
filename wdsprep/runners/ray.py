"""Workers as Ray actors, on a cluster or on a Ray started for the run.

Actors are never restarted by Ray: `queue.drive` makes new ones, because only it knows whose
fault a death was. Ray tells of a death in three ways, and none alone says why:

- `ActorDiedError` that names the node's death or a preemption: no unit is to blame.
- `ActorDiedError` for a dead process: judged `VERDICT_S` later, since a machine that shuts
  down ends its workers a moment before its node is known to be gone.
- `ActorUnavailableError`: a node vanished and Ray has not noticed yet (up to 20 s). The actor
  is asked again until Ray knows.
"""

from __future__ import annotations

import logging
import pickle
import sys
import time
import uuid
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from wdsprep.errors import WorkError
from wdsprep.runners import Event, Unit, Work
from wdsprep.runners.cluster import connected
from wdsprep.runners.queue import Done, Failed, Fatal, Lost, Message, drive
from wdsprep.runners.worker import GRACE_S, Call, attempt, open_work

VERDICT_S = 2.0
PLACING_S = 60.0

log = logging.getLogger("wdsprep")


@dataclass(frozen=True, kw_only=True, slots=True)
class RayRunner:
    workers: int = 0
    """0: one for each share of CPUs and GPUs that the cluster has."""
    max_attempts: int = 3
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
            count = workers or room
            yield from drive(crew, units, workers=count, max_attempts=self.max_attempts)

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
        self._call: Call | None = None
        sys.path.extend(entry for entry in path if entry not in sys.path)

    def open(self) -> tuple[str, Message]:
        self._call, message = open_work(lambda: pickle.loads(self._work))  # noqa: S301  ours
        return ray.get_runtime_context().get_node_id(), message

    def do(self, unit: Unit) -> Generator[Message, None, None]:
        assert self._call is not None  # noqa: S101  a worker that is not open gets no unit
        yield from attempt(self._call, unit)

    def ping(self) -> None:
        """Answered when whatever ran before has ended."""


@dataclass(slots=True)
class _Actor:
    handle: Any
    node: str = ""


class _Actors:
    def __init__(self, runner: RayRunner, work: Work) -> None:
        options: dict[str, Any] = {
            "num_cpus": runner.cpus_per_worker,
            "num_gpus": runner.gpus_per_worker,
            "max_restarts": 0,
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
        self._awaited: dict[Any, int] = {}  # refs and generators -> slot
        self._doubts: deque[tuple[float, int, RayError]] = deque()
        self._placing_until: float | None = time.monotonic() + PLACING_S

    def start(self, slot: int) -> None:
        births = self._births[slot] = self._births.get(slot, 0) + 1
        name = f"{self._name}-{slot}" + f".{births}" * (births > 1)
        handle = self._class.options(name=name).remote(*self._arguments)
        self._actors[slot] = _Actor(handle)
        self._awaited[handle.open.remote()] = slot

    def give(self, slot: int, unit: Unit) -> None:
        stream = self._actors[slot].handle.do.options(num_returns="streaming").remote(unit)
        self._awaited[stream] = slot

    def hear(self) -> Iterable[tuple[int, Message]]:
        for awaited in self._ready():
            slot = self._awaited[awaited]
            if message := self._read(slot, awaited):
                yield slot, message
        while self._doubts and self._doubts[0][0] <= time.monotonic():
            _, slot, error = self._doubts.popleft()
            yield slot, self._bury(slot, error)

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
            del self._awaited[awaited]
        try:
            value = ray.get(next(awaited) if is_stream else awaited)
        except (RayError, StopIteration) as error:
            self._awaited.pop(awaited, None)
            return self._broken(slot, error, is_stream=is_stream)
        if value is None:  # it answers a ping, but what it said meanwhile is lost
            return self._bury(slot, None)
        message: Message = value
        if isinstance(value, tuple):
            self._actors[slot].node, message = value
        if isinstance(message, Done | Failed | Fatal):
            self._awaited.pop(awaited, None)
        if isinstance(message, Lost):
            self._dismiss(slot)
        return message

    def _broken(self, slot: int, error: Exception, *, is_stream: bool) -> Message | None:
        if isinstance(error, RayTaskError) and is_stream:  # a value that cannot be pickled
            return Failed(reason=_why(error), trace=str(error))
        if isinstance(error, ActorUnavailableError):
            self._awaited[self._actors[slot].handle.ping.remote()] = slot
            return None
        if not isinstance(error, RayError):
            return self._bury(slot, None)
        if self._is_taken_away(slot, error):
            return self._bury(slot, error)
        self._doubts.append((time.monotonic() + VERDICT_S, slot, error))
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
        with suppress(RayError):
            ray.kill(self._actors.pop(slot).handle)

    def stop(self) -> None:
        """A cancelled stream is closed at its next yield, so its files are cleaned up."""
        actors = [actor.handle for actor in self._actors.values()]
        try:
            pings = [self._cancel(stream, slot) for stream, slot in self._awaited.items()]
            answers = [ping for ping in pings if ping is not None]
            if answers:
                ray.wait(answers, num_returns=len(answers), timeout=GRACE_S)
        finally:
            for handle in actors:
                with suppress(RayError):
                    ray.kill(handle)

    def _cancel(self, stream: Any, slot: int) -> Any | None:
        if not isinstance(stream, ray.ObjectRefGenerator):
            return None
        ray.cancel(stream)
        return self._actors[slot].handle.ping.remote()


def _why(error: Exception) -> str:
    text = str(error).strip().split("Worker exit detail: ")[-1].split(" Some common causes")[0]
    return f"worker died: {text.splitlines()[-1].strip()}"[:300]
