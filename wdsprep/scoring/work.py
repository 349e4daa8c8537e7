"""The picklable work of `score`, without what its workers load."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wdsprep.encoding.gpus import prepare_allocator, require_gpu
from wdsprep.encoding.worker_plan import ShardWork
from wdsprep.scoring.models import ScoreModel, check_here

if TYPE_CHECKING:
    from wdsprep.encoding.models.base import Encoder
    from wdsprep.scoring.worker import ScoreWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreWork(ShardWork):
    """The picklable description of a worker of `score`, which a runner opens."""

    models: tuple[ScoreModel, ...]
    device: str
    dtype: str

    def load(self) -> "Encoder":
        from torch import device

        from wdsprep.encoding.models.device import check_age
        from wdsprep.scoring.networks import ScoreEncoder

        require_gpu(self.device)
        check_age(device(self.device))
        return ScoreEncoder(list(map(check_here, self.models)), self.device, self.dtype)

    def open(self) -> "ScoreWorker":
        prepare_allocator()
        from wdsprep.scoring.worker import ScoreWorker  # torch and models: for workers alone

        return ScoreWorker(self)
