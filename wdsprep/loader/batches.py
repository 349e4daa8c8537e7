"""A batch in the making, and the memory it is made in."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import get_worker_info

from wdsprep.loader.blocks import Blocks, Bytes
from wdsprep.loader.shared import ring
from wdsprep.samples import Reject


@dataclass(slots=True)
class Batch:
    """A step's rows: where each comes from, and what has been read. `first` is the place of the
    first row in the global batch, `views` are the bytes of each row of the tensors in `out`, and
    `moments` what a latent is yet to be sampled from. `refused` are samples that gave their place
    to others: by shard and index, and what `encode` says of them, or None where that is a damaged
    shard."""

    step: int
    first: int
    stream: list[int]
    shard: list[int]
    index: list[int]
    out: dict[str, Any] = field(default_factory=dict)
    views: dict[str, Bytes] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    moments: torch.Tensor | None = None
    refused: dict[tuple[int, int], Reject | None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.shard)


class Memory:
    """Blocks for tensors. In a DataLoader's worker they are memory that the trainer's process can
    see, so that nothing is copied on the way there."""

    def __init__(self, *, pin: bool = False, keep: int = 8) -> None:
        self._pin, self._blocks = pin, Blocks(keep=keep)

    def take(self, nbytes: int) -> torch.Tensor:
        if get_worker_info() is not None:
            return ring().take(nbytes)
        if self._pin:  # torch keeps pinned memory itself, until copies from it have ended
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return torch.from_numpy(self._blocks.take(nbytes))
