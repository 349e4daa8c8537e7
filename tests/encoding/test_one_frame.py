"""An image is encoded by a VAE for videos as if it were a video, with less work."""

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tests.kit.families.weights import randomised
from wdsprep.encoding.models.vae import Moments
from wdsprep.encoding.models.vae_shortcuts import FrameConv, flatten_frames

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


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", VAES)
def test_moments_of_an_image_are_those_of_a_video_of_it(
    name: str, layout: torch.memory_format
) -> None:
    vae, pixels = vae_of(name), pixels_of()
    wanted = as_video(vae, pixels)
    moments = Moments(vae, layout).to(memory_format=layout)
    assert moments.layout is layout
    found = moments(pixels)
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= ROUNDING * wanted.abs().max()
    assert not any(isinstance(module, nn.Conv3d) for module in moments.modules())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_in_channels_last_is_as_near_as_it_was(dtype: torch.dtype) -> None:
    vae, pixels = vae_of("qwen"), pixels_of()
    wanted = as_video(vae, pixels)
    half = copy.deepcopy(vae).to(dtype)
    before = half.encode((2 * (pixels.float() / 255) - 1).to(dtype).unsqueeze(2))
    error = (before.latent_dist.parameters.squeeze(2).float() - wanted).abs().max()
    moments = Moments(half, torch.channels_last).to(memory_format=torch.channels_last)
    assert (moments(pixels) - wanted).abs().max() <= 2 * error


def test_images_take_a_third_of_the_operations_of_videos() -> None:
    vae, pixels = vae_of("qwen"), pixels_of()
    with FlopCounterMode(display=False) as before:
        as_video(vae, pixels)
    moments = Moments(vae, torch.contiguous_format)
    with FlopCounterMode(display=False) as after:
        moments(pixels)
    assert before.get_total_flops() > 2.5 * after.get_total_flops()


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
        moments = Moments(vae, torch.channels_last).requires_grad_(False)
    assert moments.layout is torch.contiguous_format
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
