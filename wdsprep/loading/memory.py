"""A batch in the making, and the memory it is made in.

Blocks are taken up again once nothing uses them: fresh memory costs the kernel more time than
reading from the page cache does. They are mapped, since NumPy asks for huge pages: a virtual
machine whose host takes back what is free gets those at 3.4 ms for each MB, and small pages at 0.5.
"""

import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from wdsprep.dataset.aio import Bytes
from wdsprep.dataset.arrays import LATENT, MASK, Field
from wdsprep.dataset.chance import Ints
from wdsprep.dataset.rejects import Reject
from wdsprep.loading.grid import short
from wdsprep.loading.padding import PaddedRows
from wdsprep.loading.worker_memory import ring, rounded

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Blocks:
    """For any number of threads. Of each size, `keep` unused blocks are kept; sizes are rounded up,
    also to multiples of `step`, so that similar blocks take each other's place."""

    def __init__(self, *, keep: int, step: int = 1) -> None:
        self._keep, self._step = keep, step
        self._free: dict[int, list[Bytes]] = {}

    def take(self, nbytes: int) -> Bytes:
        """So many bytes, of any value. The block is free again when no view of them is left."""
        size = rounded(nbytes, self._step)
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


Arrays = torch.Tensor | Sequence[torch.Tensor]
"""One of each of some samples; those of variable length are not one tensor."""


@dataclass(slots=True)
class Batch:
    """A step's rows: where each comes from, and what has been read. `first` is the place of the
    first row in the global batch, `views` are the bytes of each row of the tensors in `out`, and
    `moments` what a latent is yet to be sampled from. `flipped` are the latents of mirror images,
    where some rows take theirs. `variable` is what `out` calls the array of variable length, if
    that or its mask is wanted; `lengths` are those of its rows, and `padded` is where they lie.
    `choice` is the number of the captions that each row has, where they are picked by chance, and
    `beside` where the samples are that stand beside each row's: of each joined dataset in turn the
    shards and the numbers in them. `refused` are samples that gave their place to others: by shard
    and index, and what `encode` says of them, or None where that is a damaged shard."""

    step: int
    first: int
    stream: list[int]
    shard: list[int]
    index: list[int]
    out: dict[str, Any] = field(default_factory=dict)
    views: dict[str, Bytes] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    moments: torch.Tensor | None = None
    flipped: torch.Tensor | None = None
    variable: str = ""
    lengths: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    padded: PaddedRows | None = None
    choice: list[int] = field(default_factory=list)
    beside: list[tuple[list[int], list[int]]] = field(default_factory=list)
    refused: dict[tuple[int, int], Reject | None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.shard)

    def put(self, name: str, start: int, arrays: Arrays) -> None:
        """Arrays that are there already, for the rows from this one on, if they are wanted."""
        if name == self.variable:
            for row, array in enumerate(arrays, start):
                self.lengths[row] = len(array)
                if self.padded is not None:
                    self.padded.put(row, array)
            return
        is_latent = name == short(LATENT) and self.moments is not None
        into = self.moments if is_latent else self.out.get(name)
        if into is not None:
            into[start : start + len(arrays)] = arrays  # type: ignore[assignment]  # one tensor

    def mask(self, rows: range) -> None:
        """Mark what is no padding."""
        if self.variable and short(MASK) in self.out:
            some = slice(rows.start, rows.stop)
            mask = self.out[short(MASK)].numpy()[some]
            np.take(_masks(mask.shape[1]), self.lengths[some], axis=0, out=mask)

    def shorten(self) -> None:
        """Leave out what is padding in every row."""
        longest = int(self.lengths.max(initial=0))
        names = {self.variable, short(MASK)} if self.variable else set()
        for name in names & self.out.keys():
            self.out[name] = self.out[name][:, :longest]


@lru_cache(4)
def _masks(most: int) -> NDArray[np.bool_]:
    """Of every length up to the greatest, from 0 on: looked up in half the time of comparing."""
    return np.tri(most + 1, most, -1, np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class _LastUse:
    """Of a block: what it held then, and how far; and what tells whether a trainer wrote to it."""

    shape: tuple[int, int]
    used: Ints
    probe: torch.Tensor
    version: int


class Memory:
    """Blocks for tensors. In a DataLoader's worker they are memory that the trainer's process can
    see, so that nothing is copied on the way there."""

    def __init__(self, *, pin: bool = False, keep: int = 8) -> None:
        self._pin, self._blocks, self._padded = pin, Blocks(keep=keep), Blocks(keep=keep)
        self._last: dict[int, _LastUse] = {}  # by address

    def take(self, nbytes: int) -> torch.Tensor:
        if get_worker_info() is not None:
            return ring().take(nbytes)
        if self._pin:  # torch keeps pinned memory itself, until copies from it have ended
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return torch.from_numpy(self._blocks.take(nbytes))

    def take_padded(self, count: int, field: Field) -> tuple[torch.Tensor, PaddedRows]:
        """For rows of a variable field, of which it is known how far they may be other than zero:
        all of each, in memory that is not kept here."""
        shape = count, field.array_nbytes
        used = np.full(count, field.array_nbytes)
        if self._pin or get_worker_info() is not None:
            made = self.take(count * field.array_nbytes)
        else:
            with torch.inference_mode(False):  # where versions are counted, whatever the trainer's
                made = torch.from_numpy(self._padded.take(count * field.array_nbytes))
                used = self._watched(made, shape, used)
        return made, PaddedRows(field, made.numpy().reshape(shape), used)

    def _watched(self, made: torch.Tensor, shape: tuple[int, int], whole: Ints) -> Ints:
        """How far this block was used. torch counts what operations write to a tensor or a view of
        it; one that was detached has the same count, also when it has no memory any more."""
        last = self._last.get(made.data_ptr())
        if last is None:  # fresh memory
            used = np.zeros_like(whole)
        elif (last.shape, last.version) == (shape, last.probe._version):
            used = last.used
        else:
            used = whole
        probe = made.detach()
        probe.data = torch.empty(0, dtype=made.dtype)
        self._last[made.data_ptr()] = _LastUse(shape, used, probe, probe._version)
        return used
