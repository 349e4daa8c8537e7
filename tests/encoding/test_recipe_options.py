"""A recipe holds only what the models are asked for in so many words."""

from typing import Any

import pytest

from wdsprep.encoding.options import EncodeOptions
from wdsprep.encoding.recipe_options import DTYPES, LATENTS, MOST_COMPILED, TEXTS, Recipe
from wdsprep.errors import UsageError


@pytest.mark.parametrize("name", ["latents", "text", "dtype"])
def test_a_word_that_nobody_knows_is_refused_with_those_that_are_known(name: str) -> None:
    known = {"latents": LATENTS, "text": TEXTS, "dtype": DTYPES}[name]
    for word in known:
        assert getattr(Recipe(resolution=256, **{name: word}), name) == word
    with pytest.raises(UsageError, match=f"{name} 'means'.*: give one of {', '.join(known)}"):
        Recipe(resolution=256, **{name: "means"})


@pytest.mark.parametrize(
    ("given", "shapes"),
    [
        ({"resolution": 1024, "shapes": "sdxl"}, 40),
        ({"resolution": 256, "shapes": "nearest:32,2"}, 5),
        ({"resolution": (64, 128, 256), "shapes": "nearest:64,2"}, 5),
        ({"resolution": (64, 128, 256, 512, 1024)}, 5),
    ],
)
def test_many_shapes_are_not_compiled_one_after_the_other(
    given: dict[str, Any], shapes: int
) -> None:
    with pytest.raises(UsageError) as refused:
        EncodeOptions(**given, compile=True)
    assert str(refused.value) == (
        f"--compile takes minutes for each shape, and there are {shapes}: leave it out, or encode "
        f"{MOST_COMPILED} shapes at most"
    )
    EncodeOptions(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"resolution": 128, "shapes": [(64, 192), (128, 128), (192, 64)]},
        {"resolution": (64, 128, 256, 512)},
        {"latents": "none"},
    ],
)
def test_a_few_shapes_are_compiled(given: dict[str, Any]) -> None:
    assert EncodeOptions(**given, compile=True).compile
