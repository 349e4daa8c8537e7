"""A recipe holds only what the models are asked for in so many words."""

import pytest

from wdsprep.encoding.recipe_options import DTYPES, LATENTS, TEXTS, Recipe
from wdsprep.errors import UsageError


@pytest.mark.parametrize("name", ["latents", "text", "dtype"])
def test_a_word_that_nobody_knows_is_refused_with_those_that_are_known(name: str) -> None:
    known = {"latents": LATENTS, "text": TEXTS, "dtype": DTYPES}[name]
    for word in known:
        assert getattr(Recipe(resolution=256, **{name: word}), name) == word
    with pytest.raises(UsageError, match=f"{name} 'means': give one of {', '.join(known)}"):
        Recipe(resolution=256, **{name: "means"})
