"""How far a run encodes, and its `Speeds`, as its workers tell."""

from dataclasses import dataclass
from typing import Any, cast

from wdsprep.runners.run import RunProgress


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeProgress(RunProgress):
    """How far a shard has come, and what its worker has done since it began."""

    worker: str
    device: str
    done: int
    busy_s: float
    wall_s: float
    batch_size: int
    exact: int


class Speeds:
    """How fast the workers of a run are, from the first batch of each to its last."""

    def __init__(self) -> None:
        self.workers: dict[str, EncodeProgress] = {}

    def heard(self, progress: RunProgress) -> None:
        working = cast("EncodeProgress", progress)
        known = self.workers.get(working.worker)
        if known is None or working.done >= known.done:
            self.workers[working.worker] = working

    def rates(self) -> dict[str, float]:
        """Images a second of each worker."""
        return {w.worker: w.done / w.wall_s for w in self.workers.values() if w.wall_s}

    @property
    def busy(self) -> float:
        """The share of that time in which the devices computed."""
        wall = sum(w.wall_s for w in self.workers.values())
        return sum(w.busy_s for w in self.workers.values()) / wall if wall else 0.0

    def trial(self, before: Any) -> dict[str, Any]:
        """For the manifest of a trial, from which `plan` reckons: what was said before, where this
        run had nothing to do."""
        rates = self.rates()
        if not rates:
            return {"trial": before} if before else {}
        device = next(iter(self.workers.values())).device
        each = sum(rates.values()) / len(rates)
        return {"trial": {"busy": round(self.busy, 3), "device": device, "each": round(each, 2)}}
