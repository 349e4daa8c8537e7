"""Each group norm is joined with the SiLU after it, and computed by what a trial has chosen."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kit.families import OF_EACH_VAE
from wdsprep.encoding.models import group_norm
from wdsprep.encoding.models.encoder import LatentEncoder
from wdsprep.encoding.models.find_model import find_model
from wdsprep.encoding.models.group_norm import (
    LEAST_GAIN,
    JoinedNorm,
    Kernel,
    NormChoice,
    compute_by_torch,
    join_norms,
)
from wdsprep.encoding.models.load_networks import load_vae
from wdsprep.encoding.models.vae import Moments
from wdsprep.encoding.recipe_options import Recipe

SIDE = 64
KERNEL = "wdsprep.encoding.models.group_norm_kernel"


def image(side: int = SIDE) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    return torch.randint(0, 256, (1, 3, side, side), generator=generator).to(torch.uint8)


def joined_in(network: nn.Module) -> list[JoinedNorm]:
    return [module for module in network.modules() if isinstance(module, JoinedNorm)]


@pytest.mark.parametrize("name", OF_EACH_VAE)
def test_every_norm_of_every_vae_is_joined_and_not_a_bit_changes(
    name: str, family: Callable[[str], Path]
) -> None:
    model = find_model(str(family(name)), text="none")
    network = Moments(load_vae(model, torch.float32), torch.contiguous_format).eval()
    norms = [module for module in network.modules() if isinstance(module, nn.GroupNorm)]
    with torch.inference_mode():
        wanted = network(image())
        join_norms(network, image(2 * model.factor))
        assert torch.equal(network(image()), wanted)
    joined = joined_in(network)
    assert {norm.norm for norm in joined} == {*norms}
    if norms:  # that of attention has none
        assert [norm.silu for norm in joined].count(False) == 1
        assert not any(isinstance(module, nn.SiLU) for module in network.modules())


class Twice(nn.Module):
    """Uses a norm's result with SiLU and without."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.silu = nn.GroupNorm(2, 4), nn.SiLU()

    def forward(self, images: Tensor) -> Tensor:
        made = self.norm(images)
        return made + self.silu(made)  # type: ignore[no-any-return]


class Elsewhere(Twice):
    """Applies the SiLU to something else too."""

    def forward(self, images: Tensor) -> Tensor:
        return self.silu(self.norm(self.silu(images)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Twice, Elsewhere])
def test_what_is_used_otherwise_too_is_not_joined(kind: type[Twice]) -> None:
    network, images = kind(), torch.randn(2, 4, 8, 8)
    wanted = network(images)
    join_norms(network, images)
    assert torch.equal(network(images), wanted)
    assert isinstance(network.silu, nn.SiLU)
    assert not any(norm.silu for norm in joined_in(network))


def test_a_network_whose_result_is_not_finite_is_joined_all_the_same() -> None:
    network = nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU())
    join_norms(network, torch.full((1, 4, 8, 8), torch.inf))
    assert [norm.silu for norm in joined_in(network)] == [True]


def test_a_norm_without_weights_stays() -> None:
    network = nn.Sequential(nn.GroupNorm(2, 4, affine=False), nn.SiLU())
    join_norms(network, torch.randn(1, 4, 8, 8))
    assert [type(module) for module in network] == [nn.GroupNorm, nn.SiLU]


def kernel(images: Tensor, *arguments: Any, silu: bool) -> Tensor:
    """Stands for the kernel."""
    return compute_by_torch(images, *arguments, silu=silu)


def unequal(images: Tensor, *arguments: Any, silu: bool) -> Tensor:
    made = compute_by_torch(images, *arguments, silu=silu)
    made[-1, -1, -1] *= 1.001
    return made


def other_type(images: Tensor, *arguments: Any, silu: bool) -> Tensor:
    return compute_by_torch(images, *arguments, silu=silu).double()


def failing(images: Tensor, *_arguments: Any, silu: bool) -> Tensor:
    del images, silu
    raise ValueError("type fp8e4nv not supported in this architecture\nat line 3")


@pytest.fixture
def network() -> nn.Module:
    made = nn.Sequential(
        nn.GroupNorm(4, 16), nn.SiLU(), nn.GroupNorm(4, 16), nn.SiLU(), nn.GroupNorm(2, 16)
    )
    with torch.no_grad():
        join_norms(made, torch.randn(1, 16, 16, 16))
    return made


class Timer:
    """Tells how long torch takes and how long a kernel does, in place of a GPU."""

    def __init__(self, times_as_fast: float) -> None:
        self.calls = 0
        self._times_as_fast = times_as_fast

    def __call__(self, call: Callable[[], Tensor]) -> float:
        call()
        self.calls += 1
        return self._times_as_fast if self.calls % 2 else 1.0  # torch is first


def choose(
    network: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    tried: Kernel,
    times_as_fast: float = 2.0,
    resolution: int = 32,
) -> tuple[NormChoice, Timer]:
    timer = Timer(times_as_fast)
    monkeypatch.setattr(group_norm, "load_kernel", lambda: tried)
    monkeypatch.setattr(group_norm, "seconds_of", timer)
    monkeypatch.setattr(group_norm, "TRIED", 1 << 16)
    choice = NormChoice(resolution)
    assert not choice.is_fused
    assert choice(network) is network
    assert {norm.kernel for norm in joined_in(network)} == {tried if choice.is_fused else None}
    return choice, timer


def test_a_kernel_that_is_equal_and_clearly_faster_is_taken(
    network: nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    images = torch.randn(2, 16, 8, 8)
    wanted = network(images)
    with caplog.at_level(logging.INFO, "wdsprep"):
        choice, timer = choose(network, monkeypatch, kernel)
    assert choice.is_fused
    assert timer.calls == 4  # two of the three norms are alike
    assert caplog.messages == [
        "group norms are computed by a kernel, 2.00 times as fast as torch here"
    ]
    assert torch.equal(network(images), wanted)


@pytest.mark.parametrize(
    ("tried", "times_as_fast", "said"),
    [
        (kernel, LEAST_GAIN - 0.01, "torch: the kernel of wdsprep is 1.19 times as fast here"),
        (
            unequal,
            2.0,
            "torch, as the kernel of wdsprep fails here: with 16 channels in 4 groups, its result "
            "is up to ",
        ),
        (
            other_type,
            2.0,
            "torch, as the kernel of wdsprep fails here: it returns torch.float64 for ",
        ),
        (
            failing,
            2.0,
            "torch, as the kernel of wdsprep fails here: type fp8e4nv not supported in this "
            "architecture",
        ),
    ],
)
def test_else_torch_is_and_a_line_says_why(
    network: nn.Module,
    tried: Kernel,
    times_as_fast: float,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "wdsprep"):
        choice, _ = choose(network, monkeypatch, tried, times_as_fast)
    assert not choice.is_fused
    (line,) = caplog.messages
    assert line.startswith(f"group norms are computed by {said}")


def test_where_triton_is_not_installed_torch_is(
    network: nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, KERNEL, raising=False)
    with caplog.at_level(logging.INFO, "wdsprep"):
        NormChoice(32)(network)
    assert caplog.messages == ["group norms are computed by torch, as triton is not installed"]


def test_where_triton_cannot_be_loaded_torch_is(
    network: nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))  # with nothing in it
    monkeypatch.delitem(sys.modules, KERNEL, raising=False)
    monkeypatch.setitem(sys.modules, "triton.language", ModuleType("triton.language"))
    with caplog.at_level(logging.WARNING, "wdsprep"):
        NormChoice(32)(network)
    (line,) = caplog.messages
    assert line.startswith("group norms are computed by torch, as the kernel of wdsprep fails here")


def test_norms_of_large_images_count_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here one of 16 x 16 is three times as fast, and one of 4 x 4 takes twice as long."""
    large, small = (
        JoinedNorm(nn.GroupNorm(4, 16), (1, 16, side, side), 16, silu=True) for side in (16, 4)
    )

    def seconds_of(call: Any) -> float:
        images = next(each for each in call.args if isinstance(each, Tensor))
        is_ours = call.args[-1] is kernel
        share = (1 / 3 if images.shape[2] == 32 else 2.0) if is_ours else 1.0
        return share * images.numel()

    monkeypatch.setattr(group_norm, "seconds_of", seconds_of)
    monkeypatch.setattr(group_norm, "TRIED", 1 << 15)
    gain = group_norm.measure_gain([large, large, small], kernel, 32)
    assert gain == pytest.approx((2 * 256 + 16) / (2 * 256 / 3 + 2 * 16))


def test_the_time_of_a_computation_is_the_least_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, takes = [0.0], iter([50.0, *[3.0] * 4, *[2.0] * 4, *[4.0] * 4])

    class Event:
        def record(self) -> None:
            self.at = clock[0]

        def synchronize(self) -> None:
            """All is done at once."""

        def elapsed_time(self, other: "Event") -> float:
            return 1000 * (other.at - self.at)

    def call() -> Tensor:
        clock[0] += next(takes)  # the first time is that of the compiler
        return torch.empty(0)

    monkeypatch.setattr(group_norm, "_make_event", Event)
    assert group_norm.seconds_of(call) == 2.0


def test_the_choice_is_made_once_for_a_network_that_is_loaded_again(
    network: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice, timer = choose(network, monkeypatch, kernel)
    before = timer.calls
    for norm in joined_in(network):
        norm.kernel = None
    choice(network)
    assert {norm.kernel for norm in joined_in(network)} == {kernel}
    assert timer.calls == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rounding_to_a_half_precision_is_no_difference(
    network: nn.Module, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch itself rounds twice, and so more than is allowed."""

    def rounded_once(images: Tensor, *given: Any, silu: bool) -> Tensor:
        weight, bias, *others = given
        made = compute_by_torch(images.float(), weight.float(), bias.float(), *others, silu=silu)
        return made.to(images.dtype)

    choice, _ = choose(network.to(dtype), monkeypatch, rounded_once)
    assert choice.is_fused


@pytest.mark.parametrize(
    ("side", "tried", "shape"),
    [
        (64, 1 << 27, (128, 16, 64, 64)),
        (64, 1 << 18, (4, 16, 64, 64)),
        (1024, 1 << 18, (1, 16, 16, 1024)),
    ],
)
def test_tensors_that_are_tried_have_the_shapes_of_the_network(
    side: int, tried: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_norm, "TRIED", tried)
    before = torch.get_rng_state()
    norm = JoinedNorm(nn.GroupNorm(4, 16).half(), (1, 16, 16, 16), 16, silu=True)
    drawn = norm.draw_input(side)
    assert drawn.shape == shape
    assert drawn.dtype == torch.float16
    assert drawn.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(torch.get_rng_state(), before)
    attention = JoinedNorm(nn.GroupNorm(4, 16), (1, 16, 4), 16, silu=False)
    assert attention.draw_input(32).shape[1:] == (16, 16, 1)


def test_tensors_that_are_tried_leave_room_on_a_small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_norm, "free_nbytes", lambda _device: 1 << 22)
    norm = JoinedNorm(nn.GroupNorm(4, 16), (1, 16, 16, 16), 16, silu=True)
    assert norm.draw_input(64).nbytes <= 1 << 18


def test_nothing_is_joined_or_tried_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_norm, "find_kernel", None)
    recipe = Recipe(resolution=64, text="none", dtype="bf16")
    made = LatentEncoder(find_model("tiny", text="none"), recipe, torch.device("cpu"))
    assert not joined_in(made._moments.get())
    assert not made.has_fused_norms
