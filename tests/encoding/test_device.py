"""What a GPU can do, by what torch says of it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.gpus import pretend_cuda
from wdsprep.encoding.encode import make_encoder
from wdsprep.encoding.gpus import ALLOCATOR, has_bf16, prepare_allocator
from wdsprep.encoding.models.device import check_age, check_precision
from wdsprep.encoding.models.find_model import TINY, find_model
from wdsprep.encoding.recipe_defaults import settings_of, settle_recipe
from wdsprep.encoding.recipe_options import Recipe


def gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    wheel = ["sm_75", "sm_80", "sm_90a", "sm_100", "compute_120"]
    pretend_cuda(
        monkeypatch,
        is_available=True,
        get_arch_list=wheel,
        get_device_capability=capability,
        get_device_name=name,
    )


def test_a_gpu_that_torch_has_no_code_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, "Tesla V100", (7, 0))
    told = r"^Tesla V100 \(sm_70\) is too old for torch .*, which is built for sm_75 and newer"
    with pytest.raises(RuntimeError, match=told):
        make_encoder(find_model("tiny", text="none"), Recipe(resolution=64), "cuda")
    gpu(monkeypatch, "T4", (7, 5))
    check_age(torch.device("cuda"))
    check_age(torch.device("cpu"))


CARDS = {"T4": (7, 5), "A10G": (8, 6), "H100": (9, 0), "MI300X": (9, 4)}
"""All but the first have bf16. A T4 emulates it, slowly."""
KINDS: dict[str, dict[str, Any]] = {
    "sd2": {"force_upcast": False},
    "sdxl": {"force_upcast": True},
    "dc": {"_class_name": "AutoencoderDC", "encoder_block_out_channels": [4, 4, 4, 4]},
}


@pytest.mark.parametrize(
    ("kind", "card", "images", "both"),
    [
        ("sd2", "T4", "fp16", "fp16"),
        ("sd2", "A10G", "fp16", "fp16"),
        ("sdxl", "T4", "fp32", "half+fp32"),
        ("sdxl", "A10G", "tf32", "half+tf32"),
        ("sdxl", "H100", "tf32", "half+tf32"),
        ("sdxl", "MI300X", "fp32", "half+fp32"),
        ("dc", "A10G", "tf32", "half+tf32"),
        ("dc", "T4", "fp32", "half+fp32"),
    ],
)
def test_no_vae_is_farther_from_fp32_than_fp16_is_and_the_settings_say_its_precision(
    kind: str, card: str, images: str, both: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(TINY, tmp_path / "model")
    path = tmp_path / "model/vae/config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | KINDS[kind]))
    pretend_card(monkeypatch, card)
    for wanted, dtype in (
        ({"text": "none"}, images),
        ({}, both),
        ({"latents": "none"}, "fp16"),
        ({"latents": "none", "text": "tokens"}, "fp32"),
        ({"dtype": "bf16"}, "bf16"),
    ):
        recipe = Recipe(resolution=64, **wanted)
        model = find_model(str(tmp_path / "model"), text=recipe.text, has_vae=not recipe.is_of_text)
        settled, model = settle_recipe(recipe, model, "cuda")
        assert settings_of(model, settled)["dtype"] == dtype
        assert settle_recipe(recipe, model, "cpu")[0].dtype == wanted.get("dtype", "fp32")


@pytest.mark.parametrize(
    ("name", "card", "dtype"),
    [
        ("Flux", "T4", "fp32"),
        ("Flux", "A10G", "half+tf32"),
        ("Flux", "MI300X", "half+fp32"),
        ("StableDiffusionXL", "A10G", "half+fp16"),  # the one of the tests warns of nothing
    ],
)
def test_text_encoders_of_a_pipeline_have_their_half_precision_beside_the_vae(
    name: str,
    card: str,
    dtype: str,
    family: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_card(monkeypatch, card)
    model = find_model(str(family(name)), text="emb")
    settled, model = settle_recipe(Recipe(resolution=64), model, "cuda")
    assert settings_of(model, settled)["dtype"] == dtype
    alone, _ = settle_recipe(Recipe(resolution=64, latents="none"), model, "cuda")
    assert alone.dtype == dtype.partition("+")[0]


def pretend_card(monkeypatch: pytest.MonkeyPatch, card: str) -> None:
    monkeypatch.setattr("wdsprep.encoding.gpus.has_driver", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.4" if card.startswith("MI") else None)
    pretend_cuda(
        monkeypatch,
        is_available=True,
        get_device_capability=CARDS[card],
        is_bf16_supported=lambda including_emulation: card != "T4" or including_emulation,
    )


def test_a_gpu_without_tf32_does_not_compute_otherwise_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu(monkeypatch, "T4", (7, 5))
    with pytest.raises(RuntimeError, match=r"^T4 has no TF32, in which the VAE of this run comp"):
        make_encoder(
            find_model("tiny", text="none"), Recipe(resolution=64, dtype="half+tf32"), "cuda"
        )
    for dtype in ("half+fp32", "fp16", "fp32"):
        check_precision(torch.device("cuda"), dtype)
    gpu(monkeypatch, "A10G", (8, 6))
    check_precision(torch.device("cuda"), "half+tf32")


def test_a_gpu_without_bf16_does_not_emulate_what_was_chosen_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a cluster whose head has no GPU."""
    monkeypatch.setattr("wdsprep.encoding.gpus.has_driver", lambda: False)
    assert has_bf16()
    gpu(monkeypatch, "T4", (7, 5))
    pretend_cuda(monkeypatch, is_bf16_supported=lambda including_emulation: including_emulation)
    cuda = torch.device("cuda")
    with pytest.raises(RuntimeError, match=r"^T4 has no bf16, .* give --dtype fp32$"):
        check_precision(cuda, "half", has_bf16_text=True)
    check_precision(cuda, "half", has_bf16_text=False)
    check_precision(cuda, "bf16", has_bf16_text=True)  # the user wants it
    pretend_cuda(monkeypatch, is_bf16_supported=lambda including_emulation: not including_emulation)
    check_precision(cuda, "half", has_bf16_text=True)


@pytest.mark.parametrize("chosen", ["", *ALLOCATOR])
def test_workers_map_memory_that_grows_unless_the_user_has_chosen(
    chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    if chosen:
        monkeypatch.setenv(chosen, "max_split_size_mb:128")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    prepare_allocator()
    told = {name: os.environ[name] for name in ALLOCATOR if name in os.environ}
    expected = {chosen: "max_split_size_mb:128"} if chosen else None
    assert told == (expected or {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
