"""The progress of a run of `encode`, the work of its devices, and the speeds of its workers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from wdsprep.runners.run import RunProgress

LEAST_SHOWN = 0.1
"""The least share of time that is told."""


@dataclass(slots=True)
class Stats:
    """The work that a device has done so far.

    `wall_s` runs from the first launch to the last batch's end, and `launch_s` is the time in which
    the host launched work on a GPU. `text_s` is the part of `busy_s` that captions took. `samples`
    are images, or captions if there are no images; `exact` are the rows that were computed again in
    fp32. The sizes are the present batch sizes for images and for captions.
    """

    samples: int = 0
    batches: int = 0
    busy_s: float = 0.0
    text_s: float = 0.0
    launch_s: float = 0.0
    wall_s: float = 0.0
    exact: int = 0
    batch_size: int = 0
    text_size: int = 0


def combine(stats: Sequence[Stats]) -> Stats:
    """Return the work of several devices of one machine together.

    Counts are added up. Of the times in which devices were busy or launching, the result has the
    mean, of `wall_s` the longest, and of the batch sizes the smallest.
    """
    return Stats(
        samples=sum(each.samples for each in stats),
        batches=sum(each.batches for each in stats),
        busy_s=sum(each.busy_s for each in stats) / len(stats),
        text_s=sum(each.text_s for each in stats) / len(stats),
        launch_s=sum(each.launch_s for each in stats) / len(stats),
        wall_s=max(each.wall_s for each in stats),
        exact=sum(each.exact for each in stats),
        batch_size=min(each.batch_size for each in stats),
        text_size=min(each.text_size for each in stats),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeProgress(RunProgress):
    """The progress of a shard that is encoded, and the work of its worker so far."""

    worker: str
    device: str
    stats: Stats


class Speeds:
    """The speeds of the workers of a run, each measured from its first batch to its last."""

    def __init__(self) -> None:
        self.workers: dict[str, Stats] = {}
        """What each worker has done, by its name."""
        self._device = ""

    def take(self, progress: RunProgress) -> None:
        working = cast("EncodeProgress", progress)
        name, stats = working.worker, working.stats
        if name not in self.workers or stats.samples >= self.workers[name].samples:
            self.workers[name], self._device = stats, self._device or working.device

    def rates(self) -> dict[str, float]:
        """Return the images a second of each worker, by its name."""
        return {name: s.samples / s.wall_s for name, s in self.workers.items() if s.wall_s}

    @property
    def busy(self) -> float:
        """Return the share of the time in which the devices computed."""
        return _share((stats.busy_s, stats.wall_s) for stats in self.workers.values())

    @property
    def text(self) -> float:
        """Return the share of the devices' computing time that captions took."""
        return _share((stats.text_s, stats.busy_s) for stats in self.workers.values())

    @property
    def launching(self) -> float:
        """Return the share of the time in which hosts launched work on GPUs.

        Near 1, it is the hosts that limit the speed.
        """
        return _share((stats.launch_s, stats.wall_s) for stats in self.workers.values())

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
        each = sum(rates.values()) / len(rates)
        trial = {"busy": round(self.busy, 3), "device": self._device, "each": float(f"{each:.4g}")}
        if self.text >= LEAST_SHOWN:
            trial["text"] = round(self.text, 3)
        if self.launching:
            trial["launching"] = round(self.launching, 3)
        return {"trial": trial}


def _share(seconds: Iterable[tuple[float, float]]) -> float:
    """Return the sum of the first numbers as a share of the sum of the second ones."""
    pairs = list(seconds)
    whole = sum(of for _, of in pairs)
    return sum(part for part, _ in pairs) / whole if whole else 0.0
