"""The batch sizes for a device, and the recognition of errors that mean a lack of memory."""

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from wdsprep.runners.stuck_workers import is_of_memory

if TYPE_CHECKING:
    from wdsprep.encoding.models.base import Encoder

CPU_BATCH = 2  # more do not stay in the cache: on 2 cores, 8 at a time took 1.5 times as long
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
SHARE_OF_FREE_MEMORY = 0.8
BESIDE_A_TRAINER = 32 * 256**2  # pixels: it wants the memory

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


def auto_batch_size(encoder: "Encoder") -> int:
    """Return the number of images in a batch on a device.

    On a CPU it is always the same, so that everybody gets the same bytes. On a GPU it is what fits
    into the free memory.
    """
    if encoder.device.type != "cuda":
        return CPU_BATCH
    room = free_nbytes(encoder.device) * SHARE_OF_FREE_MEMORY
    return fitting_batch_size(room, encoder.resolution, encoder.itemsize)


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


def size_for_shape(size: int, resolution: int, pixels: int) -> int:
    """Return the batch size for images of a shape, given the batch size for squares.

    For shapes with fewer pixels than the square it is the same: that is enough to keep a GPU busy.
    """
    return max(1, min(size, size * resolution**2 // pixels))


def text_size(shape: tuple[int, ...], usual: int) -> int:
    """Return the number of captions of one shape in a batch.

    It is `usual` if captions are not grouped by length. If they are, it is just enough to keep a
    GPU busy: more captions of one length seldom come together.
    """
    if not shape:
        return usual
    return min(usual, max(GROUPED_BATCH, GROUPED_TOKENS // max(1, sum(shape))))


def limit_for_trainer(size: int, resolution: int) -> int:
    return max(1, min(size, BESIDE_A_TRAINER // resolution**2))


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
