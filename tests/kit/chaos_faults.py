"""Faults for a Ray cluster. Each finds the workers of a node at work, and the run with something
done. `hit` lets a job go through one of `FAULTS`."""

import contextlib
import signal
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any
from unittest.mock import patch

import psutil

from tests.kit.chaos import (
    STORE_NBYTES,
    Fault,
    Job,
    Result,
    Scene,
    Stage,
    Waiting,
    processes_of,
    send,
)

DAY_S = 86_400.0


def at_work(scene: Scene, node: Any) -> Generator[None, None, list[int]]:
    """Wait until the workers of a node have something in hand, and the run something done."""
    while not (len(scene.done) >= scene.after and (pids := scene.busy_on(node))):
        yield
    return pids


def machine_dies(node: Any) -> Fault:
    """And another comes, and gets to work."""

    def fault(scene: Scene) -> Waiting:
        scene.strike((yield from at_work(scene, node)))
        scene.stage.kill(node)
        yield from at_work(scene, scene.stage.add())

    return fault


def machine_is_taken_back(node: Any) -> Fault:
    """With notice, as clouds give it for spot machines."""

    def fault(scene: Scene) -> Waiting:
        yield from at_work(scene, node)
        scene.stage.warn(node, notice_s=2.0)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            yield
        scene.strike(scene.workers_on(node))
        scene.stage.kill(node)

    return fault


def worker_dies(node: Any) -> Fault:
    """And another gets to work there."""

    def fault(scene: Scene) -> Waiting:
        pids = yield from at_work(scene, node)
        send(pids, signal.SIGKILL)
        scene.strike(pids)
        psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)])
        yield from at_work(scene, node)

    return fault


def worker_hangs(node: Any) -> Fault:
    """Stopped for good: what it had in hand must be done by another."""

    def fault(scene: Scene) -> Waiting:
        pids = yield from at_work(scene, node)
        send(pids, signal.SIGSTOP)
        scene.strike(pids)
        while any(psutil.pid_exists(pid) for pid in pids):
            yield

    return fault


def machine_sleeps(node: Any) -> Fault:
    """It is given up for another; then it wakes, and ends what others have done meanwhile."""

    def fault(scene: Scene) -> Waiting:
        pids = yield from at_work(scene, node)
        scene.strike(pids)
        everything = processes_of(node)
        send(everything, signal.SIGSTOP)
        late = set().union(*(scene.diary.in_hand(pid) for pid in pids)) - scene.last
        scene.stage.add()
        while not late <= scene.done:
            yield
        send(everything[1:], signal.SIGCONT)  # the raylet, which ends the others, last
        while any(psutil.pid_exists(pid) and scene.diary.in_hand(pid) & late for pid in pids):
            yield
        send(everything, signal.SIGCONT)

    return fault


@contextlib.contextmanager
def full_object_stores(stage: Stage) -> Iterator[None]:
    """Somebody else on the cluster has all nodes' object stores full of what it still reads."""
    import numpy as np
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Hog:
        def fill(self) -> int:
            self.held = [ray.get(ray.put(np.ones(8 << 20, np.uint8))) for _ in range(15)]
            return sum(block.nbytes for block in self.held)

    hogs = []
    for node in [stage.cluster.head_node, *stage.nodes]:
        where = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        hogs.append(ray.remote(num_cpus=0)(Hog).options(scheduling_strategy=where).remote())
    try:
        assert min(ray.get([hog.fill.remote() for hog in hogs])) > STORE_NBYTES
        yield
    finally:
        for hog in hogs:
            ray.kill(hog)


FAULTS: dict[str, tuple[Callable[[Any], Fault], dict[str, Any]]] = {
    "machine dies": (machine_dies, {}),
    "spot notice": (machine_is_taken_back, {}),
    "worker dies": (worker_dies, {}),
    "worker hangs": (worker_hangs, {"patience_s": 4.0}),
    "sleeps": (machine_sleeps, {}),
    "clocks": (worker_dies, {"skews_s": (-3 * DAY_S, 3 * DAY_S)}),
    "full": (worker_dies, {}),
}
"""What happens to a node by the name of the fault, and the options of the run."""


def hit(stage: Stage, job: Job, name: str, out: str, *, after: int = 2) -> Result:
    """Run a job on two nodes, of which a new one is hit by the fault of this name."""
    make, options = FAULTS[name]
    node, now = stage.add(), time.time
    with contextlib.ExitStack() as stack:
        stack.callback(stage.clear)
        if name == "full":
            stack.enter_context(full_object_stores(stage))
        if name == "clocks":  # the driver's is wrong too
            stack.enter_context(patch.object(time, "time", lambda: now() + 2 * DAY_S))
        return job.run(stage, out, make(node), after=after, **options)
