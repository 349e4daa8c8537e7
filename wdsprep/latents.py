"""What a worker of `encode` is made from and what it tells, without loading what it works with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wdsprep.manifest import Settings
from wdsprep.run import Progress

if TYPE_CHECKING:
    from wdsprep.encoder import Encoder


@dataclass(frozen=True, kw_only=True, slots=True)
class Working(Progress):
    """How far a shard has come, and what its worker has done since it began."""

    worker: str
    device: str
    done: int
    busy_s: float
    wall_s: float
    batch_size: int
    exact: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Workshop:
    """The picklable recipe of a worker."""

    images: str
    latents: str
    settings: Settings
    make_encoder: Callable[[], "Encoder"]
    max_area: int
    batch_size: int
    decoders: int
    threads: int
