"""fp32 is whole, or TF32 in convolutions, as asked; around that it is what the trainer allows."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from wdsprep.encoding.models.encoder import load_encoder
from wdsprep.encoding.models.find_model import find_model
from wdsprep.encoding.models.precision import precision_of, whole_fp32
from wdsprep.encoding.recipe_options import Recipe

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
        find_model("tiny", text="none"), Recipe(resolution=64, text="none", dtype=dtype), "cpu"
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
