"""The inputs and outputs of encoders, their networks in two precisions, and the sizes of batches.

`device` has what an encoder has to do, and `encoder` puts the parts of one together.
`is_out_of_memory` recognises the errors that mean a lack of memory.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Flag, auto
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from wdsprep.dataset.npy_arrays import BFLOAT16, Field, is_of_text, text_fields
from wdsprep.dataset.tar.write import Buffer
from wdsprep.encoding import TF32
from wdsprep.errors import WorkError
from wdsprep.runners.stuck_workers import is_of_memory

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    TF32: torch.float32,  # in memory: only what convolutions multiply is rounded
    "fp32": torch.float32,
}
TENSORS = {
    "<f2": torch.float16,
    "<f4": torch.float32,
    "<i4": torch.int32,
    "|u1": torch.uint8,
    BFLOAT16: torch.bfloat16,
}
"""Types of arrays, by what the layout calls them."""


def read_tensor(field: Field, data: Buffer, start: int) -> Tensor:
    """Return the array in the bytes of a member, which begins after `start` bytes of header.

    A variable one is as long as the bytes say.
    """
    values = torch.frombuffer(bytearray(data), dtype=TENSORS[field.dtype], offset=start)
    return values.view(-1, *field.shape[1:])


class Part(Flag):
    """The part of a sample: its image, its text, or both."""

    IMAGE = auto()
    TEXT = auto()
    BOTH = IMAGE | TEXT

    @classmethod
    def of(cls, fields: Sequence[Field]) -> "Part":
        """Return the part of a sample from which these arrays are made."""
        if is_of_text(fields):
            return cls.TEXT
        return cls.BOTH if text_fields(fields) else cls.IMAGE


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a caption: their ids, their number, and whether the caption was cut."""

    caption: str
    count: int = 0
    """with start, end and template, before anything was cut"""
    cut: bool = False
    ids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """by the member that would hold them, padded to what an encoder takes"""
    shape: tuple[int, ...] = ()
    """Captions of one shape may share a batch: what becomes of one does not depend on others'."""
    images: Any = field(default=None, compare=False, repr=False)
    """the sample's reference images, if its text depends on them, as `encode_prompt` takes them"""


@dataclass(frozen=True, slots=True)
class Rows:
    """The output of a network for a batch: an array (B, *shape) for each field.

    If captions have different lengths, values after the length of a row have no meaning.
    """

    arrays: dict[str, Tensor]
    lengths: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    arrays: dict[str, Tensor]
    """by field, (B, *shape) in the storage dtype, on the device"""
    ok: Tensor
    """bool (B,): whether all values of the row were finite and within the storage dtype's range"""
    lengths: Tensor | None = None
    """the length of each row of the variable field"""


class InTwoPrecisions:
    """A network in its usual precision and in fp32, each loaded when it is first used.

    If fp32 did not fit into memory once, it is not tried again: a network may have 19 GB.
    """

    def __init__(
        self, load: Callable[[str], Any], dtype: str, prepare: Callable[[Any], Any] | None = None
    ) -> None:
        """Keep the functions that load the network and prepare it for many batches.

        Only the network in its usual precision is prepared: in fp32 it computes few batches.
        """
        self._load, self._lock, self._dtype = load, Lock(), dtype
        self._prepare = prepare or (lambda loaded: loaded)
        self._loaded: dict[str, Any] = {}
        self._has_room = True

    def get(self, *, exact: bool = False) -> Any:
        dtype = "fp32" if exact else self._dtype
        with self._lock:
            if dtype in self._loaded:
                return self._loaded[dtype]
            if dtype == self._dtype:
                return self._loaded.setdefault(dtype, self._prepare(self._load(dtype)))
            if self._has_room:
                try:
                    return self._loaded.setdefault(dtype, self._load(dtype))
                except (RuntimeError, MemoryError, WorkError) as error:
                    cause = error.__cause__ if isinstance(error, WorkError) else None
                    if not is_out_of_memory(cause or error, free=0, wanted=0):
                        raise
                self._has_room = False
            raise MemoryError(f"there is no memory for a network in {dtype}")  # nor for its rest

    def release(self) -> None:
        """Free the memory of the network, which is loaded again when it is needed."""
        self._loaded.clear()


MAX_BATCH = 128
CAPTIONS_BATCH = 32  # more fill no GPU better, and the hidden states of all layers are kept
CLIP_CAPTIONS_BATCH = 128  # if CLIP alone encodes them: 32 take longer to launch than to compute
CAPTIONS_NBYTES = 1 << 28  # of what is made of the captions of a batch
GROUPED_BATCH = 8  # of captions of one length at least, and
GROUPED_TOKENS = 1 << 10  # what they have together: fewer take about as long, weights are read once
TEXT_NBYTES = 1 << 28  # that a caption may need, where kernels do not say what they lacked
EXACT_BATCH = 4  # of the few images that are computed again in fp32
# An image takes about this many tensors of the VAE's first width at full resolution, at the peak.
TENSORS_AT_PEAK = 6
FIRST_WIDTH = 128
MOST_ELEMENTS = 2**31 - 1  # of one tensor: of more, kernels count in 64 bits, or cut it in pieces

OUT_OF_MEMORY = ("out of memory", "can't allocate memory")
# So libraries below torch say that memory is out, and other things too.
PERHAPS_OUT_OF_MEMORY = (
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "unable to find an engine",
)
OF_DEVICES = re.compile("cuda|cudnn|cublas|out of memory|allocate memory|find an engine", re.I)


_gpu_share = 1.0
"""The share of the memory of its GPU that this process may use."""


def limit_memory(share: float) -> None:
    """Let this process use a share of the memory of its GPU, as others use the rest.

    They may not have begun, so that their memory looks free.
    """
    global _gpu_share  # as torch has one allocator in a process
    _gpu_share = share
    torch.cuda.set_per_process_memory_fraction(share)


def fitting_batch_size(nbytes: float, resolution: int, itemsize: int) -> int:
    most = min(MAX_BATCH, MOST_ELEMENTS // (FIRST_WIDTH * resolution**2))
    return max(1, min(most, int(nbytes / peak_nbytes(1, resolution, itemsize))))


def caption_batch_size(encoders: Sequence[str], nbytes: int, device: torch.device) -> int:
    """Return the number of captions in a batch of a pipeline, by the classes of its text encoders.

    It is 1 on a CPU. `nbytes` are the bytes of the arrays that a caption becomes.
    """
    if device.type != "cuda":
        return 1
    is_clip = all(kind.startswith("CLIPText") for kind in encoders)
    usual = CLIP_CAPTIONS_BATCH if is_clip else CAPTIONS_BATCH
    return max(1, min(usual, CAPTIONS_NBYTES // max(1, nbytes)))


def text_size(shape: tuple[int, ...], usual: int) -> int:
    """Return the number of captions of one shape in a batch.

    It is `usual` if captions are not grouped by length. If they are, it is just enough to keep a
    GPU busy: more captions of one length seldom come together.
    """
    if not shape:
        return usual
    return min(usual, max(GROUPED_BATCH, GROUPED_TOKENS // max(1, sum(shape))))


def peak_nbytes(size: int, resolution: int, itemsize: int) -> int:
    return size * TENSORS_AT_PEAK * FIRST_WIDTH * resolution**2 * itemsize


def free_nbytes(device: torch.device) -> int:
    """Return the free bytes of this process's share of a GPU, or the largest number for a CPU."""
    if device.type != "cuda":
        return sys.maxsize
    free, total = torch.cuda.mem_get_info(device)
    return min(free, int(total * _gpu_share) - torch.cuda.memory_reserved(device))


def is_device_error(error: BaseException) -> bool:
    """Return whether an error comes from a device or a lack of memory, whatever code raised it."""
    is_said = isinstance(error, RuntimeError) and OF_DEVICES.search(str(error)) is not None
    return is_said or is_of_memory(error)


def is_out_of_memory(error: BaseException, *, free: int, wanted: int) -> bool:
    """Return whether an error is a lack of memory on the device.

    Libraries below torch say so in their own words. If these may mean something else, the `free`
    memory is compared with what the batch `wanted`: if there was enough, a smaller batch would fail
    too.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error)
    if any(words in said for words in OUT_OF_MEMORY):
        return True
    return free < wanted and any(words in said for words in PERHAPS_OUT_OF_MEMORY)
