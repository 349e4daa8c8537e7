"""The GPUs of this machine, as torch sees them.

torch takes two seconds to import, so it is not asked where there is no driver of a GPU. So `encode`
begins at once on a machine without one, and its own process never holds torch there.
"""

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NVIDIA = "libcuda.so.1"  # what the CUDA runtime in torch loads, and does without GPUs if it cannot
AMD = Path("/dev/kfd")  # what its counterpart opens
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The variables in which torch looks for settings of its allocator; all versions read the first."""


def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs that may be used, as CUDA_VISIBLE_DEVICES names them."""
    if not has_driver():
        return ()
    import torch

    if not torch.cuda.is_available():
        return ()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return tuple(named.split(",")) if named else tuple(map(str, range(torch.cuda.device_count())))


def has_bf16() -> bool:
    """Return whether the GPU of this machine computes in bf16 without slow emulation.

    Without a GPU it is true: the GPUs of a cluster are taken to be new enough.
    """
    if not has_driver():
        return True
    import torch

    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)


def has_tf32() -> bool:
    """Return whether the GPU of this machine computes convolutions in TF32.

    Without a GPU it is true: a worker whose GPU cannot do it says so.
    """
    if not has_driver():
        return True
    import torch

    return not torch.cuda.is_available() or computes_tf32("cuda")


def computes_tf32(device: "torch.device | str") -> bool:
    """Return whether a GPU computes convolutions in TF32, as NVIDIA's do from Ampere on."""
    import torch

    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def prepare_allocator() -> None:
    """Make torch map GPU memory in segments that grow, unless the user has set its allocator.

    This sets an environment variable, which torch reads later. Images at 1024 and T5 take turns on
    a card of 24 GB, and neither can use the fixed blocks that the other leaves.
    """
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


def has_driver() -> bool:
    """Return whether there is a driver through which torch could reach a GPU."""
    try:
        ctypes.CDLL(NVIDIA)
    except OSError:
        return AMD.exists()
    return True
