"""What is changed in a network for speed changes no number: one frame, divisions, compilers."""

import copy
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kit.encoders import SIDE, load_latent_encoder
from tests.kit.families import OF_EACH_VAE, each_family
from tests.kit.families.weights import randomised
from wdsprep.encoding.models import load_networks
from wdsprep.encoding.models.find_model import find_model
from wdsprep.encoding.models.load_networks import check_compiler, compile_network, load_vae
from wdsprep.encoding.models.vae import FrameConv, Moments, flatten_frames, leave_out_divisions
from wdsprep.errors import WorkError

SMALL: dict[str, Any] = {"base_dim": 8, "z_dim": 4, "num_res_blocks": 1}
VAES = {
    "qwen": (AutoencoderKLQwenImage, {}),
    "qwen with attention": (AutoencoderKLQwenImage, {"attn_scales": [0.5]}),
    "wan": (AutoencoderKLWan, {}),
    "wan 2.2": (AutoencoderKLWan, {"is_residual": True, "decoder_base_dim": 8}),
}

ROUNDING = 1e-5
"""Of fp32 through a whole encoder: processors add up in orders of their own, and 1e-6 is common."""


def vae_of(name: str) -> Any:
    kind, more = VAES[name]
    with torch.random.fork_rng(devices=[]):
        return randomised(kind(**SMALL, **more), name)


def pixels_of(height: int = 64, width: int = 48) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (2, 3, height, width), dtype=torch.uint8, generator=generator)


def as_video(vae: Any, pixels: Tensor) -> Tensor:
    video = (2 * (pixels.float() / 255) - 1).unsqueeze(2)
    made: Tensor = vae.quant_conv(vae.encoder(video))  # without frames before it
    return made.squeeze(2)


@pytest.mark.parametrize("name", VAES)
def test_moments_of_an_image_are_those_of_a_video_of_it(name: str) -> None:
    vae, pixels = vae_of(name), pixels_of()
    wanted = as_video(vae, pixels)
    moments = Moments(vae)
    found = moments(pixels)
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= ROUNDING * wanted.abs().max()
    assert not any(isinstance(module, nn.Conv3d) for module in moments.modules())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_near_as_it_was(dtype: torch.dtype) -> None:
    vae, pixels = vae_of("qwen"), pixels_of()
    wanted = as_video(vae, pixels)
    half = copy.deepcopy(vae).to(dtype)
    before = half.encode((2 * (pixels.float() / 255) - 1).to(dtype).unsqueeze(2))
    error = (before.latent_dist.parameters.squeeze(2).float() - wanted).abs().max()
    moments = Moments(half)
    assert (moments(pixels) - wanted).abs().max() <= 2 * error


class Looking(nn.Conv3d):
    """A convolution that repeats the first frame before it, as some video models have it."""

    def forward(self, video: Tensor) -> Tensor:
        return super().forward(torch.cat([video[:, :, :1]] * 2 + [video], 2))


@pytest.mark.parametrize(
    "other",
    [
        Looking(3, 8, 3, padding=(0, 1, 1)),
        nn.Conv3d(3, 8, 3, padding=1),  # with zeros behind the frame too
        nn.Conv3d(3, 8, 3, padding=1, padding_mode="replicate"),
        nn.Conv3d(3, 8, (2, 3, 3), padding=1),  # makes two moments of one
    ],
)
def test_what_is_no_causal_convolution_stays_as_it_is_and_says_so(
    other: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    vae = SimpleNamespace(encoder=nn.Sequential(other), dtype=torch.float32)
    with caplog.at_level(logging.WARNING, "wdsprep"):
        moments = Moments(vae).requires_grad_(False)
    assert "encoder.0 needs more than one frame" in caplog.text
    assert moments.encoder[0] is other


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv3d(4, 6, (1, 3, 3), padding=(0, 1, 1)),
        nn.Conv3d(4, 6, (1, 3, 2), stride=(1, 2, 1), padding=(0, 1, 0), bias=False),
        nn.Conv3d(4, 8, (1, 3, 3), dilation=(1, 2, 2), padding=(0, 2, 2), groups=2),
        nn.Conv3d(4, 6, 1),
    ],
)
def test_every_kind_of_convolution_of_one_moment_is_one_of_images(conv: nn.Conv3d) -> None:
    network = nn.Sequential(conv).requires_grad_(False)
    video = torch.randn(2, 4, 1, 9, 11, generator=torch.Generator().manual_seed(1))
    wanted = network(video)
    assert flatten_frames(network) == []
    assert isinstance(network[0], FrameConv)
    torch.testing.assert_close(network(video), wanted, rtol=0, atol=ROUNDING)


class Divisions(TorchDispatchMode):
    """Counts the divisions of images by one."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.div.Tensor and isinstance(args[1], int | float):
            self.count += args[1] == 1
        return func(*args, **(kwargs or {}))


def count_divisions(network: Callable[[Tensor], Tensor], pixels: Tensor) -> int:
    with Divisions() as divisions:
        network(pixels)
    return divisions.count


def pixels(rows: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(0, 256, (rows, 3, SIDE, 2 * SIDE), generator=generator).to(torch.uint8)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", each_family(OF_EACH_VAE, quick=("StableDiffusion", "QwenImage")))
def test_latents_of_every_vae_are_the_same_to_the_bit_without_divisions(
    name: str, dtype: str, family: Callable[[str], Path]
) -> None:
    model = find_model(str(family(name)), text="none")
    network = load_latent_encoder(family(name), dtype=dtype, text="none")._moments.get()
    with torch.inference_mode():
        vae = load_vae(model, network.dtype)
        plain = Moments(vae).eval()
        assert torch.equal(network(pixels()), plain(pixels()))
        assert count_divisions(network, pixels()) == 0
        is_kl = model.vae_kind in ("AutoencoderKL", "AutoencoderKLFlux2")
        assert bool(count_divisions(plain, pixels())) == is_kl


@pytest.mark.parametrize(
    "block",
    [
        ResnetBlock2D(in_channels=8, groups=4, temb_channels=None, output_scale_factor=2.0),
        ResnetBlock2D(in_channels=8, groups=4, temb_channels=16, up=True, dropout=0.5),
        ResnetBlock2D(
            in_channels=8, groups=4, temb_channels=16, time_embedding_norm="scale_shift", down=True
        ),
        Attention(8, heads=2, dim_head=4, norm_num_groups=4, rescale_output_factor=1.4142),
    ],
)
def test_other_divisors_and_other_blocks_are_left_as_they_are(block: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    images = torch.randn((2, 8, 6, 6), generator=generator)
    others = [torch.randn((2, 16), generator=generator)] if hasattr(block, "norm2") else []
    if getattr(block, "time_emb_proj", 0) is None:
        others = [None]
    other = copy.deepcopy(block)
    leave_out_divisions(other)
    with torch.inference_mode():
        assert torch.equal(other.eval()(images, *others), block.eval()(images, *others))


def test_a_network_that_is_compiled_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile could not read what stands for them."""
    monkeypatch.setattr(torch, "compile", lambda network, **_: network)
    made = load_latent_encoder("tiny", compile=True, text="none")
    assert count_divisions(made._moments.get(), pixels(1)) > 0


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that torch.compile makes, which are run as they are."""
    made: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Callable[..., Any]:
        made.append(graph)
        return graph.forward  # type: ignore[no-any-return]

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    return made


class Doubling(nn.Module):
    def forward(self, batch: Tensor) -> Tensor:
        return 2 * batch


@pytest.mark.system
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_shape_is_compiled_in_batches_of_several_sizes(
    graphs: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    network = compile_network(Doubling())
    shapes = [(size, side) for side in range(2, 8) for size in (8, 4)]
    with caplog.at_level(logging.WARNING), torch.inference_mode():
        for _ in range(2):
            for shape in shapes:
                batch = torch.ones(shape)
                assert torch.equal(network(batch), 2 * batch)
    assert len(graphs) == len(shapes)
    assert not caplog.records


@pytest.mark.system
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_further_shapes_are_computed_all_the_same_and_that_is_said_once(
    graphs: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_networks, "MOST_VARIANTS", 12)
    network = compile_network(Doubling())
    with caplog.at_level(logging.WARNING, "wdsprep"), torch.inference_mode():
        for side in 2 * [*range(2, 20)]:
            batch = torch.ones(1, side)
            assert torch.equal(network(batch), 2 * batch)
    assert len(graphs) == 12
    (told,) = [each.getMessage() for each in caplog.records if each.name == "wdsprep"]
    assert told.startswith("--compile: 12 variants are compiled, so batches of further shapes")


@pytest.mark.system
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_computed_again_in_fp32_is_not_compiled(graphs: list[Any]) -> None:
    made = load_latent_encoder("tiny", compile=True, dtype="bf16")
    graphs.clear()  # that of the compiler's trial
    pixels, noise = torch.zeros((2, 3, 64, 64), dtype=torch.uint8), torch.zeros(2).long()
    texts = made.tokens(["a cat", "a dog"])
    made.encode_images(pixels, noise, exact=True)
    made.encode_texts(texts, exact=True)
    assert not graphs
    made.encode_images(pixels, noise)
    made.encode_texts(texts)
    assert len(graphs) >= 2


@pytest.mark.system
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_where_there_is_no_compiler_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(_graph: Any, _inputs: Any) -> Callable[..., Any]:
        raise RuntimeError("Failed to find C compiler.\nPlease specify one via CC")

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    with pytest.raises(WorkError) as refused:
        check_compiler(torch.device("cpu"))
    (line,) = str(refused.value).splitlines()
    assert line.startswith("--compile does not work here (")
    assert "Failed to find C compiler." in line
    assert line.endswith("install a C++ compiler, and Triton for a GPU, or leave --compile out")


@pytest.mark.system
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler imports
def test_what_the_compiler_makes_of_a_network_agrees() -> None:
    """Of one convolution: every kernel is compiled by itself, which takes seconds."""
    torch.compiler.reset()
    network, batch = nn.Conv2d(3, 4, 3), torch.rand(2, 3, 8, 8)
    with torch.inference_mode():
        torch.testing.assert_close(compile_network(network)(batch), network(batch))
