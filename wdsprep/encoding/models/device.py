"""A device that computes batches of one fixed size, each launched while the one before still runs.

A batch that does not fit into memory is halved, and so are all after it. Rows whose values are not
finite, or too large for the storage dtype, are computed once more in fp32, a few at a time: if they
do not fit, only these few are halved, and no other batch.

The time in which a GPU is busy is measured between two events on its stream. If the stream is
empty, the first event passes at once, and the time between them is the host's launching, not work.
So a batch counts for no more than the shortest time that a batch of its shape has taken lately: a
card that gets hot, and slower, is as busy as before. The first batch of a shape, for which kernels
are chosen and compiled, is computed before it is measured. If launching alone takes as long as the
work, the events cannot tell them apart: the time of the host is counted separately.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from wdsprep.dataset.npy_arrays import Field, is_of_text
from wdsprep.dataset.shapes import Size
from wdsprep.encoding import HALF, TF32
from wdsprep.encoding.gpus import computes_bf16, computes_tf32, require_gpu
from wdsprep.encoding.models.base import (
    EXACT_BATCH,
    TEXT_NBYTES,
    Encoded,
    Part,
    Tokens,
    fitting_batch_size,
    free_nbytes,
    is_out_of_memory,
    peak_nbytes,
)
from wdsprep.encoding.models.noise import noise_keys
from wdsprep.encoding.progress import Stats

if TYPE_CHECKING:
    from wdsprep.encoding.models.references import ReferencePipeline

CPU_BATCH = 2  # more do not stay in the cache: on 2 cores, 8 at a time took 1.5 times as long
SHARE_OF_FREE_MEMORY = 0.8
OF_LATE = 256  # batches of a shape: most of a minute, and longer than a queue ever runs empty
Arrays = dict[str, Tensor]
"""The arrays of one sample, by field; a variable one is as long as the caption."""


class Encoder:
    """A model that is loaded onto one device and encodes images, and perhaps captions.

    This base class makes nothing of captions, and all its networks stay on the device. Several
    threads may call its methods at once.
    """

    fields: tuple[Field, ...]
    resolution: int
    device: torch.device
    itemsize: int = torch.float32.itemsize
    """bytes of a number while the VAE works"""
    is_compiled: bool = False
    """whether the first batch of a size takes much longer"""
    has_text: bool = False
    """whether anything is made of captions"""
    text_batch_size: int = 0
    """the captions of a batch; 0: as many as images"""
    groups_texts: bool = False
    """whether captions are of several shapes"""
    takes_images: bool = False
    """whether what is made of captions depends on reference images"""
    is_split: bool = False
    """whether the device holds what encodes images or captions, but never both"""
    references: "ReferencePipeline | None" = None
    """what prepares reference images, if it is needed"""

    def bring(self, part: Part) -> None:
        """Make the device ready to encode a part of samples.

        If the device cannot hold all networks, those for the other part are removed from it.
        """

    def tokens(self, captions: Sequence[str], images: Sequence[Any] = ()) -> list[Tokens]:
        """Return the tokens of captions, made with the reference images of each if it takes them.

        `images` are as `encode_prompt` takes them.
        """
        raise NotImplementedError

    def encode_images(
        self, pixels: Tensor, noise: Tensor = ..., /, *, exact: bool = False
    ) -> Encoded:
        """Encode pixels, uint8 (B, 3, H, W), with int64 (B,) keys of noise, all on the device.

        References have no noise, and become their mode.
        """
        raise NotImplementedError

    def encode_texts(self, texts: Sequence[Tokens], *, exact: bool = False) -> Encoded:
        """Encode captions whose tokens have one shape."""
        raise NotImplementedError

    def empty(self) -> dict[str, Tensor]:
        """Return the arrays of the empty caption, on the host, by field."""
        return {}


def auto_batch_size(encoder: Encoder) -> int:
    """Return the number of images in a batch on a device.

    On a CPU it is always the same, so that everybody gets the same bytes. On a GPU it is what fits
    into the free memory.
    """
    if encoder.device.type != "cuda":
        return CPU_BATCH
    room = free_nbytes(encoder.device) * SHARE_OF_FREE_MEMORY
    return fitting_batch_size(room, encoder.resolution, encoder.itemsize)


def device_name(device: torch.device) -> str:
    """Return the name of a device, such as `NVIDIA A10G` or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """A batch of images on the host: the first `count` rows of each input, and then padding.

    The first input are the pixels. What follows are the keys of their noise, or whatever else the
    encoder takes.
    """

    count: int
    inputs: tuple[Tensor, ...]
    is_exact: bool = False
    """whether the networks compute it in fp32"""

    @classmethod
    def of(cls, pixels: Tensor, keys: Sequence[str], *, seed: int) -> "ImageBatch":
        """Return a batch of images, with the noise of their keys; further rows are padding."""
        noise = torch.zeros(len(pixels), dtype=torch.int64)
        noise[: len(keys)] = noise_keys(seed, keys)
        return cls(len(keys), (pixels, noise))

    @property
    def pixels(self) -> Tensor:
        return self.inputs[0]

    @property
    def size(self) -> int:
        return len(self.pixels)

    @property
    def shape(self) -> Size:
        *_, height, width = self.pixels.shape
        return width, height

    @property
    def kind(self) -> tuple[int, ...]:
        """Return what batches that take equally long have in common."""
        return (*self.pixels.shape, self.is_exact)

    def pick(self, rows: Sequence[int], size: int) -> "ImageBatch":
        """Return a batch of some of the rows, padded with the first of them to a size."""
        index = torch.tensor(_pad_rows(rows, size))
        return replace(self, count=len(rows), inputs=tuple(each[index] for each in self.inputs))

    def encoded(self, encoder: Encoder) -> Encoded:
        inputs = [each.to(encoder.device, non_blocking=True) for each in self.inputs]
        return encoder.encode_images(*inputs, exact=self.is_exact)


@dataclass(frozen=True, slots=True)
class TextBatch:
    """A batch of captions of one shape: the first `count` captions, and then padding."""

    count: int
    texts: Sequence[Tokens]
    is_exact: bool = False

    @classmethod
    def of(cls, texts: Sequence[Tokens], size: int, device: torch.device) -> "TextBatch":
        """Return a batch of captions, padded to a size.

        On a GPU, captions that are grouped by length are not padded: each row of padding would be
        computed, and few captions of most lengths come together.
        """
        whole = cls(len(texts), texts)
        is_padded = device.type == "cpu" or not whole.has_length
        return whole.pick(range(len(texts)), size) if is_padded else whole

    @property
    def has_length(self) -> bool:
        """Return whether the captions are grouped by length."""
        return any(text.shape for text in self.texts)

    @property
    def size(self) -> int:
        return len(self.texts)

    @property
    def kind(self) -> tuple[int, ...]:
        return (self.size, self.is_exact)

    def pick(self, rows: Sequence[int], size: int) -> "TextBatch":
        texts = [self.texts[row] for row in _pad_rows(rows, size)]
        return replace(self, count=len(rows), texts=texts)

    def encoded(self, encoder: Encoder) -> Encoded:
        return encoder.encode_texts(self.texts, exact=self.is_exact)


DeviceBatch = ImageBatch | TextBatch


def _pad_rows(rows: Sequence[int], size: int) -> list[int]:
    return [*rows, *[rows[0] if rows else 0] * (size - len(rows))]


def _split(batch: DeviceBatch, size: int) -> list[DeviceBatch]:
    starts = range(0, max(1, batch.count), size)  # one of padding alone, to warm up with
    return [batch.pick(range(start, min(start + size, batch.count)), size) for start in starts]


class Launched(NamedTuple):
    batch: DeviceBatch
    made: Encoded
    """on the host, once the device has come so far"""
    began: "torch.cuda.Event | float"
    ended: "torch.cuda.Event | float"


class Device:
    def __init__(self, encoder: Encoder, batch_size: int) -> None:
        self._encoder = encoder
        self._is_cuda = encoder.device.type == "cuda"
        self._warms_up = self._is_cuda or encoder.is_compiled
        self._of_late: dict[tuple[int, ...], deque[float]] = {}
        """The seconds that the latest batches of each kind took."""
        self._first_launch = 0.0
        self.stats = Stats(batch_size=batch_size or auto_batch_size(encoder))
        self._fits = self._is_cuda and not batch_size
        """True if the batch size follows from memory, and so may depend on the shape of images."""
        self.stats.text_size = encoder.text_batch_size or self.size
        self._exact_sizes: dict[type, int] = dict.fromkeys((ImageBatch, TextBatch), EXACT_BATCH)
        """The sizes of batches in fp32, by their kind; 0 if there is no memory for the networks."""
        self._counted = TextBatch if is_of_text(encoder.fields) else ImageBatch
        self._variable = {field.name for field in encoder.fields if field.is_variable}

    @property
    def size(self) -> int:
        """Return the batch size for images; it is that of squares, if it depends on the shape."""
        return self.stats.batch_size

    @property
    def text_size(self) -> int:
        return self.stats.text_size

    def size_of(self, shape: Size) -> int:
        """Return the batch size for images of this width and height.

        For shapes with fewer pixels than the square it is that of squares: that is enough to keep a
        GPU busy.
        """
        if not self._fits:
            return self.size
        return max(1, min(self.size, self.size * self._encoder.resolution**2 // prod(shape)))

    def _size_of(self, batch: DeviceBatch) -> int:
        usual = self.size_of(batch.shape) if isinstance(batch, ImageBatch) else self.text_size
        return min(usual, self._exact_sizes[type(batch)]) if batch.is_exact else usual

    def launch(self, batch: DeviceBatch) -> list[Launched]:
        """Launch a batch, in several smaller ones if it does not fit into memory.

        The batch size is then halved for later batches too. Raise the error if a single row does
        not fit, or if the cause is not a lack of memory that a smaller batch would mend. The first
        batch of a kind may be computed beforehand, to warm up.
        """
        size = self._size_of(batch)
        if batch.size > size:
            return [made for part in _split(batch, size) for made in self.launch(part)]
        try:
            self._warm_up_first(batch)
            began = time.monotonic()
            self._first_launch = self._first_launch or began
            launched = self._launch(batch)
            if self._is_cuda:  # elsewhere launching is computing
                self.stats.launch_s += time.monotonic() - began
            return [launched]
        except (RuntimeError, MemoryError) as error:
            if batch.size == 1 or not self._is_out_of_memory(error, batch):
                raise
        half = batch.size // 2
        if batch.is_exact:
            self._exact_sizes[type(batch)] = half
        elif isinstance(batch, ImageBatch):
            self.stats.batch_size = half
        else:
            self.stats.text_size = half
        if self._is_cuda:  # out of the handler: it held on to the memory
            torch.cuda.empty_cache()
        return self.launch(batch)

    def _is_out_of_memory(self, error: Exception, batch: DeviceBatch) -> bool:
        encoder = self._encoder
        itemsize = torch.float32.itemsize if batch.is_exact else encoder.itemsize
        wanted = batch.size * TEXT_NBYTES
        if isinstance(batch, ImageBatch):
            wanted = peak_nbytes(batch.size, encoder.resolution, itemsize)
        return is_out_of_memory(error, free=free_nbytes(encoder.device), wanted=wanted)

    def warm_up(self, batch: DeviceBatch) -> None:
        """Compute a batch before the work, so that kernels are ready and the batch size fits.

        The statistics begin anew. On a CPU nothing is done, unless networks are compiled.
        """
        if self._warms_up:
            self.finish(self.launch(batch))
            sizes = {"batch_size": self.size, "text_size": self.text_size}
            self.stats, self._first_launch = Stats(**sizes), 0.0

    def _warm_up_first(self, batch: DeviceBatch) -> None:
        """Compute the first batch of a kind twice, and time the second run.

        The first run also makes kernels ready. This is not done with batches of captions that are
        grouped by length, as they are of too many kinds, nor on a CPU, unless networks are
        compiled.
        """
        has_length = isinstance(batch, TextBatch) and batch.has_length
        if not self._warms_up or has_length or batch.kind in self._of_late:
            return
        began = time.monotonic()
        for _ in range(2):
            seconds = _elapsed_seconds(self._launch(batch))
        self._of_late[batch.kind] = deque([seconds], OF_LATE)
        if self._first_launch:  # in the middle of a run: that time is none of it
            self._first_launch += time.monotonic() - began

    def _launch(self, batch: DeviceBatch) -> Launched:
        began = self._record_event()
        encoded = batch.encoded(self._encoder)
        arrays = {name: self._to_host(array) for name, array in encoded.arrays.items()}
        lengths = None if encoded.lengths is None else self._to_host(encoded.lengths)
        made = Encoded(arrays, self._to_host(encoded.ok), lengths)
        return Launched(batch, made, began, self._record_event())

    def _to_host(self, made: Tensor) -> Tensor:
        if not self._is_cuda:
            return made.contiguous()
        host = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
        return host.copy_(made, non_blocking=True)

    def _record_event(self) -> "torch.cuda.Event | float":
        if not self._is_cuda:
            return time.monotonic()
        # A thread that waits for an event without blocking would keep a core busy.
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def finish(self, launched: Sequence[Launched]) -> list[Arrays | None]:
        """Wait for launched batches, and return the arrays of each row, without padding.

        Rows whose values are not finite, or too large for the storage dtype, are computed again in
        fp32. A row is None if that does not help.
        """
        return [row for part in launched for row in self._finish(part)]

    def _finish(self, launched: Launched) -> list[Arrays | None]:
        batch, made, stats = launched.batch, launched.made, self.stats
        worked = _elapsed_seconds(launched)
        if self._is_cuda and (late := self._of_late.get(batch.kind)):
            late.append(worked)
            worked = min(late)
        stats.busy_s += worked
        stats.text_s += worked if isinstance(batch, TextBatch) else 0.0
        stats.wall_s = time.monotonic() - self._first_launch
        stats.batches += 1
        columns = [array[: batch.count].unbind() for array in made.arrays.values()]
        arrays = [dict(zip(made.arrays, row, strict=True)) for row in zip(*columns, strict=True)]
        if made.lengths is not None:
            names = self._variable & made.arrays.keys()
            for row, length in zip(arrays, made.lengths.tolist(), strict=False):  # and of padding
                # Copied, as it would otherwise keep the memory of the whole batch.
                row.update({name: row[name][:length].clone() for name in names})
        ok = made.ok[: batch.count].tolist()
        rows = [row if is_ok else None for row, is_ok in zip(arrays, ok, strict=True)]
        if batch.is_exact:
            return rows
        if failed := [number for number, row in enumerate(rows) if row is None]:
            for number, exact in zip(failed, self._compute_exact(batch, failed), strict=True):
                rows[number] = exact
        stats.samples += batch.count if isinstance(batch, self._counted) else 0
        return rows

    def _compute_exact(self, batch: DeviceBatch, rows: Sequence[int]) -> list[Arrays | None]:
        """Compute rows of a batch again in fp32, and return their arrays.

        One small batch is computed after the other, as memory is nearly full. A row is None if its
        values are not finite or too large even now, or if there is no memory for fp32.
        """
        self.stats.exact += len(rows)
        made: list[Arrays | None] = []
        exact = replace(batch.pick(rows, len(rows)), is_exact=True)
        for part in _split(exact, max(1, self._size_of(exact))):
            if not self._exact_sizes[type(part)]:
                made += [None] * part.count
                continue
            try:
                for launched in self.launch(part):
                    made += self._finish(launched)
            except (RuntimeError, MemoryError) as error:
                if not self._is_out_of_memory(error, part):
                    raise
                self._exact_sizes[type(part)] = 0
                made += [None] * part.count
        return made


def _elapsed_seconds(launched: Launched) -> float:
    """Return the seconds between the begin and the end of a batch, after waiting for its end."""
    began, ended = launched.began, launched.ended
    if isinstance(began, float) or isinstance(ended, float):
        return ended - began  # type: ignore[operator]
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000


def check_gpu(device: str, dtype: str = "fp32", *, has_bf16_text: bool = False) -> None:
    """Raise RuntimeError if a GPU is too old, or lacks a precision that was chosen without it.

    One that torch has no code for is too old: CUDA would say so later and less clearly. A precision
    may be TF32 for a VAE, in place of which torch would compute in fp32 without a word, so that
    the run would mix the two; or bf16 for text encoders, which it would emulate slowly. Raise
    WorkError if torch cannot use any GPU.
    """
    require_gpu(device)
    gpu = torch.device(device)
    if gpu.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(gpu)
    built = (arch for arch in torch.cuda.get_arch_list() if arch.startswith("sm_"))
    codes = [int(arch.partition("_")[2].rstrip("af")) for arch in built]
    if codes and 10 * major + minor < min(codes):
        raise RuntimeError(  # of this place alone: a cluster may have others
            f"{device_name(gpu)} (sm_{major}{minor}) is too old for torch {torch.__version__}, "
            f"which is built for sm_{min(codes)} and newer: install a torch that is built for it, "
            "leave it out with CUDA_VISIBLE_DEVICES or --accelerator-type, or give --device cpu"
        )
    lacks = ""
    if dtype.endswith(TF32) and not computes_tf32(gpu):
        lacks = "TF32, in which the VAE of this run computes"
    elif dtype.startswith(HALF) and has_bf16_text and not computes_bf16():
        lacks = "bf16, in which text encoders of this run compute"
    if lacks:
        raise RuntimeError(
            f"{device_name(gpu)} has no {lacks}: leave it out with CUDA_VISIBLE_DEVICES or "
            "--accelerator-type, or give --dtype fp32"
        )
