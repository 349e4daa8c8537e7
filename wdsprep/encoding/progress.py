"""How far a run encodes, and its `Speeds`, as its workers tell."""

from dataclasses import dataclass
from typing import Any, cast

from wdsprep.runners.run import JointProgress, RunProgress

LEAST_SHOWN = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeProgress(JointProgress):
    """The progress of a shard, and what its worker has done since it began."""

    worker: str
    device: str
    done: int
    busy_s: float
    text_s: float
    launch_s: float
    wall_s: float
    batch_size: int
    exact: int


class Speeds:
    """The speeds of the workers of a run, from the first batch of each to its last."""

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
        return self._share(sum(w.busy_s for w in self.workers.values()))

    @property
    def text(self) -> float:
        """The share of what the devices computed that captions took."""
        busy = sum(w.busy_s for w in self.workers.values())
        return sum(w.text_s for w in self.workers.values()) / busy if busy else 0.0

    @property
    def launching(self) -> float:
        """The share in which hosts told GPUs what to do: near 1 it is they that hold these up."""
        return self._share(sum(w.launch_s for w in self.workers.values()))

    def _share(self, seconds: float) -> float:
        wall = sum(w.wall_s for w in self.workers.values())
        return seconds / wall if wall else 0.0

    def figures(self) -> dict[str, float]:
        """Return figures for a tracker: how many workers there are, and how busy their devices."""
        return {"busy": self.busy, "text_share": self.text, "workers": len(self.workers)}

    def __str__(self) -> str:
        """Return how busy the devices are, with the share of text, and of GPUs their hosts."""
        text = f" ({self.text:.0%} of it with text)" if self.text >= LEAST_SHOWN else ""
        launching = f", launching {self.launching:.0%}" if self.launching else ""
        return f"busy {self.busy:.0%}{text}{launching}"

    def trial(self, before: Any) -> dict[str, Any]:
        """Return what the manifest says of a trial, from which `plan` estimates.

        Where this run had nothing to do, that is what the manifest said before.
        """
        rates = self.rates()
        if not rates:
            return {"trial": before} if before else {}
        device = next(iter(self.workers.values())).device
        each = sum(rates.values()) / len(rates)
        found = {"busy": round(self.busy, 3), "device": device, "each": round(each, 2)}
        if self.text >= LEAST_SHOWN:
            found["text"] = round(self.text, 3)
        if self.launching:
            found["launching"] = round(self.launching, 3)
        return {"trial": found}
