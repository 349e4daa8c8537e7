"""The GPUs of this machine, as torch sees them, and as the driver of NVIDIA does.

torch takes two seconds to import, so it is not asked where there is no driver of a GPU. So `encode`
begins at once on a machine without one, and its own process never holds torch there.

Where the driver has a GPU that torch cannot use, nobody wants the CPU in its place: it would take a
hundred times as long, in a precision that the dataset then keeps.
"""

import ctypes
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

from wdsprep.errors import UsageError, WorkError

NVIDIA = "libcuda.so.1"  # what the CUDA runtime in torch loads, and does without GPUs if it cannot
NVIDIA_DEVICES = "/dev/nvidia[0-9]*"  # a container has those of the GPUs that it was given
NOT_READY = (802, 803, 804)
"""What CUDA says of GPUs whose fabric manager is down, or whose driver does not fit its library."""
HIDDEN = ("", "-1", "none", "void", "nodevfiles")
"""The values of CUDA_VISIBLE_DEVICES that hide all GPUs."""
AMD = Path("/dev/kfd")  # what its counterpart opens
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The variables in which torch looks for settings of its allocator; all versions read the first."""


def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs that may be used, as CUDA_VISIBLE_DEVICES names them.

    Raise UsageError if NVIDIA's driver has GPUs that torch cannot use.
    """
    if not has_driver():
        return ()
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not _torch_has_gpu():
        count = ctypes.c_int()
        try:
            library = ctypes.CDLL(NVIDIA)
            code = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
        except (OSError, AttributeError):
            code = 0
        is_there = count.value or code in NOT_READY or _nvidia_files()  # usable or not
        if is_there and (named is None or named.strip().lower() not in HIDDEN):
            raise UsageError(_explain_unusable())
        return ()
    return tuple(named.split(",")) if named else tuple(map(str, range(torch.cuda.device_count())))


def require_gpu(device: str) -> None:
    """Raise WorkError if this worker is to use a GPU, and torch cannot.

    This may hold for its machine alone.
    """
    if device.startswith("cuda") and not _torch_has_gpu():
        raise WorkError(_explain_unusable())


def _torch_has_gpu() -> bool:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reason is told in one line
        return torch.cuda.is_available()


def _nvidia_files() -> list[Path]:
    return list(Path("/").glob(NVIDIA_DEVICES.lstrip("/")))


def _explain_unusable() -> str:
    """Return the line that says why torch cannot use a GPU, in its own words, and the ways on."""
    import torch

    reason = "it finds none"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        text = " ".join(str(error).split())
        reason = text[text.find("Error ") :] if "Error " in text else text.partition(". ")[0]
    return (
        f"torch {torch.__version__} cannot use the GPU of this machine: {reason.rstrip('.')}: "
        "install a build of torch that fits its driver (https://pytorch.org/get-started/locally/), "
        "or take the CPU, with --device cpu"
    )


def has_bf16() -> bool:
    """Return whether the GPU of this machine computes in bf16 without slow emulation.

    Without a GPU it is true: a worker whose GPU cannot do it says so.
    """
    return not (has_driver() and _torch_has_gpu()) or computes_bf16()


def has_tf32() -> bool:
    """Return whether the GPU of this machine computes convolutions in TF32.

    Without a GPU it is true: a worker whose GPU cannot do it says so.
    """
    return not (has_driver() and _torch_has_gpu()) or computes_tf32("cuda")


def computes_bf16() -> bool:
    """Return whether the GPU of this process computes in bf16 without emulation."""
    import torch

    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


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
        return AMD.exists() or bool(_nvidia_files())
    return True
