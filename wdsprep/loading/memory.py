"""A batch in the making, and the memory it is made in.

Blocks are taken up again once nothing uses them: fresh memory costs the kernel more time than
reading from the page cache does. They are mapped, since NumPy asks for huge pages: a virtual
machine whose host takes back what is free gets those at 3.4 ms for each MB, and small pages at 0.5.
"""

import mmap
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from wdsprep.dataset.rejects import Reject
from wdsprep.loading.worker_memory import Bytes, ring

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Blocks:
    """For any number of threads. Of each size, `keep` unused blocks are kept; sizes are rounded up
    to multiples of `step`, so that similar blocks take each other's place."""

    def __init__(self, *, keep: int, step: int = 1) -> None:
        self._keep, self._step = keep, step
        self._free: dict[int, list[Bytes]] = {}

    def take(self, nbytes: int) -> Bytes:
        """So many bytes, of any value. The block is free again when no view of them is left."""
        size = -(-nbytes // self._step) * self._step
        try:
            base = self._free.setdefault(size, []).pop()
        except IndexError:
            base = np.frombuffer(mmap.mmap(-1, max(1, size), _PRIVATE), np.uint8, size)
        # From bytes, not as a slice: views of a slice would hold the whole block, and not it.
        used = np.frombuffer(base.data, np.uint8, nbytes)
        weakref.finalize(used, self._give_back, base).atexit = False
        return used

    def _give_back(self, base: Bytes) -> None:
        free = self._free[base.nbytes]
        if len(free) < self._keep:
            free.append(base)


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
