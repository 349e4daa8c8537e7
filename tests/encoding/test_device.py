"""What a GPU can do, by what torch says of it."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.gpus import pretend_cuda
from wdsprep.encoding.encode import make_encoder
from wdsprep.encoding.gpus import ALLOCATOR, prepare_allocator
from wdsprep.encoding.models.device import check_age
from wdsprep.encoding.models.find_model import TINY, find_model
from wdsprep.encoding.recipe_defaults import dtype_of
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


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"force_upcast": True}, "bf16"),
        ({"force_upcast": False}, "fp16"),
        ({"_class_name": "AutoencoderDC", "encoder_block_out_channels": [4, 4, 4, 4]}, "half"),
    ],
)
def test_text_alone_has_the_dtype_that_it_has_beside_latents(
    config: dict[str, Any], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wdsprep.encoding.recipe_defaults.has_bf16", lambda: True)
    shutil.copytree(TINY, tmp_path / "model")
    path = tmp_path / "model/vae/config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | config))
    both = find_model(str(tmp_path / "model"), text="emb")
    alone = find_model(str(tmp_path / "model"), text="emb", has_vae=False)
    assert dtype_of("auto", "cuda", both) == dtype_of("auto", "cuda", alone) == dtype
    path.unlink()
    alone = find_model(str(tmp_path / "model"), text="emb", has_vae=False)
    assert dtype_of("auto", "cuda", alone) == "fp16"


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


def test_torch_takes_that_setting_without_a_word() -> None:
    code = "import torch; print(torch.zeros(1).item(), torch.cuda.is_available() or False)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("is_native", "dtype"), [(True, "bf16"), (False, "fp32")])
def test_emulated_bf16_is_not_chosen(
    is_native: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wdsprep.encoding.gpus.has_driver", lambda: True)
    pretend_cuda(
        monkeypatch,
        is_available=True,
        is_bf16_supported=lambda including_emulation: is_native or including_emulation,
    )
    overflowing = replace(find_model("tiny", text="none"), upcast=True)
    assert dtype_of("auto", "cuda", overflowing) == dtype
    assert dtype_of("bf16", "cuda", overflowing) == "bf16"
