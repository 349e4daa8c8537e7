"""Runs of a runner over numbers, and what is left of their workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.kit.paths import FIND_TESTS
from tests.kit.runner_work import Number
from wdsprep.runners.base import Finished, Quarantined, RunnerSettings, Step
from wdsprep.runners.make_runner import make_runner


def numbers(count: int) -> Iterator[Number]:
    return map(Number, range(count))


def run(kind: str, work: Any, units: Any, *, workers: int = 2, **options: Any) -> tuple[Any, ...]:
    runner = make_runner(kind, RunnerSettings(workers=workers, name="test", **options))
    events = list(runner.run(work.open, units))
    return tuple([e for e in events if isinstance(e, k)] for k in (Step, Finished, Quarantined))


def wait_until(claim: Callable[[], Any], *, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not claim():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def pids(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


def closed(folder: Path) -> dict[int, str]:
    """The workers whose work was closed, and how many units it still had then."""
    return {
        int(path.name.removeprefix("closed-")): path.read_text() for path in folder.glob("closed-*")
    }


DRIVER = f"""
{FIND_TESTS}
from tests.kit.runner_work import endless_driver; endless_driver(*sys.argv[1:])
"""
