"""How many images a device takes at a time, and whether it was memory that they lacked."""

import re
import sys
from typing import TYPE_CHECKING

import torch

from wdsprep.runners.out_of_memory import is_of_memory

if TYPE_CHECKING:
    from wdsprep.encoding.models.base import Encoder

CPU_BATCH = 2  # more do not stay in the cache: on 2 cores, 8 at a time took 1.5 times as long
MAX_BATCH = 128
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


def auto_batch_size(encoder: "Encoder", gpu_share: float = 1.0) -> int:
    """Return the number of images in a batch.

    On the CPU it is always the same, so that everybody's bytes are. On a GPU it is what fits.
    Of a GPU that others use as well, it fills no more than its share: they may not have begun.
    """
    if encoder.device.type != "cuda":
        return CPU_BATCH
    free, total = torch.cuda.mem_get_info(encoder.device)
    room = min(free, total * gpu_share) * SHARE_OF_FREE_MEMORY
    return fitting(room, encoder.resolution, encoder.itemsize)


def fitting(nbytes: float, resolution: int, itemsize: int) -> int:
    most = min(MAX_BATCH, MOST_ELEMENTS // (FIRST_WIDTH * resolution**2))
    return max(1, min(most, int(nbytes / peak_nbytes(1, resolution, itemsize))))


def in_shape(size: int, resolution: int, pixels: int) -> int:
    """Return how many images of a shape fit where so many squares do.

    For shapes with fewer pixels it stays the same: a batch of squares keeps a GPU busy.
    """
    return max(1, min(size, size * resolution**2 // pixels))


def text_size(shape: tuple[int, ...], usual: int) -> int:
    """Return how many captions of a shape make a batch.

    Where these are of one length, it is as many as keep a GPU busy: of more, others of that length
    would seldom come together.
    """
    if not shape:
        return usual
    return min(usual, max(GROUPED_BATCH, GROUPED_TOKENS // max(1, sum(shape))))


def beside_a_trainer(size: int, resolution: int) -> int:
    return max(1, min(size, BESIDE_A_TRAINER // resolution**2))


def peak_nbytes(size: int, resolution: int, itemsize: int) -> int:
    return size * TENSORS_AT_PEAK * FIRST_WIDTH * resolution**2 * itemsize


def free_nbytes(device: torch.device) -> int:
    """Return the free memory of a GPU. For a CPU there is no bound."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else sys.maxsize


def is_of_device(error: BaseException) -> bool:
    """Check whether an error is that of a device or of memory, whatever code was running there."""
    is_said = isinstance(error, RuntimeError) and OF_DEVICES.search(str(error)) is not None
    return is_said or is_of_memory(error)


def is_out_of_memory(error: BaseException, *, free: int, wanted: int) -> bool:
    """Return whether an error is a lack of memory on the device.

    Libraries below torch say so in words of their own. Where these may mean something else, the
    `free` memory decides, beside what the batch `wanted`: if it is plenty, a smaller batch
    would fail too.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error)
    if any(words in said for words in OUT_OF_MEMORY):
        return True
    return free < wanted and any(words in said for words in PERHAPS_OUT_OF_MEMORY)
