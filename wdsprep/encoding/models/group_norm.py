"""Group norms, each with the SiLU after it, and the choice of what computes them on a GPU.

For a group norm on CUDA, torch copies channels_last to contiguous, and the convolution after it
copies that back; SiLU reads and writes everything once more. That is nine passes over a tensor, and
five from torch 2.15 on, which keeps the layout. `group_norm_kernel` needs three. A worker tries it
when it loads its VAE onto a GPU, with tensors of the VAE's shapes, and takes it if it gives the
same and is clearly faster. No GPU has measured this yet.

On a CPU all stays as it is, and so does what is compiled: torch.compile joins the two by itself.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from wdsprep.encoding.models.batch_size import MAX_BATCH, free_nbytes
from wdsprep.encoding.models.load_networks import cause_of

LEAST_GAIN = 1.2
"""How many times as fast as torch a kernel has to be."""
TRIED = 1 << 27
"""The most values of a tensor that is tried: more than a GPU's caches hold."""
TRIED_SHARE = 16
"""The tensors of that size for which there has to be room."""
CHECKED = 1 << 24
"""The most values of which the result is compared."""
ROUNDS, REPEATS = 3, 4
"""How often a computation is timed, and how many make one time."""
TOLERANCE = 1e-5
"""The largest difference beside the rounding of a dtype, relative to the largest value."""
BY_TORCH = "group norms are computed by torch"
NetworkT = TypeVar("NetworkT", bound=nn.Module)
_log = logging.getLogger("wdsprep")


class KernelError(Exception):
    """The failure of a kernel on this machine."""


class Kernel(Protocol):
    """A function that computes a group norm, and SiLU after it if `silu`."""

    def __call__(
        self,
        images: Tensor,
        weight: Tensor,
        bias: Tensor,
        groups: int,
        epsilon: float,
        *,
        silu: bool,
    ) -> Tensor: ...


class JoinedNorm(nn.Module):
    """A group norm and the SiLU after it, if there is one, computed by torch or by a kernel."""

    def __init__(self, norm: nn.GroupNorm, shape: Sequence[int], side: int, *, silu: bool) -> None:
        """Keep the norm, and the shape (B, C, ...) of its input for images of this `side`."""
        super().__init__()
        self.norm, self.silu = norm, silu
        self._shape, self._side = tuple(shape), side
        self.kernel: Kernel | None = None

    def forward(self, images: Tensor) -> Tensor:
        return self.compute(images, self.kernel or compute_by_torch)

    def compute(self, images: Tensor, kernel: Kernel) -> Tensor:
        norm = self.norm
        return kernel(images, norm.weight, norm.bias, norm.num_groups, norm.eps, silu=self.silu)

    @property
    def values(self) -> int:
        """Return the number of values of the input whose shape was kept."""
        return prod(self._shape)

    @property
    def kind(self) -> tuple[object, ...]:
        """Return the facts that decide how long the norm takes."""
        return (*self._shape, self.norm.num_groups, self.silu)

    def draw_input(self, side: int) -> Tensor:
        """Return random numbers in channels_last, of the shape of its input for images of a side.

        The batch is as large as there is room for. The trainer's generator is not used.
        """
        weight = self.norm.weight
        _, channels, *sides = self._shape
        height, width = (
            (max(1, each * side // self._side) for each in sides)
            if len(sides) == 2
            else (max(1, sides[0] * side**2 // self._side**2), 1)  # positions, in attention
        )
        most = min(TRIED, free_nbytes(weight.device) // (TRIED_SHARE * weight.itemsize))
        height = max(1, min(height, most // (channels * width)))
        count = max(1, min(MAX_BATCH, most // (channels * width * height)))
        drawn = torch.randn(
            (count, height, width, channels),
            dtype=weight.dtype,
            device=weight.device,
            generator=torch.Generator(weight.device).manual_seed(0),
        )
        return drawn.add_(1).movedim(-1, 1)


def compute_by_torch(
    images: Tensor, weight: Tensor, bias: Tensor, groups: int, epsilon: float, *, silu: bool
) -> Tensor:
    made = functional.group_norm(images, groups, weight, bias, epsilon)
    return functional.silu(made) if silu else made


def join_norms(network: nn.Module, image: Tensor) -> None:
    """Join each group norm of a network with the SiLU after it, in place.

    What follows a norm is seen while an image is computed: no class of a block is known here by its
    name. If the result then differs in any bit, all is put back.
    """
    with _Followed(network) as followed:
        before = network(image)
    joined = followed.joined(image.shape[-1])
    _replace(network, joined)
    if not torch.equal(network(image).nan_to_num(), before.nan_to_num()):
        _replace(network, {new: old for old, new in joined.items()})


class _Followed:
    """The group norms and SiLUs of a network, and what each is given while the network computes."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._hooks: list[RemovableHandle] = []
        self._outputs: list[tuple[nn.GroupNorm, Tensor]] = []
        self._shapes: dict[nn.GroupNorm, Sequence[int]] = {}
        self._sources: dict[nn.SiLU, list[nn.GroupNorm | None]] = {}

    def __enter__(self) -> "_Followed":
        for module in self._network.modules():
            if isinstance(module, nn.GroupNorm) and module.affine:
                self._hooks.append(module.register_forward_hook(self._note_norm))
            elif isinstance(module, nn.SiLU):
                self._hooks.append(module.register_forward_pre_hook(self._note_silu))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note_norm(self, norm: nn.GroupNorm, given: tuple[Tensor, ...], made: Tensor) -> None:
        self._outputs.append((norm, made))
        self._shapes[norm] = given[0].shape

    def _note_silu(self, silu: nn.SiLU, given: tuple[Tensor, ...]) -> None:
        source = next((norm for norm, made in self._outputs if made is given[0]), None)
        self._sources.setdefault(silu, []).append(source)

    def joined(self, side: int) -> dict[nn.Module, nn.Module]:
        """Return what replaces each norm, and each SiLU that follows norms and nothing else."""
        after = {silu: norms for silu, norms in self._sources.items() if None not in norms}
        activated = {norm for norms in after.values() for norm in norms}
        return {
            **{
                norm: JoinedNorm(norm, shape, side, silu=norm in activated)
                for norm, shape in self._shapes.items()
            },
            **{silu: nn.Identity() for silu in after},
        }


def _replace(network: nn.Module, instead: Mapping[nn.Module, nn.Module]) -> None:
    for name, module in list(network.named_modules(remove_duplicate=False)):
        if module in instead:
            parent, _, own = name.rpartition(".")
            setattr(network.get_submodule(parent), own, instead[module])


class NormChoice:
    """The choice of what computes the group norms of a worker's VAE, made for its first network."""

    def __init__(self, resolution: int) -> None:
        self._resolution = resolution
        self._is_made = False
        self._kernel: Kernel | None = None

    @property
    def is_fused(self) -> bool:
        """Return whether a kernel of wdsprep was chosen, and not torch."""
        return self._kernel is not None

    def __call__(self, network: NetworkT) -> NetworkT:
        """Let the chosen kernel, or torch, compute the norms of a network; return the network.

        The choice is made for the first network that has norms.
        """
        norms = [module for module in network.modules() if isinstance(module, JoinedNorm)]
        if norms and not self._is_made:
            self._kernel, self._is_made = find_kernel(norms, self._resolution), True
        for norm in norms:
            norm.kernel = self._kernel
        return network


def find_kernel(norms: Sequence[JoinedNorm], side: int) -> Kernel | None:
    """Return the kernel if it is right and clearly faster than torch here, or None for torch.

    It is tried with the norms of a network, for images of this side. The reason is logged.
    """
    try:
        kernel = load_kernel()
        gain = measure_gain(norms, kernel, side)
    except ModuleNotFoundError as error:
        _log.info("%s, as %s is not installed", BY_TORCH, error.name)
        return None
    except KernelError as error:
        _log.warning("%s, as the kernel of wdsprep fails here: %s", BY_TORCH, error)
        return None
    if gain < LEAST_GAIN:
        _log.info("%s: the kernel of wdsprep is %.2f times as fast here", BY_TORCH, gain)
        return None
    _log.info("group norms are computed by a kernel, %.2f times as fast as torch here", gain)
    return kernel


def load_kernel() -> Kernel:
    """Return the kernel, or raise ModuleNotFoundError where Triton is not installed.

    Raise KernelError if the import fails otherwise.
    """
    try:
        from wdsprep.encoding.models.group_norm_kernel import group_norm
    except ModuleNotFoundError:
        raise
    except Exception as error:
        raise KernelError(cause_of(error)) from error
    return group_norm


def measure_gain(norms: Sequence[JoinedNorm], kernel: Kernel, side: int) -> float:
    """Return how many times as fast as torch a kernel computes all norms of a network.

    Raise KernelError if it fails, in whatever way its compiler does, or gives another result.
    """
    kinds: dict[tuple[object, ...], list[JoinedNorm]] = {}
    for norm in norms:
        kinds.setdefault(norm.kind, []).append(norm)
    theirs = ours = 0.0
    try:
        with torch.inference_mode():
            for same in kinds.values():
                norm, images = same[0], same[0].draw_input(side)
                _check(norm, kernel, images[: max(1, CHECKED // images[0].numel())])
                share = len(same) * norm.values / images.numel()
                theirs += share * seconds_of(partial(_compute_as_torch, norm, images))
                ours += share * seconds_of(partial(norm.compute, images, kernel))
    except KernelError:
        raise
    except Exception as error:
        raise KernelError(cause_of(error)) from error
    finally:
        torch.cuda.empty_cache()  # the size of batches goes by what is free
    return theirs / ours


def _compute_as_torch(norm: JoinedNorm, images: Tensor) -> Tensor:
    """Compute a norm by torch, in the layout that the next convolution takes."""
    made = norm.compute(images, compute_by_torch)
    return made.contiguous(memory_format=torch.channels_last)


def _check(norm: JoinedNorm, kernel: Kernel, images: Tensor) -> None:
    """Raise KernelError if a kernel's result is not that of torch in fp32, but for rounding."""
    found, own = norm.compute(images, kernel), norm.norm
    if found.dtype != images.dtype:
        raise KernelError(f"it returns {found.dtype} for {images.dtype}")
    weights = own.weight.float(), own.bias.float()
    wanted = compute_by_torch(images.float(), *weights, own.num_groups, own.eps, silu=norm.silu)
    apart = (found.float() - wanted).abs()
    most = torch.finfo(images.dtype).eps * wanted.abs() + TOLERANCE * wanted.abs().max()
    if not bool((apart <= most).all()):
        raise KernelError(
            f"with {images.shape[1]} channels in {own.num_groups} groups, its result is up to "
            f"{float(apart.max()):.1e} away from that of torch"
        )


def seconds_of(call: Callable[[], Tensor]) -> float:
    """Return the seconds that a GPU takes for a call, once its kernels have been compiled."""
    call()
    taken = []
    for _ in range(ROUNDS):
        began, ended = _make_event(), _make_event()
        began.record()
        for _ in range(REPEATS):
            call()
        ended.record()
        ended.synchronize()
        taken.append(float(began.elapsed_time(ended)) / 1000 / REPEATS)
    return min(taken)


def _make_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
