"""Blocks of memory that are taken up again once nothing uses them: fresh memory costs the kernel
more time than reading from the page cache does.

It is mapped here, since NumPy asks for huge pages: a virtual machine whose host takes back what is
free gets those at 3.4 ms for each MB, and small pages at 0.5.
"""

import mmap
import weakref

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
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
