"""The picklable work of `score`, without what its workers load."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wdsprep.dataset.receipts import Settings
from wdsprep.encoding.gpus import prepare_allocator
from wdsprep.scoring.models import ScoreModel

if TYPE_CHECKING:
    from wdsprep.scoring.worker import ScoreWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreWork:
    """The picklable description of a worker of `score`, which a runner opens.

    A unit of work is an `ImageShard`.
    """

    images: str
    scores: str
    settings: Settings
    edition: str
    """The mark of the dataset's edition."""
    models: tuple[ScoreModel, ...]
    has_captions: bool
    """True if captions are scored too."""
    device: str
    dtype: str
    max_area: int
    max_nbytes: int
    batch_size: int
    threads: int
    """The threads that decode images, and the batches that a CPU computes at once; 0: as many as
    its node has cores for `gpus`."""
    gpus: float = 0.0
    """True if receipts record what foreign tars held."""

    def open(self) -> "ScoreWorker":
        prepare_allocator()
        from wdsprep.scoring.worker import ScoreWorker  # torch and models: for workers alone

        return ScoreWorker(self)
