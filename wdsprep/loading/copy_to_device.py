"""Copy batches to a device while the batch before is in use."""

from collections.abc import Iterator
from typing import Any

import torch

Numbered = tuple[int, dict[str, Any]]


def copy_batches(batches: Iterator[Numbered], device: torch.device) -> Iterator[Numbered]:
    """Yield batches with their steps, copied to a device.

    For CUDA, each batch is copied from pinned memory while the batch before is in use. For
    other devices, the copy has finished when the batch is yielded: only CUDA promises not to
    reuse memory that a copy still reads.
    """
    if device.type == "cuda":
        yield from _copy_ahead(batches, device)
        return
    for step, batch in batches:
        yield step, _move_batch(batch, device)


def _copy_ahead(batches: Iterator[Numbered], device: torch.device) -> Iterator[Numbered]:
    """Yield batches on a CUDA device, while the next batch is copied on another CUDA stream.

    torch frees pinned memory when the copies from it have finished. So a batch may be dropped
    as soon as its copy has begun.
    """
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
