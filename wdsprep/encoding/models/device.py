"""One device computing batches of one fixed size, one launched while the one before still runs.

A batch that does not fit into memory is halved, and so are all after it. Rows whose values are not
finite, or too large for the storage dtype, are computed once more in fp32, a few at a time: what
does not fit there halves those few, and no other batch.

What a GPU is busy with is measured between two marks on its stream. Where that is empty, the first
mark passes at once, and what lies between is the host's launching, not work. So a batch counts for
no more than the shortest time that one of its shape has taken of late: a card that gets hot, and
slower, is as busy as before. The first of a shape, with which kernels are chosen and compiled, is
computed before it is measured. Where the launching alone takes
as long as the work, the marks cannot tell them apart: what the host takes is counted beside it.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from wdsprep.dataset.arrays import is_of_text
from wdsprep.dataset.shapes import Size
from wdsprep.encoding.models.base import Encoded, Encoder, NoRoomError, Tokens
from wdsprep.encoding.models.batch_size import (
    EXACT_BATCH,
    TEXT_NBYTES,
    auto_batch_size,
    free_nbytes,
    in_shape,
    is_out_of_memory,
    peak_nbytes,
)
from wdsprep.encoding.models.noise import noise_keys

OF_LATE = 256  # batches of a shape: most of a minute, and longer than a queue ever runs empty
Arrays = dict[str, torch.Tensor]
"""The arrays of one sample, by field; a variable one is as long as the caption."""


def device_name(device: torch.device) -> str:
    """Such as `NVIDIA A10G`, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """Pixels on the host. The first `count` rows are wanted, the rest is padding."""

    count: int
    pixels: torch.Tensor
    noise: torch.Tensor

    @classmethod
    def of(cls, pixels: torch.Tensor, keys: Sequence[str], *, seed: int) -> "ImageBatch":
        """Make a batch of samples with these keys.

        If `pixels` has more rows, the rest is padding.
        """
        noise = torch.zeros(len(pixels), dtype=torch.int64)
        noise[: len(keys)] = noise_keys(seed, keys)
        return cls(len(keys), pixels, noise)

    @property
    def size(self) -> int:
        return len(self.pixels)

    @property
    def shape(self) -> Size:
        height, width = self.pixels.shape[2:]
        return width, height

    @property
    def kind(self) -> tuple[int, ...]:
        """Batches of one kind take equally long."""
        return tuple(self.pixels.shape)

    def pick(self, rows: Sequence[int], size: int) -> "ImageBatch":
        """Return some of the rows, padded with the first of them."""
        index = torch.tensor(_padded(rows, size))
        return ImageBatch(len(rows), self.pixels[index], self.noise[index])

    def encoded(self, encoder: Encoder, *, exact: bool) -> Encoded:
        pixels = self.pixels.to(encoder.device, non_blocking=True)
        noise = self.noise.to(encoder.device, non_blocking=True)
        return encoder.encode_images(pixels, noise, exact=exact)


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Captions of one shape. The first `count` are wanted, the rest is padding."""

    count: int
    texts: Sequence[Tokens]

    @classmethod
    def of(cls, texts: Sequence[Tokens], size: int, device: torch.device) -> "TextBatch":
        """Pad a batch to a size.

        On a GPU a batch of captions of one length is not padded: it would compute each row
        of padding, and of most lengths few captions come together.
        """
        whole = cls(len(texts), texts)
        has_length = any(text.shape for text in texts)
        is_padded = device.type == "cpu" or not has_length
        return whole.pick(range(len(texts)), size) if is_padded else whole

    @property
    def size(self) -> int:
        return len(self.texts)

    @property
    def kind(self) -> tuple[int, ...]:
        return (self.size,)

    def pick(self, rows: Sequence[int], size: int) -> "TextBatch":
        return TextBatch(len(rows), [self.texts[row] for row in _padded(rows, size)])

    def encoded(self, encoder: Encoder, *, exact: bool) -> Encoded:
        return encoder.encode_texts(self.texts, exact=exact)


DeviceBatch = ImageBatch | TextBatch


def _padded(rows: Sequence[int], size: int) -> list[int]:
    return [*rows, *[rows[0] if rows else 0] * (size - len(rows))]


def _parts(batch: DeviceBatch, size: int) -> list[DeviceBatch]:
    starts = range(0, max(1, batch.count), size)  # one of padding alone, to warm up with
    return [batch.pick(range(start, min(start + size, batch.count)), size) for start in starts]


@dataclass(slots=True)
class Stats:
    """The work of a device so far.

    `wall_s` runs from the first launch to the last batch's end, and `launch_s` is what the host
    needed to tell a GPU what to do. `text_s` is the part of `busy_s` that captions took.
    `samples` are images, or captions where there are no images. The sizes are those of the
    batches of images and of captions by now.
    """

    samples: int = 0
    batches: int = 0
    busy_s: float = 0.0
    text_s: float = 0.0
    launch_s: float = 0.0
    wall_s: float = 0.0
    exact: int = 0
    batch_size: int = 0
    text_size: int = 0


def combined(stats: "Sequence[Stats]") -> Stats:
    """Combine the work of several devices that share one machine."""
    return Stats(
        samples=sum(each.samples for each in stats),
        batches=sum(each.batches for each in stats),
        busy_s=sum(each.busy_s for each in stats) / len(stats),
        text_s=sum(each.text_s for each in stats) / len(stats),
        launch_s=sum(each.launch_s for each in stats) / len(stats),
        wall_s=max(each.wall_s for each in stats),
        exact=sum(each.exact for each in stats),
        batch_size=min(each.batch_size for each in stats),
        text_size=min(each.text_size for each in stats),
    )


@dataclass(frozen=True, slots=True)
class Launched:
    batch: DeviceBatch
    is_exact: bool
    arrays: dict[str, torch.Tensor]
    lengths: torch.Tensor | None
    ok: torch.Tensor
    began: "torch.cuda.Event | float"
    ended: "torch.cuda.Event | float"


class Device:
    def __init__(self, encoder: Encoder, batch_size: int, gpu_share: float = 1.0) -> None:
        self._encoder = encoder
        self._is_cuda = encoder.device.type == "cuda"
        self._warms_up = self._is_cuda or encoder.is_compiled
        self._of_late: dict[tuple[tuple[int, ...], bool], deque[float]] = {}
        """The seconds that the last batches of each shape took."""
        self._first_launch = 0.0
        self.stats = Stats(batch_size=batch_size or auto_batch_size(encoder, gpu_share))
        self._fits = self._is_cuda and not batch_size
        """Whether memory decides the batch size, so that it does not decide what is stored."""
        self.stats.text_size = encoder.text_batch_size or self.size
        self._exact_sizes: dict[type, int] = dict.fromkeys((ImageBatch, TextBatch), EXACT_BATCH)
        self._inexact: set[type] = set()
        """Kinds of batches for whose networks in fp32 there is no memory."""
        self._counted = TextBatch if is_of_text(encoder.fields) else ImageBatch
        self._variable = {field.name for field in encoder.fields if field.is_variable}

    @property
    def size(self) -> int:
        """Return the size of a batch of images; where shapes differ in what fits, of squares."""
        return self.stats.batch_size

    @property
    def text_size(self) -> int:
        return self.stats.text_size

    def size_of(self, shape: Size) -> int:
        """Return the size of a batch of images of this width and height."""
        return (
            in_shape(self.size, self._encoder.resolution, prod(shape)) if self._fits else self.size
        )

    def _size_of(self, batch: DeviceBatch, *, exact: bool) -> int:
        usual = self.size_of(batch.shape) if isinstance(batch, ImageBatch) else self.text_size
        return min(usual, self._exact_sizes[type(batch)]) if exact else usual

    def launch(self, batch: DeviceBatch, *, exact: bool = False) -> list[Launched]:
        """Begin a batch; several where it has to be cut into smaller ones."""
        size = self._size_of(batch, exact=exact)
        if batch.size > size:
            parts = _parts(batch, size)
            return [made for part in parts for made in self.launch(part, exact=exact)]
        try:
            if self._is_to_warm_up(batch, exact=exact):
                self._warm_up(batch, exact=exact)
            return [self._timed(batch, exact=exact)]
        except NoRoomError:
            raise
        except (RuntimeError, MemoryError) as error:
            if batch.size == 1 or not self._is_out_of_memory(error, batch, exact=exact):
                raise
        self._halve(batch, exact=exact)
        if self._is_cuda:  # out of the handler: it held on to the memory
            torch.cuda.empty_cache()
        return self.launch(batch, exact=exact)

    def _halve(self, batch: DeviceBatch, *, exact: bool) -> None:
        half = batch.size // 2
        if exact:
            self._exact_sizes[type(batch)] = half
        elif isinstance(batch, ImageBatch):
            self.stats.batch_size = half
        else:
            self.stats.text_size = half

    def _is_out_of_memory(self, error: Exception, batch: DeviceBatch, *, exact: bool) -> bool:
        encoder = self._encoder
        itemsize = torch.float32.itemsize if exact else encoder.itemsize
        wanted = batch.size * TEXT_NBYTES
        if isinstance(batch, ImageBatch):
            wanted = peak_nbytes(batch.size, encoder.resolution, itemsize)
        return is_out_of_memory(error, free=free_nbytes(encoder.device), wanted=wanted)

    def warm_up(self, batch: DeviceBatch) -> None:
        """Have all in place for such batches, and the smaller ones that memory may call for."""
        if self._warms_up:
            self.finish(self.launch(batch))
            sizes = {"batch_size": self.size, "text_size": self.text_size}
            self.stats, self._first_launch = Stats(**sizes), 0.0

    def _is_to_warm_up(self, batch: DeviceBatch, *, exact: bool) -> bool:
        """Captions of every length would be too many."""
        has_length = isinstance(batch, TextBatch) and any(text.shape for text in batch.texts)
        known = (batch.kind, exact) in self._of_late
        return self._warms_up and not has_length and not known

    def _warm_up(self, batch: DeviceBatch, *, exact: bool) -> None:
        """Run a batch twice, and time the second run, which has no one-time costs."""
        began = time.monotonic()
        for _ in range(2):
            seconds = _seconds(self._launch(batch, exact=exact))
        self._of_late[batch.kind, exact] = deque([seconds], OF_LATE)
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
        encoded = batch.encoded(self._encoder, exact=exact)
        arrays = {name: self._to_host(array) for name, array in encoded.arrays.items()}
        lengths = None if encoded.lengths is None else self._to_host(encoded.lengths)
        return Launched(
            batch, exact, arrays, lengths, self._to_host(encoded.ok), began, self._mark()
        )

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
        """Return the arrays of every wanted row, in order; None where they cannot be computed."""
        return [row for one in launched for row in self._finish(one, may_retry=True)]

    def _finish(self, one: Launched, *, may_retry: bool) -> list[Arrays | None]:
        stats, is_text = self.stats, isinstance(one.batch, TextBatch)
        worked = self._worked(one)
        stats.busy_s += worked
        stats.text_s += worked if is_text else 0.0
        stats.wall_s = time.monotonic() - self._first_launch
        stats.batches += 1
        rows: list[Arrays | None] = [self._row(one, row) for row in range(one.batch.count)]
        failed = (~one.ok[: one.batch.count]).nonzero().flatten().tolist()
        again = self._exact(one.batch, failed) if failed and may_retry else []
        for row, made in zip(failed, again or [None] * len(failed), strict=True):
            rows[row] = made
        is_counted = may_retry and isinstance(one.batch, self._counted)
        stats.samples += one.batch.count if is_counted else 0
        return rows

    def _row(self, one: Launched, row: int) -> Arrays:
        """Return the arrays of a row. An array that is a part of its row is copied.

        Otherwise it would keep the memory of the whole batch.
        """
        found = {name: made[row] for name, made in one.arrays.items()}
        if one.lengths is not None:
            for name in self._variable & found.keys():
                found[name] = found[name][: int(one.lengths[row])].clone()
        return found

    def _worked(self, one: Launched) -> float:
        """Return the busy time of a batch. On a CPU it is all of its time."""
        seconds, shape = _seconds(one), (one.batch.kind, one.is_exact)
        if not self._is_cuda or shape not in self._of_late:
            return seconds
        self._of_late[shape].append(seconds)
        return min(self._of_late[shape])

    def _exact(self, batch: DeviceBatch, rows: Sequence[int]) -> list[Arrays | None]:
        """Compute rows once more in fp32, one batch after the other, as memory is nearly full.

        If there is no room for a network in fp32, there is no result.
        """
        self.stats.exact += len(rows)
        made: list[Arrays | None] = []
        size = self._size_of(batch, exact=True)
        for part in _parts(batch.pick(rows, len(rows)), size):
            if type(part) in self._inexact:
                made += [None] * part.count
                continue
            try:
                for one in self.launch(part, exact=True):
                    made += self._finish(one, may_retry=False)
            except (RuntimeError, MemoryError) as error:
                has_no_room = isinstance(error, NoRoomError)
                if not has_no_room and not self._is_out_of_memory(error, part, exact=True):
                    raise
                self._inexact.add(type(part))
                made += [None] * part.count
        return made


def _seconds(one: Launched) -> float:
    """Return how long the device worked on a batch, once it has ended."""
    if isinstance(one.began, float) or isinstance(one.ended, float):
        return one.ended - one.began  # type: ignore[operator]
    one.ended.synchronize()
    return float(one.began.elapsed_time(one.ended)) / 1000


def check_age(device: torch.device) -> None:
    """Refuse a GPU for which this torch has no code, before CUDA does so in its own words."""
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
