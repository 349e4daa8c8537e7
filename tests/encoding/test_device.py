"""What a GPU can do, by what torch says of it."""

from dataclasses import replace

import pytest
import torch

from wdsprep.encoding.encode import dtype_of, make_encoder
from wdsprep.encoding.models.device import check_age
from wdsprep.encoding.models.find import find_model
from wdsprep.encoding.recipe import Recipe


def gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    wheel = ["sm_75", "sm_80", "sm_90a", "sm_100", "compute_120"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: wheel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: name)


def test_a_gpu_that_torch_has_no_code_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, "Tesla V100", (7, 0))
    told = r"^Tesla V100 \(sm_70\) is too old for torch .*, which is built for sm_75 and newer"
    with pytest.raises(RuntimeError, match=told):
        make_encoder(find_model("tiny", text="none"), Recipe(resolution=64), "cuda")
    gpu(monkeypatch, "T4", (7, 5))
    check_age(torch.device("cuda"))
    check_age(torch.device("cpu"))


@pytest.mark.parametrize(("is_native", "dtype"), [(True, "bf16"), (False, "fp32")])
def test_emulated_bf16_is_not_chosen(
    is_native: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wdsprep.encoding.gpus.has_driver", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation: is_native or including_emulation,
    )
    overflowing = replace(find_model("tiny", text="none"), upcast=True)
    assert dtype_of("auto", "cuda", overflowing) == dtype
    assert dtype_of("bf16", "cuda", overflowing) == "bf16"
