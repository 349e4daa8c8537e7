"""Divisions that change nothing are not computed, and nothing changes."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kit.families import OF_EACH_VAE
from wdsprep.encoding.models.encoder import LatentEncoder, load_encoder
from wdsprep.encoding.models.find_model import find_model
from wdsprep.encoding.models.load_networks import load_vae
from wdsprep.encoding.models.vae import Moments
from wdsprep.encoding.models.vae_shortcuts import leave_out_divisions
from wdsprep.encoding.recipe_defaults import settle_recipe
from wdsprep.encoding.recipe_options import Recipe

SIDE = 64


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
@pytest.mark.parametrize("name", OF_EACH_VAE)
def test_latents_of_every_vae_are_the_same_to_the_bit_without_divisions(
    name: str, dtype: str, family: Callable[[str], Path]
) -> None:
    recipe, model = settle_recipe(
        Recipe(resolution=SIDE, dtype=dtype, text="none"),
        find_model(str(family(name)), text="none"),
        "cpu",
    )
    made = load_encoder(model, recipe, "cpu")
    assert isinstance(made, LatentEncoder)
    network = made._moments.get()
    with torch.inference_mode():
        vae = load_vae(model, network.dtype)
        plain = Moments(vae, torch.contiguous_format).eval()
        assert torch.equal(network(pixels()), plain(pixels()))
        assert count_divisions(network, pixels()) == 0
        is_kl = model.vae_kind in ("AutoencoderKL", "AutoencoderKLFlux2")
        assert bool(count_divisions(plain, pixels())) == is_kl


def test_sd2_has_eleven() -> None:
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=4,
        layers_per_block=2,
    )
    network = Moments(vae, torch.contiguous_format).eval()
    assert count_divisions(network, pixels(1)) == 11
    leave_out_divisions(network)
    assert count_divisions(network, pixels(1)) == 0


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
    recipe, model = settle_recipe(
        Recipe(resolution=SIDE, compile=True, text="none"), find_model("tiny", text="none"), "cpu"
    )
    made = load_encoder(model, recipe, "cpu")
    assert isinstance(made, LatentEncoder)
    assert count_divisions(made._moments.get(), pixels(1)) > 0
