"""The networks of every family run on the device cuda, with the types and layouts that a GPU gets.

No GPU is needed: `tests.kit.fake_cuda` follows devices, types, shapes and layouts through the real
`LatentEncoder`, and so finds what lies on another device, what is of another type, and layouts that
a network cannot have. Not covered is what only a GPU does: its kernels and what they compute, how
much memory there is, pinned memory and streams (`Device`), torch.compile, the comparison of numbers
when a pipeline is opened, and `empty`, which looks at numbers that were computed.
"""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.kit.fake_cuda import CUDA, FakeCuda
from tests.kit.families import OF_EACH_VAE, QUICK, each_family
from wdsprep.dataset.npy_arrays import text_fields
from wdsprep.encoding.models.base import TENSORS, Encoded, Part
from wdsprep.encoding.models.encoder import LatentEncoder
from wdsprep.encoding.models.find_model import find_model
from wdsprep.encoding.models.vae import Moments
from wdsprep.encoding.recipe_options import Encode

SIDE, ROWS = 64, 3
CAPTIONS = ("a big red house", 'a red "big" house', "a red big house")
HALVES = (torch.float16, torch.bfloat16)
TEXT_BATCHES = {"StableDiffusionXL": 128, "QwenImage": 32}
"""More captions share a batch where CLIP alone encodes them."""

Family = Callable[[str], Path]


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
def test_captions_are_encoded_on_the_gpu(name: str, family: Family) -> None:
    """In half precision, and for a few families once more in fp32."""
    model = find_model(str(family(name)), text="emb")
    with FakeCuda() as gpu:
        made = gpu.load(model, Encode(resolution=SIDE, latents="none"))
        if name in TEXT_BATCHES:
            assert made.text_batch_size == TEXT_BATCHES[name]
        texts = made.tokens(CAPTIONS)
        some = [text for text in texts if text.shape == texts[0].shape]
        before: set[nn.Module] = set()
        for exact in (False, True)[: 1 + (name in QUICK)]:
            with gpu.mode:
                encoded = made.encode_texts(some, exact=exact)
                assert encoded.arrays.keys() == {field.name for field in text_fields(made.fields)}
                assert_stored(made, encoded, len(some))
            networks = {*gpu.networks} - before
            assert networks
            assert_on_the_gpu(networks, exact=exact)
            before |= networks


@pytest.mark.parametrize("name", each_family(OF_EACH_VAE, quick=("StableDiffusion", "QwenImage")))
def test_images_are_encoded_on_the_gpu(name: str, family: Family) -> None:
    """Images are wider than high, and once more square and in fp32.

    The VAE that fits fp16 is loaded twice, for both; others are in fp32, with TF32 or without.
    """
    model = find_model(str(family(name)), text="none")
    with FakeCuda() as gpu:
        made = gpu.load(model, Encode(resolution=SIDE, text="none"))
        with gpu.mode:
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
def test_other_latents_are_made_on_the_gpu(name: str, latents: str, family: Family) -> None:
    model = find_model(str(family(name)), text="none")
    with FakeCuda() as gpu:
        made = gpu.load(model, Encode(resolution=SIDE, text="none", latents=latents))
        with gpu.mode:
            assert_stored(made, made.encode_images(*gpu.images((ROWS, 3, SIDE, SIDE))), ROWS)


@pytest.mark.parametrize(
    "name", ["StableDiffusion", pytest.param("QwenImage", marks=pytest.mark.system)]
)
def test_a_gpu_that_is_split_holds_what_it_works_with_alone(name: str, family: Family) -> None:
    model = find_model(str(family(name)), text="emb")
    with FakeCuda() as gpu:
        gpu.free = 300_000_000
        made = gpu.load(model, Encode(resolution=256))
        assert made.is_split
        for part in (Part.TEXT, Part.IMAGE, Part.TEXT):
            made.bring(part)
            with gpu.mode:
                if part is Part.TEXT:
                    assert_stored(made, made.encode_texts(made.tokens(["a cat"])), 1)
                else:
                    assert_stored(made, made.encode_images(*gpu.images((1, 3, 256, 256))), 1)
            gc.collect()
            is_there = any(isinstance(each, Moments) for each in gpu.networks)
            assert is_there == (part is Part.IMAGE)


class _Wrong(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.other = torch.ones(4, 1, 1)
        self.how = how

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        if self.how == "type":
            return self.conv(pixels.half())  # type: ignore[no-any-return]
        return self.conv(pixels) + self.other.to(pixels.dtype)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["device", "type"])
def test_a_wrong_device_or_type_is_found_without_a_gpu(how: str) -> None:
    with FakeCuda() as gpu:
        network = _Wrong(how).to(CUDA)
        pixels, _ = gpu.images((1, 3, 8, 8))
        with gpu.mode, pytest.raises((RuntimeError, AssertionError)):
            network(pixels.float())
