"""A GPU that computes nothing: torch's FakeTensorMode follows devices, types, shapes and layouts.

    with FakeCuda() as gpu:
        made = gpu.load(model, recipe)
        with gpu.mode:
            made.encode_images(*gpu.images((2, 3, 64, 64)))

Networks are loaded as on a GPU, really and on the CPU, up to the moment when they are moved to the
device: from then on their weights are fake tensors of the device cuda. Whole numbers stay known as
long as they come of whole numbers alone, so that code that looks at them (lengths of captions by a
mask) goes the way that it goes on a GPU.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from wdsprep.encoding import recipe_defaults
from wdsprep.encoding.models.base import InTwoPrecisions
from wdsprep.encoding.models.encoder import LatentEncoder, load_encoder
from wdsprep.encoding.models.find_model import Model
from wdsprep.encoding.models.text_encoders import PipelineText
from wdsprep.encoding.recipe_defaults import settle_recipe
from wdsprep.encoding.recipe_options import Encode

CUDA = torch.device("cuda", 0)
MANY = 1 << 20  # numbers of a tensor that are worth being known


class KnownNumbers(TorchDispatchMode):
    """Whole numbers of fake tensors, computed beside them on the CPU."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], [place for index in args[1] for place in self._places(index)])
        is_known = all(
            _known(each) is not None
            for each in tree_leaves((args, kwargs))
            if isinstance(each, Tensor)
        )
        real = self._really(func, args, kwargs) if is_known else None
        if is_known and not any(isinstance(each, Tensor) for each in tree_leaves(real)):
            return real
        try:
            made = func(*args, **kwargs)
        except DynamicOutputShapeException:
            made = self._faked(real)
        fakes = [each for each in tree_leaves(made) if isinstance(each, FakeTensor)]
        reals = tree_leaves(real) if is_known else [None] * len(fakes)
        for fake, own in zip(fakes, reals, strict=True):
            fake.constant = None  # torch's own way to know a number would ask the GPU
            fake.known = own if own is not None and _is_worth_it(own) else None
        return made

    def _places(self, index: Tensor | None) -> list[Tensor | None]:
        """Where a mask holds, since how many places these are depends on it."""
        if index is None or index.dtype != torch.bool or (real := _known(index)) is None:
            return [index]
        with unset_fake_temporarily():
            places = real.nonzero().unbind(1)
        return [self._faked(one) for one in places]

    def _faked(self, real: Any) -> Any:
        made: Any = self._fake.from_tensor(real)
        with self._fake:
            made = made.to(CUDA)
        made.known = real
        return made

    def _really(self, func: Any, args: Any, kwargs: Any) -> Any:
        def own(each: Any) -> Any:
            if isinstance(each, torch.device):
                return torch.device("cpu")
            return _known(each) if isinstance(each, Tensor) else each

        with unset_fake_temporarily():
            return func(*tree_map(own, args), **{**tree_map(own, kwargs), **_unpinned(kwargs)})


def _is_worth_it(real: Tensor) -> bool:
    return real.numel() == 1 or (not real.is_floating_point() and real.numel() <= MANY)


def _unpinned(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: False for name in ("pin_memory", "non_blocking") if name in kwargs}


def _known(tensor: Any) -> Tensor | None:
    if not isinstance(tensor, FakeTensor):
        return tensor if isinstance(tensor, Tensor) else None
    return getattr(tensor, "known", None)


class FakeCuda:
    """Stands for torch.cuda and for what is moved there."""

    def __init__(self) -> None:
        self._fake = FakeTensorMode()
        self._patch = pytest.MonkeyPatch()
        self._is_inside = False
        self.free = 10**12
        """bytes"""
        self.networks: WeakSet[nn.Module] = WeakSet()
        """the networks on the GPU that something still refers to"""

    @property
    def mode(self) -> contextlib.AbstractContextManager[Any]:
        """In which all that is made is fake."""
        return self._in_mode()

    @contextlib.contextmanager
    def _in_mode(self) -> Iterator[None]:
        if self._is_inside:
            yield
            return
        self._is_inside = True
        try:
            with self._fake, KnownNumbers(self._fake):
                yield
        finally:
            self._is_inside = False

    def __enter__(self) -> "FakeCuda":
        move, get, rows = nn.Module.to, InTwoPrecisions.get, PipelineText.rows
        tensor = torch.tensor
        with torch.device("meta"):
            torch.empty(0)  # torch keeps which functions make tensors: not the one put there below

        def to(module: nn.Module, *args: Any, **options: Any) -> nn.Module:
            device, *_ = torch._C._nn._parse_to(*args, **options)
            if device is None or device.type != "cuda":
                return move(module, *args, **options)
            self._move(module)
            return module

        def really(networks: InTwoPrecisions[Any], **options: Any) -> Any:
            with _disable_current_modes():
                return get(networks, **options)

        def fake_rows(text: PipelineText, *args: Any, **options: Any) -> Any:
            with self.mode:
                return rows(text, *args, **options)

        self._patch.setattr(nn.Module, "to", to)
        self._patch.setattr(InTwoPrecisions, "get", really)
        self._patch.setattr(PipelineText, "rows", fake_rows)
        self._patch.setattr(torch, "equal", _is_alike)
        self._patch.setattr(
            torch, "tensor", lambda data, **options: tensor(data, **options | _unpinned(options))
        )
        for ability in ("has_bf16", "has_tf32"):
            self._patch.setattr(recipe_defaults, ability, lambda: True)
        self._patch.setattr(torch.cuda, "mem_get_info", lambda _device: (self.free, self.free))
        self._patch.setattr(torch.cuda, "memory_reserved", lambda _device: 0)
        self._patch.setattr(torch.cuda, "empty_cache", lambda: None)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def load(self, model: Model, recipe: Encode) -> LatentEncoder:
        recipe, model = settle_recipe(recipe, model, "cuda")
        made = load_encoder(model, recipe, str(CUDA))
        assert isinstance(made, LatentEncoder)
        return made

    def images(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Pixels and the keys of their noise, on the device."""
        with self.mode:
            pixels = torch.empty(shape, dtype=torch.uint8, device=CUDA)
            return pixels, torch.empty(shape[0], dtype=torch.int64, device=CUDA)

    def _move(self, network: nn.Module) -> None:
        self.networks.add(network)
        for module in network.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = nn.Parameter(self._moved(weight), False)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self._moved(buffer)

    def _moved(self, tensor: Tensor) -> Tensor:
        own = tensor.detach()
        with self._fake:
            return self._fake.from_tensor(own).to(CUDA)


def _is_alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
