"""The picklable work of `encode`, without what its workers load."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wdsprep.dataset.receipts import Settings
from wdsprep.encoding.captions.sources import CaptionSource
from wdsprep.encoding.gpus import prepare_allocator
from wdsprep.limits import MAX_NBYTES

if TYPE_CHECKING:
    from wdsprep.encoding.models.base import Encoder
    from wdsprep.encoding.worker import EncodeWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeTarget:
    """A dataset that a worker writes to."""

    latents: str
    settings: Settings
    edition: str = ""
    """The mark of the dataset's edition."""
    captions: CaptionSource = field(default_factory=CaptionSource)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardWork:
    """The picklable description of a worker that makes shards from image shards.

    A unit of work is a `JointUnit`. Its parts are image shards, each with the number of the target
    in `targets` that what is made of them goes to.
    """

    images: str
    targets: tuple[EncodeTarget, ...]
    max_area: int
    max_nbytes: int = MAX_NBYTES
    batch_size: int
    decoders: int
    """The number of threads that decode images; 0: the cores of the node that go with `gpus`."""
    threads: int
    """The number of batches that a CPU computes at once."""
    gpus: float = 0.0
    """The number of GPUs that the worker has, or its share of one."""
    gpu_share: float = 1.0
    """The worker's share of the memory of its GPU."""

    def load(self) -> "Encoder":
        """Load the models of a worker."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeWork(ShardWork):
    """The picklable description of a worker of `encode`, which a runner opens."""

    make_encoder: Callable[[], "Encoder"]

    def load(self) -> "Encoder":
        return self.make_encoder()

    def open(self) -> "EncodeWorker":
        prepare_allocator()
        from wdsprep.encoding.worker import EncodeWorker  # torch and models: for workers alone

        return EncodeWorker(self)
