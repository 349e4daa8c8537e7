"""The kernel of group norms computes what they are, as Triton's interpreter runs it, and compiles.

No GPU is needed, and none has run it here.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.kit.interpreted_norms import DTYPES, SHAPES
from tests.kit.paths import ROOT

pytest.importorskip("triton")
pytestmark = pytest.mark.system  # the interpreter takes many seconds
BF16 = DTYPES[-1]
CAPABILITIES = ("75", "80", "90")
"""Of a T4, an A100 and an H100."""


def run_kit(module: str, *arguments: str, **environment: str) -> Any:
    """Return what a module of the kit prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.kit.{module}", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def interpreted() -> Any:
    return run_kit("interpreted_norms", TRITON_INTERPRET="1")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_result_is_the_exact_one_rounded_once(interpreted: Any, shape: str, dtype: Any) -> None:
    """The interpreter cuts bf16 off, so that all of its last place may be lost; torch rounds twice
    and may lose more."""
    assert interpreted["errors"][f"{shape}, {dtype}"]["ours"] < (0.6 if dtype != BF16 else 1)


def test_silu_can_be_left_out(interpreted: Any) -> None:
    assert interpreted["errors"]["without SiLU"]["ours"] < 0.6


def test_a_mean_of_a_hundred_thousand_deviations_costs_no_more_than_its_own_rounding(
    interpreted: Any,
) -> None:
    """1000 in fp32 is rounded by 0.003 of a deviation of 0.01."""
    error = interpreted["errors"]["a large mean"]
    assert error["ours"] < 500
    assert error["ours"] < error["torch"]


def test_a_corner_unlike_all_else_costs_no_digits(interpreted: Any) -> None:
    assert interpreted["errors"]["a corner unlike all else"]["ours"] < 0.6


@pytest.mark.parametrize(
    "fact",
    [
        "equal values give the bias",
        "an image alone",
        "again",
        "channels_last",
        "a contiguous image",
        "one image is not finite",
    ],
)
def test_neighbours_layouts_and_what_is_not_finite_change_nothing_else(
    interpreted: Any, fact: str
) -> None:
    assert interpreted["facts"][fact]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_whole_encoder_is_as_near_to_the_exact_one_as_with_torch(
    interpreted: Any, dtype: Any
) -> None:
    found = interpreted["vae"][str(dtype)]
    assert found["norms"] == 14
    assert found["ours"] <= 2 * found["torch"]


def test_the_kernel_compiles_for_gpus_in_accesses_of_16_bytes() -> None:
    made = run_kit("compiled_norms", *CAPABILITIES)
    assert [*made] == [*CAPABILITIES]
    for each in made.values():
        assert len(each) == 3
        assert all("ld.global.v4.b32" in ptx for ptx in each.values())
        assert "st.global.v4.b32" in each["_normalised"]
