"""What can go wrong with a cluster, on one machine: several raylets, real jobs, and faults.

A `Stage` is a Ray cluster whose nodes come and go. A `Job` is the real `wdsprep pack` or `wdsprep
encode`, slowed down so that faults find it at work. A fault is a generator that is resumed at each
event of the run: it waits by yielding, and then does its harm. Each worker keeps a diary of what it
began and ended, so that afterwards nothing needs to be guessed.

`hit` lets a job go through one of `FAULTS`: `house/test_chaos.py` once, `tools/chaos` any number.
"""

import contextlib
import logging.handlers
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from tests.kit.chaos_work import GO, Traced
from tests.kit.clusters import LEAN_HEAD
from tests.kit.damaged import check
from tests.kit.encode_work import Making
from tests.kit.encodes import in_this_process
from tests.kit.packs import BUCKETS, differences, packing_here, tree, wait_gone
from wdsprep.cli import main
from wdsprep.encoding import encode as encoding
from wdsprep.encoding import run_plan
from wdsprep.packing import pack
from wdsprep.runners.base import Event, Finished, Runner, Unit, Work
from wdsprep.runners.ray.cluster import without_death_notices

HEALTH = {  # a node that is silent for six seconds is dead; Ray's own patience is half a minute
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
STORE_NBYTES = 80 << 20
DAY_S = 86_400.0
LAST = 6  # units that wait for the end of the fault
Waiting = Generator[None, None, None]
Fault = Callable[["Scene"], Waiting]


# --- the cluster


class Stage:
    """A head that does no work, and nodes with one CPU each, all at one address."""

    def __init__(self, ip: str = "") -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._usual: dict[str, Any] = {"object_store_memory": STORE_NBYTES}
        if ip:
            self._usual["node_ip_address"] = ip
        head = {**LEAN_HEAD, "num_cpus": 0, "_system_config": HEALTH}
        self.cluster = Cluster(initialize_head=True, head_node_args={**head, **self._usual})
        self.nodes: list[Any] = []
        self._ending = contextlib.ExitStack()
        self._ending.enter_context(without_death_notices())
        where = {"_node_ip_address": ip} if ip else {}
        ray.init(self.cluster.address, log_to_driver=False, logging_level="ERROR", **where)

    def close(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()
        self._ending.close()

    def add(self) -> Any:
        node = self.cluster.add_node(num_cpus=1, **self._usual)
        self.nodes.append(node)
        return node

    def wait_for(self, count: int, started: "subprocess.Popen[bytes]") -> None:
        """Until there are so many nodes; one is started elsewhere."""
        import ray

        while sum(node["Alive"] for node in ray.nodes()) < count:
            if started.poll() is not None:
                raise RuntimeError(f"the node elsewhere ended with {started.returncode}")
            time.sleep(0.1)

    def kill(self, node: Any) -> None:
        """The machine is gone from one moment to the next, with all that ran there."""
        everything = processes_of(node)
        send(everything, signal.SIGKILL)
        wait_gone(everything)
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def warn(self, node: Any, notice_s: float) -> None:
        """What a cloud's notice of the end of a spot machine makes of its node."""
        import ray
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason

        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int((time.time() + notice_s) * 1000)
        client = ray._private.worker.global_worker.gcs_client
        accepted, why_not = client.drain_node(node.node_id, reason, "spot notice", deadline_ms)
        assert accepted, why_not

    def clear(self) -> None:
        """Leave the first node alone."""
        for node in self.nodes[1:]:
            self.kill(node)


def processes_of(node: Any) -> list[int]:
    """A node's raylet and all that it started."""
    raylet = node.all_processes["raylet"][0].process.pid
    return [raylet, *(p.pid for p in psutil.Process(raylet).children(recursive=True))]


def send(pids: Iterable[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


# --- a run with a fault in it


class Diary:
    """What all workers of a run have written so far."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder

    def pages(self) -> dict[int, list[list[str]]]:
        """By process id: what it began and ended, each a word and a unit."""
        pages = self.folder.glob("[0-9]*")
        return {int(p.name): [line.split() for line in p.read_text().splitlines()] for p in pages}

    def of(self, pid: int, what: str) -> set[str]:
        return {unit for noted, unit in self.pages()[pid] if noted == what}

    def in_hand(self, pid: int) -> set[str]:
        return self.of(pid, "began") - self.of(pid, "ended")

    def begun(self) -> Counter[str]:
        rows = [row for page in self.pages().values() for row in page]
        return Counter(unit for what, unit in rows if what == "began")


@dataclass(kw_only=True)
class Scene:
    """What a fault sees and does. `struck` are the workers that it hit, with what each had ended
    by then as the run has heard: only what else they had may be done twice."""

    stage: Stage
    diary: Diary
    after: int
    """So many units are done before the fault comes."""
    last: set[str] = field(default_factory=set)
    """The units that wait for the end of the fault."""
    done: set[str] = field(default_factory=set)
    struck: dict[int, set[str]] = field(default_factory=dict)

    def workers_on(self, node: Any) -> list[int]:
        return [pid for pid in processes_of(node) if pid in self.diary.pages()]

    def busy_on(self, node: Any) -> list[int]:
        """The workers there that have begun something and not ended it."""
        return [pid for pid in self.workers_on(node) if self.diary.in_hand(pid)]

    def strike(self, pids: Iterable[int]) -> None:
        for pid in pids:
            if pid in self.diary.pages():
                self.struck[pid] = self.diary.of(pid, "ended") & self.done

    def excused(self) -> set[str]:
        """What the struck workers had in hand, begun or not."""
        had = [self.diary.of(pid, "began") - before for pid, before in self.struck.items()]
        return set().union(*had)


class Watched:
    """A runner whose workers are traced, and whose events drive a fault."""

    def __init__(self, runner: Runner, scene: Scene, fault: Fault, tracing: dict[str, Any]) -> None:
        self._runner, self._scene, self._tracing = runner, scene, tracing
        self._fault = fault(scene)
        self.is_over = False

    def run(self, work: Work, units: Iterable[Unit]) -> Generator[Event, None, None]:
        todo = list(units)
        self._scene.last = {unit.name for unit in todo[-LAST:]}
        traced = Traced(
            work=work,
            diary=str(self._scene.diary.folder),
            last=frozenset(self._scene.last),
            **self._tracing,
        )
        with closing(self._runner.run(traced.open, todo)) as events:  # type: ignore[type-var]
            for event in events:
                if isinstance(event, Finished):
                    self._scene.done.add(event.unit.name)
                self._go_on()
                yield event

    def _go_on(self) -> None:
        if self.is_over:
            return
        try:
            next(self._fault)
        except StopIteration:
            self.is_over = True
            (self._scene.diary.folder / GO).touch()


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    code: int
    log: tuple[str, ...]
    units: int
    again: Counter[str]
    """Units that were begun more than once, and how many times too often."""
    excused: set[str]
    struck: int
    fault_came: bool
    took_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A command with its input; `pause_s` for each image of `pack`, each batch of `encode`."""

    words: tuple[str, ...]
    pause_s: float

    @property
    def name(self) -> str:
        return self.words[0]

    def command(self, out: str, workers: int) -> list[str]:
        command = [*self.words[:2], out, *self.words[2:], "--workers", str(workers)]
        return command + ["--cpus-per-worker", "1"] * (self.name == "encode")

    def run(
        self,
        stage: Stage,
        out: str,
        fault: Fault,
        *,
        after: int = 2,
        patience_s: float = 1800.0,
        skews_s: tuple[float, ...] = (),
    ) -> Result:
        """The command in this process, as the driver."""
        scene = Scene(stage=stage, diary=Diary(Path(f"{out}.diary")), after=after)
        tracing = {"pause_s": self.pause_s, "skews_s": skews_s}
        watched: list[Watched] = []

        def wrapped(make: Callable[..., Any]) -> Callable[..., Any]:
            def made(*arguments: Any, **options: Any) -> Watched:
                runner = make(*arguments, **options)
                runner = type(runner)(replace(runner.settings, patience_s=patience_s))
                watched.append(Watched(runner, scene, fault, tracing))
                return watched[-1]

            return made

        started, log = time.monotonic(), logging.handlers.BufferingHandler(10**6)
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            enter(patch.object(encoding, "make_encoder", Making(pause_s=self.pause_s)))
            enter(patch.object(run_plan, "make_runner", wrapped(run_plan.make_runner)))
            enter(patch.object(pack, "make_runner", wrapped(pack.make_runner)))
            enter(patch.object(logging.getLogger("wdsprep"), "handlers", [log]))
            code = main(self.command(out, workers=2))
        begun = scene.diary.begun()
        return Result(
            code=code,
            log=tuple(record.getMessage() for record in log.buffer),
            units=len(begun),
            again=Counter({unit: count - 1 for unit, count in begun.items() if count > 1}),
            excused=scene.excused(),
            struck=len(scene.struck),
            fault_came=bool(watched) and watched[0].is_over,
            took_s=time.monotonic() - started,
        )


def undisturbed(job: Job, out: Path) -> dict[str, bytes]:
    """The files that the job makes where nothing happens: in this process."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(in_this_process())
        stack.enter_context(packing_here())
        stack.enter_context(patch.object(encoding, "make_encoder", Making()))
        assert main(job.command(str(out), workers=1)) == 0
    return tree(out)


def pack_job(source: Path | str, *, per_shard: int, pause_s: float) -> Job:
    words = ("pack", str(source), *BUCKETS, "--samples-per-shard", str(per_shard))
    return Job(words=(*words, "--runner", "ray"), pause_s=pause_s)


def encode_job(images: Path | str, *, pause_s: float) -> Job:
    words = ("encode", str(images), "--resolution", "64", "--model", "tiny", "--device", "cpu")
    return Job(words=(*words, "--batch-size", "4"), pause_s=pause_s)


def faults_of(result: Result, out: str, whole: dict[str, bytes]) -> list[str]:
    """Everything that is not as after an undisturbed run. Nothing, if all is well."""
    found = [f"exit code {result.code}"] if result.code else []
    found += [] if result.fault_came else ["the run ended before the fault came"]
    found += differences(tree(out), whole)
    found += [f"verify: {finding}" for finding in check(out).findings]
    found += [f"{unit} was done again without need" for unit in set(result.again) - result.excused]
    return found


# --- faults, each of which finds the workers of a node at work, and the run with something done


def at_work(scene: Scene, node: Any) -> Generator[None, None, list[int]]:
    """Wait until the workers of a node have something in hand, and the run something done."""
    while not (len(scene.done) >= scene.after and (pids := scene.busy_on(node))):
        yield
    return pids


def machine_dies(scene: Scene, node: Any) -> Waiting:
    """And another comes, and gets to work."""
    scene.strike((yield from at_work(scene, node)))
    scene.stage.kill(node)
    yield from at_work(scene, scene.stage.add())


def machine_is_taken_back(scene: Scene, node: Any) -> Waiting:
    """With notice, as clouds give it for spot machines."""
    yield from at_work(scene, node)
    scene.stage.warn(node, notice_s=2.0)
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        yield
    scene.strike(scene.workers_on(node))
    scene.stage.kill(node)


def worker_dies(scene: Scene, node: Any) -> Waiting:
    """And another gets to work there."""
    pids = yield from at_work(scene, node)
    send(pids, signal.SIGKILL)
    scene.strike(pids)
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)])
    yield from at_work(scene, node)


def worker_hangs(scene: Scene, node: Any) -> Waiting:
    """Stopped for good: what it had in hand must be done by another."""
    pids = yield from at_work(scene, node)
    send(pids, signal.SIGSTOP)
    scene.strike(pids)
    while any(psutil.pid_exists(pid) for pid in pids):
        yield


def machine_sleeps(scene: Scene, node: Any) -> Waiting:
    """It is given up for another; then it wakes, and ends what others have done meanwhile."""
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


FAULTS: dict[str, tuple[Callable[[Scene, Any], Waiting], dict[str, Any]]] = {
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
        return job.run(stage, out, partial(make, node=node), after=after, **options)
