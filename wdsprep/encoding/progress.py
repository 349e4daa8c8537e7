"""The progress of a run of `encode`, and the speeds of its workers."""

from dataclasses import dataclass
from typing import Any, cast

from wdsprep.runners.run import RunProgress

LEAST_SHOWN = 0.1
"""The least share of time that is told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeProgress(RunProgress):
    """The progress of a shard that is encoded, and the work of its worker so far."""

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
    """The speeds of the workers of a run, each measured from its first batch to its last."""

    def __init__(self) -> None:
        self.workers: dict[str, EncodeProgress] = {}

    def take(self, progress: RunProgress) -> None:
        working = cast("EncodeProgress", progress)
        known = self.workers.get(working.worker)
        if known is None or working.done >= known.done:
            self.workers[working.worker] = working

    def rates(self) -> dict[str, float]:
        """Return the images a second of each worker, by its name."""
        return {w.worker: w.done / w.wall_s for w in self.workers.values() if w.wall_s}

    @property
    def busy(self) -> float:
        """Return the share of the time in which the devices computed."""
        return self._share(sum(w.busy_s for w in self.workers.values()))

    @property
    def text(self) -> float:
        """Return the share of the devices' computing time that captions took."""
        busy = sum(w.busy_s for w in self.workers.values())
        return sum(w.text_s for w in self.workers.values()) / busy if busy else 0.0

    @property
    def launching(self) -> float:
        """Return the share of the time in which hosts launched work on GPUs.

        Near 1, it is the hosts that limit the speed.
        """
        return self._share(sum(w.launch_s for w in self.workers.values()))

    def _share(self, seconds: float) -> float:
        wall = sum(w.wall_s for w in self.workers.values())
        return seconds / wall if wall else 0.0

    def figures(self) -> dict[str, float]:
        """Return figures for a tracker: the number of workers, and how busy their devices are."""
        return {"busy": self.busy, "text_share": self.text, "workers": len(self.workers)}

    def __str__(self) -> str:
        """Return a line that says how busy the devices are, and with what."""
        text = f" ({self.text:.0%} of it with text)" if self.text >= LEAST_SHOWN else ""
        launching = f", launching {self.launching:.0%}" if self.launching else ""
        return f"device busy {self.busy:.0%} of the time{text}{launching}"

    def trial(self, before: Any) -> dict[str, Any]:
        """Return {"trial": ...}, the manifest's entry with the speed of a trial run, for `plan`.

        If this run had nothing to do, the entry is `before`, that of an earlier trial; without one,
        return {}.
        """
        rates = self.rates()
        if not rates:
            return {"trial": before} if before else {}
        device = next(iter(self.workers.values())).device
        each = sum(rates.values()) / len(rates)
        found = {"busy": round(self.busy, 3), "device": device, "each": float(f"{each:.4g}")}
        if self.text >= LEAST_SHOWN:
            found["text"] = round(self.text, 3)
        if self.launching:
            found["launching"] = round(self.launching, 3)
        return {"trial": found}
