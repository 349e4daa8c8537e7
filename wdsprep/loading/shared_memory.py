"""Bring batches to the trainer: from a DataLoader's worker by shared memory, and to a device.

torch shares fresh memory for every tensor: the kernel has to clear it, and its descriptor goes over
a socket of its own. That takes as long as reading. So a worker keeps its blocks: one goes to the
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

import os
import secrets
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch
from torch.utils import _pytree
from torch.utils.data._utils.collate import default_collate_fn_map

from wdsprep.dataset.aio import Bytes
from wdsprep.errors import UsageError

WORD = 64  # bytes before the data, which stays aligned; the first tells whether they are in use
MOST = 128  # the most blocks of a worker; more are in use only if a trainer keeps batches


class WholeBatch(dict[str, Any]):
    """A batch of a loader, which a DataLoader must not join with others."""


class SharedBatch(WholeBatch):
    """A batch that a worker sends; the trainer gets it as a dict."""


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


SentTensor = tuple[
    tuple[int, str], int, torch.Tensor | None, torch.dtype, tuple[int, ...], tuple[int, ...]
]
"""A tensor as it is pickled: worker, number and memory of its block, dtype, shape and strides."""


class WorkerBlocks:
    """The blocks of shared memory of one worker."""

    def __init__(self) -> None:
        self.worker = (os.getpid(), secrets.token_hex(8))
        self._blocks: dict[int, _Block] = {}  # by address

    def take(self, nbytes: int) -> torch.Tensor:
        """Return memory of undefined content, for this worker and then for the trainer.

        The memory is free again when neither uses it.
        """
        size = WORD + round_up(nbytes)
        unused = (b for b in self._blocks.values() if not (b.held or b.data[0]))
        free = (b for b in unused if len(b.data) == size)
        block = next(free, None)
        if block is None:
            new = _allocate_shared(size)
            if len(self._blocks) == MOST:
                return new[WORD : WORD + nbytes]
            block = _Block(len(self._blocks), new, new.numpy())
            self._blocks[new.data_ptr() + WORD] = block
        block.data[0], block.held, block.sent = 1, True, False
        used = block.data[WORD : WORD + nbytes]
        weakref.finalize(used, self._end, block).atexit = False
        return torch.from_numpy(used)

    def _end(self, block: _Block) -> None:
        if os.getpid() != self.worker[0]:
            return
        if not block.sent:
            block.data[0] = 0
        block.held = False

    def send(self, value: Any) -> SentTensor | None:
        """Return what to pickle in place of a tensor, or None for a value that goes as it is.

        So does a tensor in no block, and a second one in a block that was sent for this use. The
        memory of a block goes along only the first time.
        """
        if not isinstance(value, torch.Tensor):
            return None
        block = self._blocks.get(value.data_ptr())
        if block is None or block.sent:
            return None
        memory = None if block.known else block.tensor
        block.known = block.sent = True
        layout = value.dtype, tuple(value.shape), value.stride()
        return self.worker, block.number, memory, *layout


def round_up(nbytes: int, least: int = 1) -> int:
    """Return the size of a block for so many bytes.

    It is at most an eighth more, or the next multiple of `least`. So latents of one area and
    many shapes, which are nearly alike, share blocks.
    """
    step = max(least, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


def _allocate_shared(nbytes: int) -> torch.Tensor:
    """Return memory that torch sends to another process without a copy."""
    memory = torch.empty(nbytes, dtype=torch.uint8)
    memory.share_memory_()  # type: ignore[no-untyped-call]
    return memory


_rings: list[WorkerBlocks] = []  # the one of this process, if it is a worker
_received: dict[tuple[int, str], dict[int, Bytes]] = {}


def worker_blocks() -> WorkerBlocks:
    """Return the blocks of this process. A forked process gets its own."""
    if not _rings or _rings[0].worker[0] != os.getpid():
        _rings[:] = [WorkerBlocks()]
    return _rings[0]


def _reduce(batch: SharedBatch) -> tuple[Any, ...]:
    send = worker_blocks().send
    sent = {name: tensor for name, value in batch.items() if (tensor := send(value)) is not None}
    return _rebuild_batch, ({n: None if n in sent else batch[n] for n in batch}, sent)


ForkingPickler.register(SharedBatch, _reduce)


def _rebuild_batch(batch: dict[str, Any], sent: dict[str, SentTensor]) -> dict[str, Any]:
    return batch | {name: _rebuild_tensor(*tensor) for name, tensor in sent.items()}


def _rebuild_tensor(
    worker: tuple[int, str],
    number: int,
    memory: torch.Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> torch.Tensor:
    if memory is not None:
        _forget_ended_workers()
        _received.setdefault(worker, {})[number] = memory.numpy()
    data = _received[worker][number]
    last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    used = data[WORD : WORD + (last + 1) * dtype.itemsize]
    weakref.finalize(used, _free, data, os.getpid()).atexit = False
    return torch.from_numpy(used).view(dtype).as_strided(shape, strides)


def _free(data: Bytes, owner: int) -> None:
    """Mark a block as free, if this is the process `owner`.

    A fork of the trainer has the trainer's tensors too, but must not free them.
    """
    if os.getpid() == owner:
        data[0] = 0


def _forget_ended_workers() -> None:
    for worker in list(_received):
        try:
            os.kill(worker[0], 0)
        except (ProcessLookupError, PermissionError):  # gone, or another user's by now
            del _received[worker]


def _refuse(_batches: object, **_: object) -> NoReturn:
    raise UsageError(
        "a loader's batches are whole already: give DataLoader(loader, batch_size=None), and "
        "their size as global_batch= to wdsprep.load"
    )


def _flatten(batch: WholeBatch) -> tuple[list[Any], list[str]]:
    return list(batch.values()), list(batch)


def _unflatten(values: Iterable[Any], names: Any) -> WholeBatch:
    return WholeBatch(zip(names, values, strict=True))


default_collate_fn_map[WholeBatch] = _refuse
_pytree.register_pytree_node(WholeBatch, _flatten, _unflatten)  # as a dict is


Numbered = tuple[int, dict[str, Any]]


def copy_batches(batches: Iterator[Numbered], device: torch.device) -> Iterator[Numbered]:
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
