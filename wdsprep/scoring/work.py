"""What a worker of `score` is made from, without loading what it works with."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wdsprep.dataset.receipts import Settings
from wdsprep.encoding.gpus import prepare_allocator
from wdsprep.scoring.models import ScoreModel

if TYPE_CHECKING:
    from wdsprep.scoring.worker import ScoreWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreWork:
    """The picklable recipe of a worker, as runners want it. Its units are `ImageShard`s."""

    images: str
    scores: str
    settings: Settings
    edition: str
    """The mark of the dataset's."""
    models: tuple[ScoreModel, ...]
    has_captions: bool
    """True if captions have columns of their own."""
    device: str
    dtype: str
    max_area: int
    max_nbytes: int
    batch_size: int
    threads: int
    """The threads that decode images, and the batches that a CPU computes at once; 0: as many as
    its node has cores for `gpus`."""
    gpus: float = 0.0
    keeps_content: bool = True
    """True if receipts say what foreign tars held."""

    def open(self) -> "ScoreWorker":
        prepare_allocator()
        from wdsprep.scoring.worker import ScoreWorker  # torch and models: for workers alone

        return ScoreWorker(self)
