"""Every shape that a run has is compiled, and what is not is told of."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wdsprep.encoding.models.compiled import NAMES, PER_SHAPE, CompiledNetwork
from wdsprep.encoding.models.encoder import LatentEncoder, load_encoder
from wdsprep.encoding.models.find_model import find_model
from wdsprep.encoding.recipe_defaults import settle_recipe
from wdsprep.encoding.recipe_options import Recipe

# What the compiler imports:
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


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


def test_every_shape_is_compiled_in_batches_of_several_sizes(
    graphs: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    network = CompiledNetwork(Doubling(), shapes=20)
    shapes = [(size, side) for side in range(2, 22) for size in (8, 4)]
    with caplog.at_level(logging.WARNING), torch.inference_mode():
        for _ in range(2):
            for shape in shapes:
                batch = torch.ones(shape)
                assert torch.equal(network(batch), 2 * batch)
    assert len(graphs) == len(shapes)
    assert not caplog.records


def test_further_shapes_are_computed_all_the_same_and_that_is_said_once(
    graphs: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    network = CompiledNetwork(Doubling(), shapes=1)
    with caplog.at_level(logging.WARNING, "wdsprep"), torch.inference_mode():
        for side in 2 * [*range(2, PER_SHAPE + 12)]:
            batch = torch.ones(1, side)
            assert torch.equal(network(batch), 2 * batch)
    assert len(graphs) == PER_SHAPE
    (told,) = [each.getMessage() for each in caplog.records if each.name == "wdsprep"]
    assert told.startswith(
        f"--compile: {PER_SHAPE} variants are compiled, so batches of further shapes"
    )


def test_limits_of_a_trainer_are_left_alone(graphs: list[Any]) -> None:
    config: Any = torch._dynamo.config
    before = [getattr(config, name) for name in NAMES]
    CompiledNetwork(Doubling(), shapes=100)(torch.ones(2, 2))
    assert [getattr(config, name) for name in NAMES] == before
    assert len(graphs) == 1
    assert before[0] < PER_SHAPE  # or it would not be worth the while


def test_an_error_of_the_network_is_its_own(graphs: list[Any]) -> None:
    class Failing(nn.Module):
        def forward(self, batch: Tensor) -> Tensor:
            return batch.view(7)

    with pytest.raises(Exception, match="7"):
        CompiledNetwork(Failing(), shapes=1)(torch.ones(2, 2))
    assert not graphs


def test_what_is_computed_again_in_fp32_is_not_compiled(graphs: list[Any]) -> None:
    recipe, model = settle_recipe(
        Recipe(resolution=64, compile=True, dtype="bf16", text="emb"),
        find_model("tiny", text="emb"),
        "cpu",
    )
    made = load_encoder(model, recipe, "cpu")
    assert isinstance(made, LatentEncoder)
    pixels, noise = torch.zeros((2, 3, 64, 64), dtype=torch.uint8), torch.zeros(2).long()
    texts = made.tokens(["a cat", "a dog"])
    made.encode_images(pixels, noise, exact=True)
    made.encode_texts(texts, exact=True)
    assert not graphs
    made.encode_images(pixels, noise)
    made.encode_texts(texts)
    assert len(graphs) >= 2
