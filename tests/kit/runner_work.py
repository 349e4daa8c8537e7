"""Work classes for the tests of runners: workers import them from here by name."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from wdsprep.errors import FullError, UsageError
from wdsprep.runners.base import BrokenWorkerError, HopelessError

Call = Callable[[Any], Generator[Any, None, Any]]


@dataclass(frozen=True)
class Number:
    value: int

    @property
    def name(self) -> str:
        return f"{self.value:06d}"


class Work:
    """Work whose units are done by `call`, with nothing to open."""

    call: Call

    def open(self) -> Call:
        return self.call


ERRORS: dict[str, BaseException] = {
    "despairs": HopelessError("shard 256/000003.tar is truncated"),
    "fills": FullError("the disk is full: make room and run again"),
    "interrupts": KeyboardInterrupt(),
    "raises": ValueError("no square for this"),
}


@dataclass(frozen=True)
class Square(Work):
    """Three steps, then (square, pid), but for the units that do some harm: one of ERRORS, or that
    kill their worker, or whose result is no value to send."""

    harm: Mapping[int, str] = field(default_factory=dict)
    step_s: float = 0.0

    def call(self, unit: Number) -> Generator[int, None, Any]:
        for step in range(3):
            time.sleep(self.step_s)
            yield step
        harm = self.harm.get(unit.value)
        if harm == "kills":
            os.kill(os.getpid(), signal.SIGKILL)
        if harm in ERRORS:
            raise ERRORS[harm]
        return threading.Lock() if harm else (unit.value**2, os.getpid())


@dataclass(frozen=True)
class Together:
    """A unit ends only when `count` units are in flight in its worker."""

    count: int

    def open(self) -> Call:
        barrier = threading.Barrier(self.count)

        def call(unit: Number) -> Generator[int, None, tuple[int, int]]:
            yield unit.value
            barrier.wait(timeout=20)
            yield unit.value
            return os.getpid(), threading.get_ident()

        return call


@dataclass(frozen=True)
class BreakOnce(Work):
    """Unit 1 finds its worker broken, once; the others clean up, and tell where they ran."""

    folder: str

    def call(self, unit: Number) -> Generator[int, None, int]:
        marker = Path(self.folder, "broken")
        with temporary(Path(self.folder, f"{unit.name}.tmp")):
            for _ in range(5 if unit.value == 1 else 15):
                time.sleep(0.05)
                yield os.getpid()
            if unit.value == 1 and not marker.exists():
                marker.write_text(str(os.getpid()))
                raise BrokenWorkerError("the GPU is poisoned")
        return os.getpid()


@dataclass(frozen=True)
class Calls(Work):
    """The result of each unit, which takes its time, is what a function returns."""

    function: Callable[[], Any] = os.getpid
    unit_s: float = 0.0

    def call(self, _unit: Number) -> Generator[int, None, Any]:
        time.sleep(self.unit_s)
        yield 1
        return self.function()


def visible_gpus() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def cores_of_a_gpu() -> float:
    from wdsprep.runners.ray.cluster import node_share

    return node_share(1)


def threads_of_a_product() -> int:
    """Count the threads that a product of NumPy starts."""
    before = len(os.listdir("/proc/self/task"))
    import numpy

    ones = numpy.ones((300, 300))
    assert (ones @ ones)[0, 0] == 300
    return len(os.listdir("/proc/self/task")) - before


class NobodyKnewError(Exception):
    """What a library raises that nobody thought of."""


@dataclass(frozen=True)
class Cursed:
    """Workers open everywhere, and at some places die of whatever they get, or fail at it.
    Elsewhere, units take turns with that: up to so many deaths, each waits for one more. Whoever
    only fails waits first until another place is open: alone it would fail at all there is."""

    folder: str
    places: frozenset[int]
    deaths: int
    lives_on: bool = False

    def open(self) -> Call:
        turns = count()
        if place_here() not in self.places:
            Path(f"{self.folder}-open").touch()
        return lambda unit: self.call(unit, min(next(turns), self.deaths))

    def call(self, unit: Number, deaths: int) -> Generator[int, None, int]:
        place = place_here()
        if place in self.places:
            Path(self.folder, f"{unit.name}-{place}").touch()
            if self.lives_on:
                until = time.monotonic() + 60
                while not Path(f"{self.folder}-open").exists() and time.monotonic() < until:
                    time.sleep(0.05)
                raise NobodyKnewError("gone")
            os.kill(os.getpid(), signal.SIGKILL)
        while len(list(Path(self.folder).iterdir())) < deaths:
            yield 0
            time.sleep(0.05)
        return place


def place_here() -> int:
    """The GPU that a local worker sees, or the slot of an actor."""
    if "CUDA_VISIBLE_DEVICES" in os.environ and "ray" not in sys.modules:
        return int(os.environ["CUDA_VISIBLE_DEVICES"])
    import ray

    return int(ray.get_runtime_context().get_actor_name().rpartition("-")[2].partition(".")[0])


@dataclass(frozen=True)
class Endless:
    """Writes a temporary file and never ends; removes it when it is made to."""

    folder: str
    step_s: float = 0.1

    def open(self) -> EndlessEngine:
        Path(self.folder, f"pid-{os.getpid()}").touch()
        return EndlessEngine(self)


@dataclass(frozen=True)
class EndlessEngine:
    work: Endless

    def __call__(self, unit: Number) -> Generator[int, None, None]:
        with temporary(Path(self.work.folder, f"{unit.name}.tmp.{os.getpid()}")):
            while True:
                yield 1
                time.sleep(self.work.step_s)

    def close(self) -> None:
        """Tells how many units were still there."""
        folder = Path(self.work.folder)
        left = len(list(folder.glob(f"*.tmp.{os.getpid()}")))
        Path(folder, f"closed-{os.getpid()}").write_text(str(left))


@contextmanager
def temporary(path: Path) -> Generator[None, None, None]:
    path.touch()
    try:
        yield
    finally:
        path.unlink()


@dataclass(frozen=True)
class Slow(Work):
    """Finishes after `folder/go` is there; says first where it runs."""

    folder: str

    def call(self, unit: Number) -> Generator[str, None, int]:
        import ray

        node = ray.get_runtime_context().get_node_id()
        while not Path(self.folder, "go").exists():
            Path(self.folder, "runs").touch()
            yield node
            time.sleep(0.1)
        return unit.value


@dataclass(frozen=True)
class Unopenable:
    """Cannot be opened, or not at these places. The others take longer: they are heard of last."""

    how: str
    places: frozenset[int] = frozenset()

    def open(self) -> Call:
        if self.places and place_here() not in self.places:
            time.sleep(0.5)
            return Square(step_s=0.01).open()
        if self.how == "full":
            raise FullError("no room for the model")
        if self.how == "request":
            raise UsageError("--text-length: 9 is too long")
        if self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ImportError("no module named gpu")


@dataclass(frozen=True)
class HangsAtFirst:
    """The first worker never opens."""

    folder: str

    def open(self) -> Call:
        try:
            Path(self.folder, "hangs").touch(exist_ok=False)
        except FileExistsError:
            return Square().open()
        time.sleep(1000)
        raise AssertionError


@dataclass(frozen=True)
class Threadless:
    """From its opening on, no thread can be started."""

    def open(self) -> Call:
        threading.Thread.start = _cannot_start  # type: ignore[method-assign]
        return Square().open()


def _cannot_start(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


class Deaf:
    """Gets a SIGTERM where Python can raise nothing."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)


@dataclass(frozen=True)
class Deafened(Work):
    """A unit goes on for a minute after such a signal."""

    def call(self, unit: Number) -> Generator[int, None, int]:
        Deaf()
        for step in range(600):
            yield step
            time.sleep(0.1)
        return unit.value


def endless_driver(kind: str, folder: str, units_per_worker: str) -> None:
    """A whole driver process, to be interrupted or killed."""
    from wdsprep.runners.base import RunnerSettings, Step
    from wdsprep.runners.make_runner import make_runner

    count = int(units_per_worker)
    runner = make_runner(kind, RunnerSettings(workers=2, units_per_worker=count))
    try:
        for event in runner.run(Endless(folder).open, map(Number, range(2 * count))):
            if isinstance(event, Step):
                Path(folder, f"running-{event.unit.name}").touch()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


@dataclass(frozen=True)
class Collected:
    """The result says how many full garbage collections there were while the work was opened, and
    at how many collections of the next generation there is one now."""

    def open(self) -> Call:
        before = gc.get_stats()[2]["collections"]
        assert [[number] for number in range(300_000)]  # objects that stay, as those of imports do
        during = gc.get_stats()[2]["collections"] - before
        return Calls(lambda: (during, gc.get_threshold()[2])).call
