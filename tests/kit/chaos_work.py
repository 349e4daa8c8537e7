"""What the workers of house/test_chaos.py do beside their work: keep a diary, wait, be wrong
about the time.

Workers import it from here, so it loads neither torch nor anything that only a driver needs.
"""

import datetime
import os
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wdsprep.packing import worker as packer
from wdsprep.packing.worker import PackedSlice
from wdsprep.runners.base import Unit, Work

GO = "go"
GATE_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """Work whose workers keep a diary each. The units in `last` are not done before the fault is
    over, so that there is work for as long as it takes, and no longer."""

    work: Work
    diary: str
    last: frozenset[str]
    pause_s: float
    """For each image that is packed."""
    skews_s: tuple[float, ...] = ()
    """How far off the clock of a worker is, in turn."""

    def open(self) -> "Tracing":
        page = Path(self.diary, str(os.getpid()))
        if self.skews_s:
            skew_clock(self.skews_s[len(list(page.parent.iterdir())) % len(self.skews_s)])
        page.touch()
        packer.PROGRESS_S = 0.05
        check_samples = PackedSlice.check_samples

        def check_slowly(packed: PackedSlice, *arguments: Any) -> Iterator[Any]:
            for checked in check_samples(packed, *arguments):
                time.sleep(self.pause_s)
                yield checked

        PackedSlice.check_samples = check_slowly  # type: ignore[assignment, method-assign]
        return Tracing(self.work(), page, self.last)


class Tracing:
    def __init__(
        self, call: Callable[[Any], Generator[Any, None, Any]], page: Path, last: frozenset[str]
    ) -> None:
        self._call, self._page, self._last = call, page, last
        self.units_at_once = getattr(call, "units_at_once", 0)

    def __call__(self, unit: Unit) -> Generator[Any, None, Any]:
        self._note("began", unit)
        result = yield from self._gated(self._call(unit), is_last=unit.name in self._last)
        self._note("ended", unit)
        return result

    def _gated(
        self, steps: Generator[Any, None, Any], *, is_last: bool
    ) -> Generator[Any, None, Any]:
        """The last units are seen to come further while they wait: nobody takes them for hung."""
        deadline = time.monotonic() + GATE_S * is_last
        try:
            progress = next(steps)
        except StopIteration as end:  # somebody else has done it
            return end.value
        while time.monotonic() < deadline and not (self._page.parent / GO).exists():
            progress = replace(progress, nbytes=progress.nbytes + 1)
            yield progress
            time.sleep(0.1)
        return (yield from steps)

    def _note(self, what: str, unit: Unit) -> None:
        with self._page.open("a") as page:
            page.write(f"{what} {unit.name}\n")

    def close(self) -> None:
        if end := getattr(self._call, "close", None):
            end()


def skew_clock(by_s: float) -> None:
    """Set this process's clock forward or back, as far as Python looks at it."""
    real_time, real = time.time, datetime.datetime

    class Wrong(real):  # type: ignore[misc, valid-type]
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return real.now(tz) + datetime.timedelta(seconds=by_s)

    time.time = lambda: real_time() + by_s
    datetime.datetime = Wrong  # type: ignore[misc]
