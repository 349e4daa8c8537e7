"""A batch that is being filled, the memory of its tensors, and their way to the trainer.

Blocks of memory are used again: fresh memory costs the kernel more time than reading from the page
cache does. Blocks are mapped, because NumPy asks for huge pages. A virtual machine whose host takes
back free memory gets huge pages at 3.4 ms for each MB, and small pages at 0.5.

Rows of variable length are padded: each is as long as its caption, with zeros from there on.
Clearing all bytes after a short caption takes longer than reading the sample, and memory is used
again and again. So each row remembers how far it may hold nonzero bytes, and only those are
cleared. A batch of captions of 60 tokens in rows of 300 takes 1.4 times as long as one without
padding; if everything is cleared, it takes 2.7 times as long. Clearing with one call of the kernel,
or while holding the interpreter's lock, is no faster.

From a DataLoader's worker a batch goes by shared memory. torch shares fresh memory for every
tensor: the kernel has to clear it, and its descriptor goes over a socket of its own. That takes as
long as reading. So a worker keeps its blocks, each with all tensors of a batch: one goes to the
trainer as torch sends it the first time, and by its number from then on. A word in the block says
whether it is in use; the trainer clears it when no tensor is left in the block. The block is used
again once the worker has let go of the batch as well. There is no lock and no name, and the memory
is gone with the last process that has it.

Only whole batches go by number, and only by multiprocessing's pickler. torch copies everything else
that a worker makes of a batch and sends. A trainer lets go of the blocks of workers that have ended
when it meets blocks of new workers.

A loader yields a `WholeBatch`, a dict that a DataLoader does not make batches of again.
`DataLoader(loader)` and `DataLoader(loader, batch_size=4)` would stack whole batches to arrays of
one more dimension, and train on them without a word. torch asks `default_collate_fn_map` how a type
is put together, and this one refuses. `batch_size=None` takes batches as they are, and never asks.

`copy_batches` copies batches to a device while the batch before is in use.
"""

import mmap
import os
import secrets
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from wdsprep.dataset.aio import Bytes
from wdsprep.dataset.npy_arrays import LATENT, MASK, Field
from wdsprep.dataset.random_numbers import Ints
from wdsprep.dataset.rejects import Reject
from wdsprep.errors import UsageError
from wdsprep.loading.sample_layout import batch_name

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
        index = as_index(rows)
        self._dirty[index] = self._used[index]
        self._used[index] = self.row_nbytes

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
        if len(free := self._free[base.nbytes]) < self._keep:
            free.append(base)


def as_index(rows: Sequence[int]) -> "slice | Sequence[int]":
    """Return an index of rows for NumPy, which is faster with a slice than with numbers."""
    return slice(rows.start, rows.stop) if isinstance(rows, range) else rows


@dataclass(slots=True)
class Batch:
    """The rows of a step: where each sample comes from, and what has been read.

    `first` is the place of the first row in the global batch. `views` has the bytes of each row
    of the tensors in `out`. `moments` is what latents are yet to be sampled from, and `flipped`
    has the latents of mirror images, by the names of those in whose place some rows take them.
    `variable` names the array of variable length in `out`, if that array or its mask is wanted;
    `lengths` has the length of each row, and `padded` the rows themselves. `choice` has the number
    of the caption of each row, where chance picks captions. `places` has, for the dataset itself
    and each one joined to it, an array with the shards and one with the numbers of the samples of
    all rows. `refused` has samples that others replaced, by shard and number: what `encode` says of
    them, or None if the shard is damaged.
    """

    step: int
    first: int
    stream: list[int]
    places: Ints
    out: dict[str, Any] = field(default_factory=dict)
    views: dict[str, Bytes] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    moments: torch.Tensor | None = None
    flipped: dict[str, torch.Tensor] = field(default_factory=dict)
    variable: str = ""
    lengths: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    padded: PaddedRows | None = None
    choice: list[int] = field(default_factory=list)
    refused: dict[tuple[int, int], Reject | None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.stream)

    def place(self, row: int, slot: int = 0) -> tuple[int, int]:
        """Return the shard and the number of a row's sample, in the dataset itself or a joined one.

        `slot` is 0 for the dataset itself.
        """
        return self.places.item(slot, 0, row), self.places.item(slot, 1, row)

    def runs(self, size: int) -> list[range]:
        """Return the rows in runs of this size, the last of which may be shorter."""
        return [range(top, min(top + size, len(self))) for top in range(0, len(self), size)]

    def by_stream(self, rows: range) -> Iterator[tuple[int, "slice | Ints"]]:
        """Yield the streams of rows, each with an index of its rows: a slice if it has all."""
        streams = np.array(self.stream[rows.start : rows.stop])
        for number in {*streams.tolist()}:
            here = rows.start + np.flatnonzero(streams == number)
            yield number, slice(rows.start, rows.stop) if len(here) == len(rows) else here

    def put(self, name: str, row: int, array: torch.Tensor) -> None:
        """Write an array into a row, if the batch has a tensor of that name.

        Latents go to the moments if there are moments. Of the array of variable length, the
        length is kept even if the batch holds only its mask.
        """
        if name == self.variable:
            self.lengths[row] = len(array)
            if self.padded is not None:
                self.padded.put(row, array)
            return
        is_latent = name == batch_name(LATENT) and self.moments is not None
        into = self.moments if is_latent else self.out.get(name)
        if into is not None:
            into[row] = array

    def mask(self, rows: range) -> None:
        """Write the mask of these rows, if the batch has one: true where there is no padding."""
        if self.variable and batch_name(MASK) in self.out:
            span = slice(rows.start, rows.stop)
            mask = self.out[batch_name(MASK)].numpy()[span]
            np.take(_masks(mask.shape[1]), self.lengths[span], axis=0, out=mask)

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


class Memory:
    """A source of memory for tensors.

    In a DataLoader's worker it is memory that the trainer's process can see, so that nothing is
    copied on the way there.
    """

    def __init__(self, *, pin: bool, keep: int) -> None:
        self._pin, self._blocks, self._padded = pin, BlockPool(keep=keep), BlockPool(keep=keep)
        self._last: dict[int, tuple[tuple[int, int], int, torch.Tensor, Ints]] = {}
        """The last use of a block, by address: its shape, its version then and now (of a probe),
        and how far each row was filled."""

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return memory of undefined content for the tensors of a batch, of so many bytes each."""
        if get_worker_info() is not None:
            return worker_blocks().take(sizes)
        if self._pin:  # torch keeps pinned memory itself, until copies from it have finished
            return [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for nbytes in sizes]
        return [torch.from_numpy(self._blocks.take(nbytes)) for nbytes in sizes]

    def take_padded(self, count: int, field: Field) -> tuple[torch.Tensor, PaddedRows]:
        """Return memory for a field of variable length: the tensor, and its rows to be filled.

        The rows know how far each may hold nonzero bytes. Nobody can know that of pinned memory,
        nor of the memory of a DataLoader's worker: there, each may hold them to its end.
        """
        shape = count, field.array_nbytes
        used = np.full(count, field.array_nbytes)
        if self._pin or get_worker_info() is not None:
            (memory,) = self.take([count * field.array_nbytes])
        else:
            with torch.inference_mode(False):  # where versions are counted, whatever the trainer's
                memory = torch.from_numpy(self._padded.take(count * field.array_nbytes))
                # In fresh memory no byte is nonzero, and in a block no other than after its last
                # use, unless that had another shape, or a trainer has written to it since. torch
                # counts the operations that write to a tensor or a view of it. A detached tensor
                # shares that count, even when its own memory has been replaced.
                if (last := self._last.get(memory.data_ptr())) is None:
                    used = np.zeros_like(used)
                elif last[:2] == (shape, last[2]._version):
                    used = last[3]
                probe = memory.detach()
                probe.data = torch.empty(0, dtype=memory.dtype)
                self._last[memory.data_ptr()] = shape, probe._version, probe, used
        return memory, PaddedRows(field, memory.numpy().reshape(shape), used)


WORD = 64  # bytes before the data, which stays aligned; the first tells whether they are in use
MOST = 128  # the most blocks of a worker; more are in use only if a trainer keeps batches


class WholeBatch(dict[str, Any]):
    """A batch of a loader, which a DataLoader must not join with others.

    If a worker sends it, the trainer gets it as a dict.
    """


@dataclass(slots=True, eq=False)
class _Block:
    number: int
    tensor: torch.Tensor
    data: Bytes
    known: bool = False
    """True if the trainer has the block."""
    held: bool = False
    """True if the worker uses it: it may keep a batch longer than the trainer does."""
    sent: bool = False
    """True if the trainer got this use of it."""


SentTensor = tuple[int, int, torch.dtype, tuple[int, ...], tuple[int, ...]]
"""A tensor as it is pickled: number of its block, start in it, dtype, shape and strides."""
SentBatch = tuple[
    dict[str, Any], tuple[int, str], dict[int, torch.Tensor | None], dict[str, SentTensor]
]
"""A batch as it is pickled: what goes as it is, the worker, its blocks by number, and tensors.

A block that the trainer has is None."""


class WorkerBlocks:
    """The blocks of shared memory of one worker."""

    def __init__(self) -> None:
        self.worker = (os.getpid(), secrets.token_hex(8))
        self._blocks: list[_Block] = []

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return memory of undefined content, for this worker and then for the trainer.

        All of it is free again when neither uses any of it.
        """
        ends = [*accumulate(-(-nbytes // WORD) * WORD for nbytes in sizes)]
        parts = [*zip((0, *ends), sizes, strict=False)]
        size = WORD + round_up(ends[-1])
        unused = (b for b in self._blocks if not (b.held or b.data[0]))
        block = next((b for b in unused if len(b.data) == size), None)
        if block is None:
            # torch sends this without a copy, and `share_memory_` copies what is there before:
            memory = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]
            new = torch.empty(0, dtype=torch.uint8).set_(memory)
            if len(self._blocks) == MOST:
                return [new[WORD + start :][:nbytes] for start, nbytes in parts]
            block = _Block(len(self._blocks), new, new.numpy())
            self._blocks.append(block)
        block.data[0], block.held, block.sent = 1, True, False
        used = block.data[WORD:]
        weakref.finalize(used, self._end, block).atexit = False
        # From bytes, as in a BlockPool:
        rows = (np.frombuffer(used.data, np.uint8, nbytes, start) for start, nbytes in parts)
        return [*map(torch.from_numpy, rows)]

    def _end(self, block: _Block) -> None:
        if os.getpid() != self.worker[0]:
            return
        if not block.sent:
            block.data[0] = 0
        block.held = False

    def send(self, batch: Mapping[str, Any]) -> SentBatch:
        """Return what to pickle in place of a batch.

        Its tensors in blocks go by number, unless a block was sent for this use before. The memory
        of a block goes along only the first time.
        """
        blocks: dict[int, _Block] = {}
        sent: dict[str, SentTensor] = {}
        for name, value in batch.items():
            for block in self._blocks if isinstance(value, torch.Tensor) else ():
                start = value.data_ptr() - block.tensor.data_ptr()
                if 0 <= start < len(block.data) and not block.sent:
                    layout = value.dtype, tuple(value.shape), value.stride()
                    sent[name] = block.number, start, *layout
                    blocks[block.number] = block
        memory = {number: None if b.known else b.tensor for number, b in blocks.items()}
        for block in blocks.values():
            block.known = block.sent = True
        return {n: None if n in sent else batch[n] for n in batch}, self.worker, memory, sent


def round_up(nbytes: int, least: int = 1) -> int:
    """Return the size of a block for so many bytes.

    It is at most an eighth more, or the next multiple of `least`. So latents of one area and
    many shapes, which are nearly alike, share blocks.
    """
    step = max(least, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


_received: dict[tuple[int, str], dict[int, Bytes]] = {}


_blocks_of = lru_cache(1)(lambda _process: WorkerBlocks())


def worker_blocks() -> WorkerBlocks:
    """Return the blocks of this process. A forked process gets its own."""
    return _blocks_of(os.getpid())


def _rebuild_batch(
    batch: dict[str, Any],
    worker: tuple[int, str],
    memory: Mapping[int, torch.Tensor | None],
    sent: Mapping[str, SentTensor],
) -> dict[str, Any]:
    used: dict[int, Bytes] = {}
    for number, new in memory.items():
        if new is not None:
            for known in list(_received):
                try:
                    os.kill(known[0], 0)
                except (ProcessLookupError, PermissionError):  # gone, or another user's by now
                    del _received[known]
            _received.setdefault(worker, {})[number] = new.numpy()
        data = _received[worker][number]
        used[number] = data[:]
        weakref.finalize(used[number], _free, data, os.getpid()).atexit = False
    for name, (number, start, dtype, shape, strides) in sent.items():
        last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        part = np.frombuffer(used[number].data, np.uint8, (last + 1) * dtype.itemsize, start)
        batch[name] = torch.from_numpy(part).view(dtype).as_strided(shape, strides)
    return batch


ForkingPickler.register(WholeBatch, lambda batch: (_rebuild_batch, worker_blocks().send(batch)))


def _free(data: Bytes, owner: int) -> None:
    """Mark a block as free, if this is the process `owner`.

    A fork of the trainer has the trainer's tensors too, but must not free them.
    """
    if os.getpid() == owner:
        data[0] = 0


def _refuse(_batches: object, **_: object) -> NoReturn:
    raise UsageError(
        "a loader's batches are whole already: give DataLoader(loader, batch_size=None), and "
        "their size as global_batch= to wdsprep.load"
    )


default_collate_fn_map[WholeBatch] = _refuse
_pytree.register_pytree_node(  # as a dict is
    WholeBatch,
    lambda batch: (list(batch.values()), list(batch)),
    lambda values, names: WholeBatch(zip(names, values, strict=True)),
)


Numbered = tuple[int, dict[str, Any]]
NumberedBatches = Iterator[Numbered]
"""Batches, each with its step."""


def copy_batches(batches: NumberedBatches, device: torch.device) -> NumberedBatches:
    """Yield batches with their steps, copied to a device.

    For CUDA, each batch is copied from pinned memory on another CUDA stream, while the batch before
    is in use. torch frees pinned memory when the copies from it have finished. So a batch may be
    dropped as soon as its copy has begun. For other devices, the copy has finished when the batch
    is yielded: only CUDA promises not to reuse memory that a copy still reads.
    """
    if device.type != "cuda":
        for step, batch in batches:
            yield step, _move_batch(batch, device)
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    device = stream.device  # whatever the current device is later
    before: tuple[Numbered, torch.cuda.Event] | None = None
    for step, batch in batches:
        with torch.cuda.stream(stream):
            moved = _move_batch(batch, device, non_blocking=True)
            event = stream.record_event()
        if before is not None:
            yield _wait_for_copy(*before, device)
        before = (step, moved), event
    if before is not None:
        yield _wait_for_copy(*before, device)


def _move_batch(
    batch: dict[str, Any], device: torch.device, *, non_blocking: bool = False
) -> dict[str, Any]:
    return {
        name: value.to(device, non_blocking=non_blocking)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in batch.items()
    }


def _wait_for_copy(numbered: Numbered, event: torch.cuda.Event, device: torch.device) -> Numbered:
    """Return a batch after telling the trainer's CUDA stream to wait for its copy.

    The memory of the batch is not freed before that stream has used it.
    """
    current = torch.cuda.current_stream(device)
    current.wait_event(event)
    for value in numbered[1].values():
        if isinstance(value, torch.Tensor):
            value.record_stream(current)
    return numbered
