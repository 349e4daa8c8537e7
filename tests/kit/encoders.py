"""Encoders on a CPU, with the recipe that `encode` settles for their model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from wdsprep.encoding.models.encoder import LatentEncoder, load_encoder
from wdsprep.encoding.models.find_model import find_model
from wdsprep.encoding.recipe_defaults import settle_recipe
from wdsprep.encoding.recipe_options import Recipe

SIDE = 64


def load_latent_encoder(model: str | Path, *, references: int = 0, **recipe: Any) -> LatentEncoder:
    """Return the encoder of a model, by default for squares of `SIDE` pixels."""
    wanted = Recipe(**{"resolution": SIDE, **recipe})
    files = replace(find_model(str(model), text=wanted.text), references=references)
    settled, files = settle_recipe(wanted, files, "cpu")
    encoder = load_encoder(files, settled, "cpu")
    assert isinstance(encoder, LatentEncoder)
    return encoder
