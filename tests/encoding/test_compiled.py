"""Every shape that a run has is compiled, and what is not is told of."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wdsprep.encoding.models import compiled
from wdsprep.encoding.models.compiled import CompiledNetwork, check_compiler
from wdsprep.encoding.models.encoder import LatentEncoder, load_encoder
from wdsprep.encoding.models.find_model import find_model
from wdsprep.encoding.recipe_defaults import settle_recipe
from wdsprep.encoding.recipe_options import Recipe
from wdsprep.errors import WorkError

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
    network = CompiledNetwork(Doubling())
    shapes = [(size, side) for side in range(2, 8) for size in (8, 4)]
    with caplog.at_level(logging.WARNING), torch.inference_mode():
        for _ in range(2):
            for shape in shapes:
                batch = torch.ones(shape)
                assert torch.equal(network(batch), 2 * batch)
    assert len(graphs) == len(shapes)
    assert not caplog.records


def test_further_shapes_are_computed_all_the_same_and_that_is_said_once(
    graphs: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "MOST_VARIANTS", 12)
    network = CompiledNetwork(Doubling())
    with caplog.at_level(logging.WARNING, "wdsprep"), torch.inference_mode():
        for side in 2 * [*range(2, 20)]:
            batch = torch.ones(1, side)
            assert torch.equal(network(batch), 2 * batch)
    assert len(graphs) == 12
    (told,) = [each.getMessage() for each in caplog.records if each.name == "wdsprep"]
    assert told.startswith("--compile: 12 variants are compiled, so batches of further shapes")


def test_what_is_computed_again_in_fp32_is_not_compiled(graphs: list[Any]) -> None:
    recipe, model = settle_recipe(
        Recipe(resolution=64, compile=True, dtype="bf16", text="emb"),
        find_model("tiny", text="emb"),
        "cpu",
    )
    made = load_encoder(model, recipe, "cpu")
    assert isinstance(made, LatentEncoder)
    graphs.clear()  # that of the compiler's trial
    pixels, noise = torch.zeros((2, 3, 64, 64), dtype=torch.uint8), torch.zeros(2).long()
    texts = made.tokens(["a cat", "a dog"])
    made.encode_images(pixels, noise, exact=True)
    made.encode_texts(texts, exact=True)
    assert not graphs
    made.encode_images(pixels, noise)
    made.encode_texts(texts)
    assert len(graphs) >= 2


def test_where_there_is_no_compiler_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(_graph: Any, _inputs: Any) -> Callable[..., Any]:
        raise RuntimeError("Failed to find C compiler.\nPlease specify one via CC")

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    with pytest.raises(WorkError) as refused:
        check_compiler(torch.device("cpu"))
    (line,) = str(refused.value).splitlines()
    assert line.startswith("--compile does not work here (")
    assert "Failed to find C compiler." in line
    assert line.endswith("install a C++ compiler, and Triton for a GPU, or leave --compile out")
