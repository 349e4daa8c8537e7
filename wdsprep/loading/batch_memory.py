"""A batch that is being filled, and the memory of its tensors.

Blocks of memory are used again: fresh memory costs the kernel more time than reading from the page
cache does. Blocks are mapped, because NumPy asks for huge pages. A virtual machine whose host takes
back free memory gets huge pages at 3.4 ms for each MB, and small pages at 0.5.

Rows of variable length are padded: each is as long as its caption, with zeros from there on.
Clearing all bytes after a short caption takes longer than reading the sample, and memory is used
again and again. So each row remembers how far it may hold nonzero bytes, and only those are
cleared. A batch of captions of 60 tokens in rows of 300 takes 1.4 times as long as one without
padding; if everything is cleared, it takes 2.7 times as long. Clearing with one call of the kernel,
or while holding the interpreter's lock, is no faster.
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
from wdsprep.dataset.npy_arrays import LATENT, MASK, Field
from wdsprep.dataset.random_numbers import Ints
from wdsprep.dataset.rejects import Reject
from wdsprep.loading.sample_layout import batch_name
from wdsprep.loading.shared_memory import round_up, worker_blocks

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class PaddedRows:
    """The rows of a field of variable length, padded with zeros.

    A row is opened, filled from its start, then closed. `used` has how many of each row's first
    bytes may be nonzero, and is kept up to date.
    """

    def __init__(self, field: Field, rows: Bytes, used: Ints) -> None:
        self.row_nbytes = field.array_nbytes
        self.rows, self._used, self._dirty = rows, used, used.copy()

    def open(self, rows: Sequence[int]) -> None:
        """Open rows to be filled: until they are closed, any of their bytes may be nonzero."""
        some = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        self._dirty[some] = self._used[some]
        self._used[some] = self.row_nbytes

    def close(self, rows: Sequence[int], ends: Ints, come: Ints) -> None:
        """Close rows: keep the bytes of each row up to its end, and set those after it to zero.

        `come` is the number of bytes read into each row, among them bytes of other members.
        """
        stops = np.maximum(come, self._dirty[rows])
        for row, end, stop in zip(rows, ends.tolist(), stops.tolist(), strict=True):
            self.rows[row, end:stop] = 0
        self._used[rows] = ends

    def put(self, row: int, array: torch.Tensor) -> None:
        """Put an array into a row, and fill the rest of the row with padding."""
        data = array.contiguous().view(torch.uint8).numpy().reshape(-1)
        self.open(range(row, row + 1))
        self.rows[row, : len(data)] = data
        self.close([row], np.array([len(data)]), np.array([len(data)]))


class BlockPool:
    """A pool of memory blocks, for any number of threads.

    It keeps at most `keep` unused blocks of each size. Sizes are rounded up, also to multiples of
    `step`, so that blocks of similar sizes replace each other.
    """

    def __init__(self, *, keep: int, step: int = 1) -> None:
        self._keep, self._step = keep, step
        self._free: dict[int, list[Bytes]] = {}

    def take(self, nbytes: int) -> Bytes:
        """Return a block of so many bytes, whose content is undefined.

        The block returns to the pool once no view of it is left.
        """
        size = round_up(nbytes, self._step)
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
"""An array for each of several samples: one tensor, unless lengths vary."""


@dataclass(slots=True)
class Batch:
    """The rows of a step: where each sample comes from, and what has been read.

    `first` is the place of the first row in the global batch. `views` has the bytes of each row
    of the tensors in `out`. `moments` is what latents are yet to be sampled from, and `flipped`
    has the latents of mirror images, which some rows take. `variable` names the array of
    variable length in `out`, if that array or its mask is wanted; `lengths` has the length of
    each row, and `padded` the rows themselves. `choice` has the number of the caption of each
    row, where chance picks captions. `joined_places` has, for each joined dataset, an array with
    the shards and one with the numbers of the samples of all rows. `refused` has samples that
    others replaced, by shard and index: what `encode` says of them, or None if the shard is
    damaged.
    """

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
    joined_places: list[Ints] = field(default_factory=list)
    refused: dict[tuple[int, int], Reject | None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.shard)

    def put(self, name: str, start: int, arrays: Arrays) -> None:
        """Write arrays into the rows from `start` on, if the batch has a tensor of that name.

        Latents go to the moments if there are moments. Of the array of variable length, the
        lengths are kept even if the batch holds only its mask.
        """
        if name == self.variable:
            for row, array in enumerate(arrays, start):
                self.lengths[row] = len(array)
                if self.padded is not None:
                    self.padded.put(row, array)
            return
        is_latent = name == batch_name(LATENT) and self.moments is not None
        into = self.moments if is_latent else self.out.get(name)
        if into is not None:
            into[start : start + len(arrays)] = arrays  # type: ignore[assignment]  # one tensor

    def mask(self, rows: range) -> None:
        """Write the mask of these rows, if the batch has one: true where there is no padding."""
        if self.variable and batch_name(MASK) in self.out:
            some = slice(rows.start, rows.stop)
            mask = self.out[batch_name(MASK)].numpy()[some]
            np.take(_masks(mask.shape[1]), self.lengths[some], axis=0, out=mask)

    def shorten(self) -> None:
        """Cut the array of variable length, and its mask, to the longest row of the batch."""
        longest = int(self.lengths.max(initial=0))
        names = {self.variable, batch_name(MASK)} if self.variable else set()
        for name in names & self.out.keys():
            self.out[name] = self.out[name][:, :longest]


@lru_cache(4)
def _masks(most: int) -> NDArray[np.bool_]:
    """Return the masks of all lengths from 0 to `most`, one row for each length.

    Looking a mask up takes half as long as comparing lengths.
    """
    return np.tri(most + 1, most, -1, np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class _LastUse:
    """The last use of a block: its shape and how far each row was filled.

    `probe` and `version` tell whether a trainer wrote to the block since.
    """

    shape: tuple[int, int]
    used: Ints
    probe: torch.Tensor
    version: int


class Memory:
    """A source of memory for tensors.

    In a DataLoader's worker it is memory that the trainer's process can see, so that nothing is
    copied on the way there.
    """

    def __init__(self, *, pin: bool = False, keep: int = 8) -> None:
        self._pin, self._blocks, self._padded = pin, BlockPool(keep=keep), BlockPool(keep=keep)
        self._last: dict[int, _LastUse] = {}  # by address

    def take(self, nbytes: int) -> torch.Tensor:
        if get_worker_info() is not None:
            return worker_blocks().take(nbytes)
        if self._pin:  # torch keeps pinned memory itself, until copies from it have finished
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return torch.from_numpy(self._blocks.take(nbytes))

    def take_padded(self, count: int, field: Field) -> tuple[torch.Tensor, PaddedRows]:
        """Return memory for a field of variable length: the tensor, and its rows to be filled.

        The rows know how far each may hold nonzero bytes. In pinned memory, and in the memory
        of a DataLoader's worker, that is to their ends.
        """
        shape = count, field.array_nbytes
        used = np.full(count, field.array_nbytes)
        if self._pin or get_worker_info() is not None:
            made = self.take(count * field.array_nbytes)
        else:
            with torch.inference_mode(False):  # where versions are counted, whatever the trainer's
                made = torch.from_numpy(self._padded.take(count * field.array_nbytes))
                used = self._watch(made, shape, used)
        return made, PaddedRows(field, made.numpy().reshape(shape), used)

    def _watch(self, made: torch.Tensor, shape: tuple[int, int], whole: Ints) -> Ints:
        """Return how many of each row's first bytes may be nonzero, and note this use of a block.

        In fresh memory none is. `whole` is returned if the block had another shape before, or if
        a trainer has written to it since its last use. torch counts the operations that write
        to a tensor or a view of it. A detached tensor shares that count, even when its own
        memory has been replaced.
        """
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
