"""What a GPU can do, whether torch can use it, and in which precision networks compute."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from tests.kit.encodes import packed, pictures
from tests.kit.gpus import pretend_cuda
from wdsprep.encoding import gpus
from wdsprep.encoding.encode import make_encoder
from wdsprep.encoding.gpus import ALLOCATOR, has_bf16, prepare_allocator
from wdsprep.encoding.models.device import check_gpu
from wdsprep.encoding.models.encoder import load_encoder, precision_of, whole_fp32
from wdsprep.encoding.models.find_model import TINY, find_model
from wdsprep.encoding.recipe_defaults import settings_of, settle_recipe
from wdsprep.encoding.recipe_options import Encode
from wdsprep.errors import UsageError, WorkError

CARDS = {"V100": (7, 0), "T4": (7, 5), "A10G": (8, 6), "H100": (9, 0), "MI300X": (9, 4)}
"""Torch has no code for the first here. A T4 emulates bf16, slowly."""


def pretend_card(monkeypatch: pytest.MonkeyPatch, card: str) -> None:
    monkeypatch.setattr("wdsprep.encoding.gpus.has_driver", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.4" if card.startswith("MI") else None)
    pretend_cuda(
        monkeypatch,
        is_available=True,
        get_arch_list=["sm_75", "sm_80", "sm_90a", "sm_100", "compute_120"],
        get_device_capability=CARDS[card],
        get_device_name=card,
        is_bf16_supported=lambda including_emulation: card != "T4" or including_emulation,
    )


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
        recipe = Encode(resolution=64, **wanted)
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
    name: str, card: str, dtype: str, family: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_card(monkeypatch, card)
    model = find_model(str(family(name)), text="emb")
    settled, model = settle_recipe(Encode(resolution=64), model, "cuda")
    assert settings_of(model, settled)["dtype"] == dtype
    alone, _ = settle_recipe(Encode(resolution=64, latents="none"), model, "cuda")
    assert alone.dtype == dtype.partition("+")[0]


@pytest.mark.parametrize(
    ("card", "dtype", "has_bf16_text", "said"),
    [
        (
            "V100",
            "fp32",
            False,
            r"^V100 \(sm_70\) is too old for torch .*, which is built for sm_75",
        ),
        ("T4", "half+tf32", False, "^T4 has no TF32, in which the VAE of this run comp"),
        ("T4", "half", True, "^T4 has no bf16, .* give --dtype fp32$"),
        ("T4", "bf16", True, ""),  # the user wants it
        *(("T4", dtype, False, "") for dtype in ("half", "half+fp32", "fp16", "fp32")),
        ("A10G", "half+tf32", True, ""),
        ("A10G", "half", True, ""),
    ],
)
def test_a_gpu_that_is_too_old_or_lacks_a_precision_chosen_without_it_is_refused(
    card: str, dtype: str, has_bf16_text: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a cluster whose head has no GPU."""
    monkeypatch.setattr("wdsprep.encoding.gpus.has_driver", lambda: False)
    assert has_bf16()
    pretend_card(monkeypatch, card)
    refused = partial(pytest.raises, RuntimeError, match=said)
    with refused() if said else contextlib.nullcontext():
        check_gpu("cuda", dtype, has_bf16_text=has_bf16_text)
    check_gpu("cpu", dtype, has_bf16_text=has_bf16_text)
    if said and not has_bf16_text:
        tiny = find_model("tiny", text="none")
        with refused():
            make_encoder(tiny, Encode(resolution=64, dtype=dtype), "cuda")


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


STUB = """
int cuInit(unsigned flags) {{ return {code}; }}
int cuDriverGetVersion(int *version) {{ *version = 11040; return 0; }}
int cuDeviceGetCount(int *count) {{ *count = {count}; return 0; }}
"""

needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")


def stub_driver(folder: Path, *, code: int = 0, count: int = 1) -> Path:
    """Make a libcuda that says how CUDA begins, and how many GPUs there are."""
    source, library = folder / "stub.c", folder / "libcuda.so.1"
    source.write_text(STUB.format(code=code, count=count))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@needs_compiler
@pytest.mark.parametrize(
    ("code", "count", "visible", "is_refused"),
    [
        (0, 2, None, True),
        (0, 2, "1", True),
        (802, 0, None, True),  # the fabric manager is down
        (100, 0, None, False),
        (0, 2, "", False),
        (0, 2, "-1", False),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_refused_unless_the_user_hides_it(
    code: int,
    count: int,
    visible: str | None,
    is_refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise RuntimeError("The driver is too old (found version 11040). Please update it.")

    pretend_cuda(monkeypatch, is_available=False, init=fail)
    monkeypatch.setattr(gpus, "NVIDIA", str(stub_driver(tmp_path, code=code, count=count)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if not is_refused:
        assert gpus.visible_gpus() == ()
        return
    with pytest.raises(UsageError, match=r"The driver is too old \(found version 11040\): install"):
        gpus.visible_gpus()


def test_without_a_gpu_that_works_a_precision_is_chosen_without_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_available() -> bool:
        warnings.warn("CUDA initialization: the driver is too old", stacklevel=1)
        return False

    pretend_cuda(monkeypatch, is_available=is_available)
    monkeypatch.setattr(gpus, "has_driver", lambda: True)
    assert gpus.has_bf16()
    assert gpus.has_tf32()


def test_a_worker_that_was_promised_a_gpu_does_not_take_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_cuda(monkeypatch, is_available=False)
    gpus.require_gpu("cpu")
    with pytest.raises(WorkError, match=r"^torch .* cannot use the GPU of this machine: "):
        gpus.require_gpu("cuda")


SCRIPT = """
import sys, wdsprep
images, out = sys.argv[1:]
toy = wdsprep.Encode(resolution=64, model="tiny")
for use in (
    lambda: wdsprep.encode(images, out, resolution=64, model="tiny"),
    lambda: wdsprep.score(images, out, language=True),
    lambda: wdsprep.load(images, encode=toy, global_batch=1),
):
    try:
        print("done:", use())
    except wdsprep.errors.UsageError as error:
        print(error)
"""


@needs_compiler
@pytest.mark.system
def test_encode_score_and_load_refuse_in_one_line_before_anything_is_written(
    tmp_path: Path,
) -> None:
    """With a driver that is too old for the torch that is installed."""
    images = packed(pictures(tmp_path / "in", range(3)), tmp_path / "images")
    env = {**os.environ, "LD_LIBRARY_PATH": str(stub_driver(tmp_path).parent)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(images), str(tmp_path / "out")],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    for line in lines:
        assert "cannot use the GPU of this machine: " in line
        assert line.endswith("or take the CPU, with --device cpu")
    assert not (tmp_path / "out").exists()


BACKENDS: Any = torch.backends
OPERATORS = {
    "matmul": BACKENDS.cuda.matmul,
    "conv": BACKENDS.cudnn.conv,
    "rnn": BACKENDS.cudnn.rnn,
    "matmul on CPUs": BACKENDS.mkldnn.matmul,
    "conv on CPUs": BACKENDS.mkldnn.conv,
}


def now() -> dict[str, str]:
    return {name: each.fp32_precision for name, each in OPERATORS.items()}


@pytest.fixture(params=["everything", "matmul as of old", "matmul at its fastest"])
def trainer(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Has allowed TF32 in one of the ways there are."""
    before, everything = now(), BACKENDS.fp32_precision
    if request.param == "everything":
        BACKENDS.fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision("high" if "old" in request.param else "medium")
    yield now()
    torch.set_float32_matmul_precision("highest")
    BACKENDS.fp32_precision = everything
    for name, each in OPERATORS.items():
        each.fp32_precision = before[name]


def test_what_a_trainer_allows_is_put_aside_for_as_long_as_any_thread_needs(
    trainer: dict[str, str],
) -> None:
    assert "tf32" in trainer.values()
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with whole_fp32():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with whole_fp32():
        thread.start()
        assert entered.wait(60)
    assert set(now().values()) == {"ieee"}
    leave.set()
    thread.join()
    assert now() == trainer


def test_what_is_set_for_several_operators_afterwards_holds() -> None:
    before, BACKENDS.fp32_precision = BACKENDS.fp32_precision, "tf32"
    with whole_fp32():
        pass
    BACKENDS.fp32_precision = "ieee"
    assert set(now().values()) == {"ieee"}
    BACKENDS.fp32_precision = before


def test_threads_that_want_another_precision_wait_for_each_other() -> None:
    seen: list[set[str]] = []

    def other() -> None:
        with precision_of("tf32")():
            seen.append({*now().values()})

    thread = threading.Thread(target=other)
    with whole_fp32():
        thread.start()
        thread.join(0.05)
        assert not seen
        assert set(now().values()) == {"ieee"}
    thread.join(60)
    assert seen == [{"ieee", "tf32"}]


WHOLE = dict.fromkeys(OPERATORS, "ieee")
IN_TF32 = WHOLE | {"conv": "tf32", "rnn": "tf32"}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "tf32", "half+tf32"])
def test_the_networks_compute_in_the_precision_that_is_asked_for(
    dtype: str, trainer: dict[str, str]
) -> None:
    made = load_encoder(
        find_model("tiny", text="none"), Encode(resolution=64, text="none", dtype=dtype), "cpu"
    )
    usual = {"fp32": WHOLE, "bf16": trainer}.get(dtype, IN_TF32)
    pixels, noise = torch.zeros((1, 3, 64, 64), dtype=torch.uint8), torch.zeros(1, dtype=torch.long)
    for exact, wanted in ((False, usual), (True, WHOLE)):
        seen: list[dict[str, str]] = []
        with register_module_forward_hook(lambda *_, seen=seen: seen.append(now())):
            made.encode_images(pixels, noise, exact=exact)
        assert len(seen) > 10  # layers
        assert all(each == wanted for each in seen)
        assert now() == trainer
