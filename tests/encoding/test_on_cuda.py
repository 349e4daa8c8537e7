"""The networks of every family run on the device cuda, with the types and layouts that a GPU gets.

No GPU is needed: `FakeCuda` follows devices, types, shapes and layouts by torch's FakeTensorMode
through the real `LatentEncoder`, and so finds what lies on another device, what is of another type,
and layouts that a network cannot have. Networks are loaded as on a GPU, really and on the CPU, up
to the moment when they are moved to the device: from then on their weights are fake tensors of the
device cuda. Whole numbers stay known as long as they come of whole numbers alone, so that code that
looks at them (lengths of captions by a mask) goes the way that it goes on a GPU.

Not covered is what only a GPU does: its kernels and what they compute, how much memory there is,
pinned memory and streams (`Device`), torch.compile, the comparison of numbers when a pipeline is
opened, and `empty`, which looks at numbers that were computed.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
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

from tests.kit.families import OF_EACH_VAE, QUICK, each_family
from wdsprep.dataset.npy_arrays import text_fields
from wdsprep.encoding import recipe_defaults
from wdsprep.encoding.models.base import TENSORS, Encoded, InTwoPrecisions, Part
from wdsprep.encoding.models.encoder import LatentEncoder, load_encoder
from wdsprep.encoding.models.find_model import Model, find_model
from wdsprep.encoding.models.text_encoders import PipelineText
from wdsprep.encoding.models.vae import Moments
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

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._fake = FakeTensorMode()
        self._is_inside = False
        self.free = 10**12
        """bytes"""
        self.networks: WeakSet[nn.Module] = WeakSet()
        """the networks on the GPU that something still refers to"""
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

        def really(networks: InTwoPrecisions, **options: Any) -> Any:
            with _disable_current_modes():
                return get(networks, **options)

        def fake_rows(text: PipelineText, *args: Any, **options: Any) -> Any:
            with self.mode():
                return rows(text, *args, **options)

        patch.setattr(nn.Module, "to", to)
        patch.setattr(InTwoPrecisions, "get", really)
        patch.setattr(PipelineText, "rows", fake_rows)
        patch.setattr(torch, "equal", _is_alike)
        patch.setattr(
            torch, "tensor", lambda data, **options: tensor(data, **options | _unpinned(options))
        )
        for ability in ("has_bf16", "has_tf32"):
            patch.setattr(recipe_defaults, ability, lambda: True)
        patch.setattr(torch.cuda, "mem_get_info", lambda _device: (self.free, self.free))
        patch.setattr(torch.cuda, "memory_reserved", lambda _device: 0)
        patch.setattr(torch.cuda, "empty_cache", lambda: None)

    @contextlib.contextmanager
    def mode(self) -> Iterator[None]:
        """Make fakes of all that is made in the context."""
        if self._is_inside:
            yield
            return
        self._is_inside = True
        try:
            with self._fake, KnownNumbers(self._fake):
                yield
        finally:
            self._is_inside = False

    def load(self, model: Model, recipe: Encode) -> LatentEncoder:
        recipe, model = settle_recipe(recipe, model, "cuda")
        made = load_encoder(model, recipe, str(CUDA))
        assert isinstance(made, LatentEncoder)
        return made

    def images(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Pixels and the keys of their noise, on the device."""
        with self.mode():
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


SIDE, ROWS = 64, 3
CAPTIONS = ("a big red house", 'a red "big" house', "a red big house")
HALVES = (torch.float16, torch.bfloat16)
TEXT_BATCHES = {"StableDiffusionXL": 128, "QwenImage": 32}
"""More captions share a batch where CLIP alone encodes them."""

Family = Callable[[str], Path]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def assert_stored(made: LatentEncoder, found: Encoded, rows: int) -> None:
    """All is on the GPU, of the types and shapes that are written."""
    for field in made.fields:
        if (array := found.arrays.get(field.name)) is None:
            continue
        assert (array.device, array.dtype) == (CUDA, TENSORS[field.dtype])
        assert array.is_contiguous()
        own = array.shape[2:] if field.is_variable else array.shape[1:]
        assert own == (field.shape[1:] if field.is_variable else field.shape)
        assert len(array) == rows
    assert (found.ok.device, found.ok.shape) == (CUDA, (rows,))


@pytest.mark.parametrize("name", each_family())
def test_captions_are_encoded_on_the_gpu(name: str, family: Family, gpu: FakeCuda) -> None:
    """In half precision, and for a few families once more in fp32."""
    model = find_model(str(family(name)), text="emb")
    made = gpu.load(model, Encode(resolution=SIDE, latents="none"))
    if name in TEXT_BATCHES:
        assert made.text_batch_size == TEXT_BATCHES[name]
    texts = made.tokens(CAPTIONS)
    some = [text for text in texts if text.shape == texts[0].shape]
    before: set[nn.Module] = set()
    for exact in (False, True)[: 1 + (name in QUICK)]:
        with gpu.mode():
            encoded = made.encode_texts(some, exact=exact)
            assert encoded.arrays.keys() == {field.name for field in text_fields(made.fields)}
            assert_stored(made, encoded, len(some))
        networks = {*gpu.networks} - before
        assert networks
        assert_on_the_gpu(networks, exact=exact)
        before |= networks


@pytest.mark.parametrize("name", each_family(OF_EACH_VAE, quick=("StableDiffusion", "QwenImage")))
def test_images_are_encoded_on_the_gpu(name: str, family: Family, gpu: FakeCuda) -> None:
    """Images are wider than high, and once more square and in fp32.

    The VAE that fits fp16 is loaded twice, for both; others are in fp32, with TF32 or without.
    """
    model = find_model(str(family(name)), text="none")
    made = gpu.load(model, Encode(resolution=SIDE, text="none"))
    with gpu.mode():
        pixels, noise = gpu.images((ROWS, 3, SIDE, 2 * SIDE))
        rows = made.image_rows(pixels, noise).arrays["latent.npy"]
        assert (rows.device, rows.dtype) == (CUDA, torch.float32)
        found = made.encode_images(*gpu.images((ROWS, 3, SIDE, SIDE)), exact=True)
        assert_stored(made, found, ROWS)
    dtypes = []
    for moments in gpu.networks:
        assert isinstance(moments, Moments)
        assert_is_for_a_gpu(moments)
        dtypes += {weight.dtype for weight in moments.parameters()}
        assert all(weight.device == CUDA for weight in moments.parameters())
    usual = [torch.float16] if name == "StableDiffusion" else []
    assert sorted(dtypes, key=str) == [*usual, torch.float32]


def assert_on_the_gpu(networks: set[nn.Module], *, exact: bool) -> None:
    for network in networks:
        assert all(weight.device == CUDA for weight in network.parameters())
        dtypes = {weight.dtype for weight in network.parameters()}
        assert dtypes <= ({torch.float32} if exact else {*HALVES})


def assert_is_for_a_gpu(network: Moments) -> None:
    """Convolutions have the layout that was the fastest on GPUs."""
    convolutions = [each for each in network.modules() if isinstance(each, nn.Conv2d)]
    assert convolutions
    assert all(each.weight.is_contiguous() for each in convolutions)


@pytest.mark.parametrize("latents", ["mean", "moments"])
@pytest.mark.parametrize("name", each_family(["StableDiffusion", "QwenImage", "Flux2Klein"]))
def test_other_latents_are_made_on_the_gpu(
    name: str, latents: str, family: Family, gpu: FakeCuda
) -> None:
    model = find_model(str(family(name)), text="none")
    made = gpu.load(model, Encode(resolution=SIDE, text="none", latents=latents))
    with gpu.mode():
        assert_stored(made, made.encode_images(*gpu.images((ROWS, 3, SIDE, SIDE))), ROWS)


@pytest.mark.parametrize(
    "name", ["StableDiffusion", pytest.param("QwenImage", marks=pytest.mark.system)]
)
def test_a_gpu_that_is_split_holds_what_it_works_with_alone(
    name: str, family: Family, gpu: FakeCuda
) -> None:
    model = find_model(str(family(name)), text="emb")
    gpu.free = 300_000_000
    made = gpu.load(model, Encode(resolution=256))
    assert made.is_split
    for part in (Part.TEXT, Part.IMAGE, Part.TEXT):
        made.bring(part)
        with gpu.mode():
            if part is Part.TEXT:
                assert_stored(made, made.encode_texts(made.tokens(["a cat"])), 1)
            else:
                assert_stored(made, made.encode_images(*gpu.images((1, 3, 256, 256))), 1)
        gc.collect()
        is_there = any(isinstance(each, Moments) for each in gpu.networks)
        assert is_there == (part is Part.IMAGE)
