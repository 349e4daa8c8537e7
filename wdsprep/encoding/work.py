"""What a worker of `encode` is made from and what it tells, without loading what it works with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from wdsprep.dataset.receipts import Settings
from wdsprep.limits import MAX_NBYTES
from wdsprep.runners.run import RunProgress

if TYPE_CHECKING:
    from wdsprep.encoding.models.encoder import Encoder
    from wdsprep.encoding.worker import EncodeWorker


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


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeWork:
    """The picklable recipe of a worker, as runners want it."""

    images: str
    latents: str
    settings: Settings
    edition: str = ""
    """The mark of the dataset's."""
    make_encoder: Callable[[], "Encoder"]
    max_area: int
    max_nbytes: int = MAX_NBYTES
    batch_size: int
    decoders: int
    threads: int

    def open(self) -> "EncodeWorker":
        from wdsprep.encoding.worker import EncodeWorker  # torch and models: for workers alone

        return EncodeWorker(self)
