"""Work classes for test_runners.py: workers import them from here by name."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wdsprep.errors import FullError

Call = Callable[[Any], Generator[Any, None, Any]]


@dataclass(frozen=True)
class Number:
    value: int

    @property
    def name(self) -> str:
        return f"{self.value:06d}"


@dataclass(frozen=True)
class Square:
    """Three steps, then (square, pid); the units in the sets misbehave."""

    kills: frozenset[int] = frozenset()
    raises: frozenset[int] = frozenset()
    fills: frozenset[int] = frozenset()
    unpicklable: frozenset[int] = frozenset()
    exits: frozenset[int] = frozenset()
    step_s: float = 0.0

    def open(self) -> Call:
        return self.square

    def square(self, unit: Number) -> Generator[int, None, Any]:
        for step in range(3):
            time.sleep(self.step_s)
            yield step
        if unit.value in self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if unit.value in self.exits:
            os._exit(7)
        if unit.value in self.raises:
            raise ValueError(f"no square for {unit.value}")
        if unit.value in self.fills:
            raise FullError("the disk is full: make room and run again")
        if unit.value in self.unpicklable:
            return threading.Lock()
        return unit.value**2, os.getpid()


@dataclass(frozen=True)
class KillOnce:
    """The worker dies at a step that depends on the unit, at its first attempt."""

    folder: str

    def open(self) -> Call:
        return self.call

    def call(self, unit: Number) -> Generator[int, None, int]:
        marker = Path(self.folder, unit.name)
        for step in range(4):
            if unit.value % 4 == 1 and step == unit.value % 3 and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield step
        return unit.value


@dataclass(frozen=True)
class Endless:
    """Writes a temporary file and never ends; removes it when it is made to."""

    folder: str
    step_s: float = 0.1

    def open(self) -> Call:
        Path(self.folder, f"pid-{os.getpid()}").touch()
        return self.call

    def call(self, unit: Number) -> Generator[int, None, None]:
        with self.temporary(Path(self.folder, f"{unit.name}.tmp")):
            while True:
                yield 1
                time.sleep(self.step_s)

    @staticmethod
    @contextmanager
    def temporary(path: Path) -> Generator[None, None, None]:
        path.touch()
        try:
            yield
        finally:
            path.unlink()


@dataclass(frozen=True)
class Slow:
    """Finishes after `folder/go` is there; says first where it runs."""

    folder: str

    def open(self) -> Call:
        return self.call

    def call(self, unit: Number) -> Generator[str, None, int]:
        import ray

        node = ray.get_runtime_context().get_node_id()
        while not Path(self.folder, "go").exists():
            yield node
            time.sleep(0.1)
        return unit.value


@dataclass(frozen=True)
class Unopenable:
    how: str

    def open(self) -> Call:
        if self.how == "full":
            raise FullError("no room for the model")
        if self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ImportError("no module named gpu")


def endless_driver(kind: str, folder: str) -> None:
    """A whole driver process, to be interrupted or killed."""
    from wdsprep.runners import Step, make_runner

    runner = make_runner(kind, workers=2)
    try:
        for event in runner.run(Endless(folder), map(Number, range(2))):
            if isinstance(event, Step):
                Path(folder, f"running-{event.unit.name}").touch()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
