"""Blocks of memory that are taken up again once nothing uses them: fresh memory costs the kernel
more time than reading from the page cache does."""

import weakref

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


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
            base = np.empty(size, np.uint8)
        # From bytes, not as a slice: views of a slice would hold the whole block, and not it.
        used = np.frombuffer(base.data, np.uint8, nbytes)
        weakref.finalize(used, self._give_back, base).atexit = False
        return used

    def _give_back(self, base: Bytes) -> None:
        free = self._free[base.nbytes]
        if len(free) < self._keep:
            free.append(base)
