"""One device computing batches of one fixed size, one launched while the one before still runs.

A batch that does not fit into memory is halved, and so are all after it. Rows whose values are not
finite, or too large for the storage dtype, are computed once more in fp32, a few at a time: what
does not fit there halves those few, and no other batch.

What a GPU is busy with is measured between two marks on its stream. Where that is empty, the first
mark passes at once, and what lies between is the host's launching, not work. So a batch counts for
no more than the shortest time that one of its shape has taken. The first of a shape, with which
kernels are chosen and compiled, is computed before it is measured. Where the launching alone takes
as long as the work, the marks cannot tell them apart: what the host takes is counted beside it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from wdsprep.encoding.models.batch_size import (
    EXACT_BATCH,
    auto_batch_size,
    free_nbytes,
    is_out_of_memory,
    peak_nbytes,
)
from wdsprep.encoding.models.encoder import Encoder, Tokens
from wdsprep.encoding.models.noise import noise_keys

Arrays = tuple[torch.Tensor, ...]


def device_name(device: torch.device) -> str:
    """Such as `NVIDIA A10G`, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """Inputs on the host. The first `count` rows are wanted, the rest is padding."""

    count: int
    pixels: torch.Tensor
    ids: torch.Tensor | None
    noise: torch.Tensor

    @classmethod
    def of(
        cls, pixels: torch.Tensor, tokens: Sequence[Tokens], keys: Sequence[str], *, seed: int
    ) -> "DeviceBatch":
        """Of samples with these keys. What `pixels` and `tokens` have more is padding."""
        ids = [each.ids for each in tokens]
        noise = torch.zeros(len(pixels), dtype=torch.int64)
        noise[: len(keys)] = noise_keys(seed, keys)
        return cls(len(keys), pixels, torch.tensor(ids) if any(ids) else None, noise)

    @property
    def size(self) -> int:
        return len(self.pixels)

    def pick(self, rows: Sequence[int], size: int) -> "DeviceBatch":
        """Some of the rows, padded with the first of them."""
        index = torch.tensor([*rows, *[rows[0] if rows else 0] * (size - len(rows))])
        ids = None if self.ids is None else self.ids[index]
        return DeviceBatch(len(rows), self.pixels[index], ids, self.noise[index])

    def parts(self, size: int) -> "list[DeviceBatch]":
        starts = range(0, max(1, self.count), size)  # one of padding alone, to warm up with
        return [self.pick(range(start, min(start + size, self.count)), size) for start in starts]


@dataclass(slots=True)
class Stats:
    """What the device has done; `wall_s` runs from the first launch to the last batch's end, and
    `launch_s` is what the host needed to tell a GPU what to do."""

    samples: int = 0
    batches: int = 0
    busy_s: float = 0.0
    launch_s: float = 0.0
    wall_s: float = 0.0
    exact: int = 0
    batch_size: int = 0


def combined(stats: "Sequence[Stats]") -> Stats:
    """What several devices that share one machine have done, as one."""
    return Stats(
        samples=sum(each.samples for each in stats),
        batches=sum(each.batches for each in stats),
        busy_s=sum(each.busy_s for each in stats) / len(stats),
        launch_s=sum(each.launch_s for each in stats) / len(stats),
        wall_s=max(each.wall_s for each in stats),
        exact=sum(each.exact for each in stats),
        batch_size=min(each.batch_size for each in stats),
    )


@dataclass(frozen=True, slots=True)
class Launched:
    batch: DeviceBatch
    is_exact: bool
    arrays: Arrays
    ok: torch.Tensor
    began: "torch.cuda.Event | float"
    ended: "torch.cuda.Event | float"


class Device:
    def __init__(self, encoder: Encoder, batch_size: int, gpu_share: float = 1.0) -> None:
        self._encoder = encoder
        self._is_cuda = encoder.device.type == "cuda"
        self._warms_up = self._is_cuda or encoder.is_compiled
        self._shortest: dict[tuple[int, bool], float] = {}
        self._first_launch = 0.0
        self.stats = Stats(batch_size=batch_size or auto_batch_size(encoder, gpu_share))
        self._exact_size = min(EXACT_BATCH, self.size)

    @property
    def size(self) -> int:
        return self.stats.batch_size

    def launch(self, batch: DeviceBatch, *, exact: bool = False) -> list[Launched]:
        """Begin a batch; several where it has to be cut into smaller ones."""
        size = self._exact_size if exact else self.size
        if batch.size > size:
            return [made for part in batch.parts(size) for made in self.launch(part, exact=exact)]
        try:
            if self._warms_up and (batch.size, exact) not in self._shortest:
                self._warm_up(batch, exact=exact)
            return [self._timed(batch, exact=exact)]
        except (RuntimeError, MemoryError) as error:
            if batch.size == 1 or not self._is_out_of_memory(error, batch.size, exact=exact):
                raise
        if exact:
            self._exact_size = batch.size // 2
        else:
            self.stats.batch_size = batch.size // 2
        if self._is_cuda:  # out of the handler: it held on to the memory
            torch.cuda.empty_cache()
        return self.launch(batch, exact=exact)

    def _is_out_of_memory(self, error: Exception, size: int, *, exact: bool) -> bool:
        encoder = self._encoder
        itemsize = torch.float32.itemsize if exact else encoder.itemsize
        wanted = peak_nbytes(size, encoder.resolution, itemsize)
        return is_out_of_memory(error, free=free_nbytes(encoder.device), wanted=wanted)

    def warm_up(self, batch: DeviceBatch) -> None:
        """Have all in place for such batches, and the smaller ones that memory may call for."""
        if self._warms_up:
            self.finish(self.launch(batch))
            self.stats, self._first_launch = Stats(batch_size=self.size), 0.0

    def _warm_up(self, batch: DeviceBatch, *, exact: bool) -> None:
        """The second time is without what comes but once."""
        began = time.monotonic()
        for _ in range(2):
            seconds = _seconds(self._launch(batch, exact=exact))
        self._shortest[batch.size, exact] = seconds
        if self._first_launch:  # in the middle of a run: that time is none of it
            self._first_launch += time.monotonic() - began

    def _timed(self, batch: DeviceBatch, *, exact: bool) -> Launched:
        began = time.monotonic()
        self._first_launch = self._first_launch or began
        launched = self._launch(batch, exact=exact)
        if self._is_cuda:  # elsewhere launching is computing
            self.stats.launch_s += time.monotonic() - began
        return launched

    def _launch(self, batch: DeviceBatch, *, exact: bool) -> Launched:
        began = self._mark()
        to = self._encoder.device
        encoded = self._encoder.encode(
            batch.pixels.to(to, non_blocking=True),
            None if batch.ids is None else batch.ids.to(to, non_blocking=True),
            batch.noise.to(to, non_blocking=True),
            exact=exact,
        )
        names = [field.name for field in self._encoder.fields]
        arrays = tuple(self._to_host(encoded.arrays[name]) for name in names)
        return Launched(batch, exact, arrays, self._to_host(encoded.ok), began, self._mark())

    def _to_host(self, made: torch.Tensor) -> torch.Tensor:
        if not self._is_cuda:
            return made.contiguous()
        host = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
        return host.copy_(made, non_blocking=True)

    def _mark(self) -> "torch.cuda.Event | float":
        if not self._is_cuda:
            return time.monotonic()
        # Who waits for one that does not block keeps a core busy with it.
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def finish(self, launched: Sequence[Launched]) -> list[Arrays | None]:
        """The arrays of every wanted row, in order; None where they cannot be had."""
        return [row for one in launched for row in self._finish(one, may_retry=True)]

    def _finish(self, one: Launched, *, may_retry: bool) -> list[Arrays | None]:
        stats = self.stats
        stats.busy_s += self._worked(one)
        stats.wall_s = time.monotonic() - self._first_launch
        stats.batches += 1
        rows: list[Arrays | None] = [
            tuple(made[row] for made in one.arrays) for row in range(one.batch.count)
        ]
        failed = (~one.ok[: one.batch.count]).nonzero().flatten().tolist()
        again = self._exact(one.batch, failed) if failed and may_retry else []
        for row, made in zip(failed, again or [None] * len(failed), strict=True):
            rows[row] = made
        stats.samples += one.batch.count if may_retry else 0
        return rows

    def _worked(self, one: Launched) -> float:
        """Its part of the busy time: on a CPU all of it."""
        seconds, shape = _seconds(one), (one.batch.size, one.is_exact)
        if not self._is_cuda:
            return seconds
        shortest = self._shortest[shape] = min(seconds, self._shortest.get(shape, seconds))
        return shortest

    def _exact(self, batch: DeviceBatch, rows: Sequence[int]) -> list[Arrays | None]:
        """One batch after the other, in memory that is all but taken."""
        self.stats.exact += len(rows)
        made: list[Arrays | None] = []
        for part in batch.pick(rows, len(rows)).parts(self._exact_size):
            for one in self.launch(part, exact=True):
                made += self._finish(one, may_retry=False)
        return made


def _seconds(one: Launched) -> float:
    """How long the device worked on it, once it has ended."""
    if isinstance(one.began, float) or isinstance(one.ended, float):
        return one.ended - one.began  # type: ignore[operator]
    one.ended.synchronize()
    return float(one.began.elapsed_time(one.ended)) / 1000


def check_age(device: torch.device) -> None:
    """A GPU for which this torch has no code says so at its first kernel, in words of CUDA."""
    if device.type != "cuda" or not (built := torch.cuda.get_arch_list()):
        return
    major, minor = torch.cuda.get_device_capability(device)
    codes = [int(arch.partition("_")[2].rstrip("af")) for arch in built if arch.startswith("sm_")]
    if codes and 10 * major + minor < min(codes):
        raise RuntimeError(  # of this place alone: a cluster may have others
            f"{device_name(device)} (sm_{major}{minor}) is too old for torch {torch.__version__}, "
            f"which is built for sm_{min(codes)} and newer: install a torch that is built for it, "
            "leave it out with CUDA_VISIBLE_DEVICES or --accelerator-type, or encode with "
            "--device cpu"
        )
