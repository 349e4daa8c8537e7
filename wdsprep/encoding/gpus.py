"""The GPUs of this machine. torch knows them, but takes two seconds to import: where no driver of a
GPU is, it is not asked. So `encode` begins at once on a machine without one, and its own process
never holds torch there.
"""

import ctypes
import os
from pathlib import Path

NVIDIA = "libcuda.so.1"  # what the CUDA runtime in torch loads, and does without GPUs if it cannot
AMD = Path("/dev/kfd")  # what its counterpart opens


def visible_gpus() -> tuple[str, ...]:
    """Those that may be used, as CUDA_VISIBLE_DEVICES names them."""
    if not has_driver():
        return ()
    import torch

    if not torch.cuda.is_available():
        return ()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return tuple(named.split(",")) if named else tuple(map(str, range(torch.cuda.device_count())))


def has_bf16() -> bool:
    """Whether the GPU here computes in bf16, rather than emulating it slowly. Where there is none,
    those of a cluster are taken for new enough."""
    if not has_driver():
        return True
    import torch

    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)


def has_driver() -> bool:
    """Whether there is anything through which torch could reach a GPU."""
    try:
        ctypes.CDLL(NVIDIA)
    except OSError:
        return AMD.exists()
    return True
