"""Encoders on a CPU, with the recipe that `encode` settles for their model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from wdsprep.encoding.models.base import Encoded, Rows
from wdsprep.encoding.models.encoder import LatentEncoder, load_encoder
from wdsprep.encoding.models.find_model import find_model
from wdsprep.encoding.recipe_defaults import settle_recipe
from wdsprep.encoding.recipe_options import Encode

SIDE = 64


def load_latent_encoder(model: str | Path, *, references: int = 0, **recipe: Any) -> LatentEncoder:
    """Return the encoder of a model, by default for squares of `SIDE` pixels."""
    wanted = Encode(**{"resolution": SIDE, **recipe})
    files = replace(find_model(str(model), text=wanted.text), references=references)
    settled, files = settle_recipe(wanted, files, "cpu")
    encoder = load_encoder(files, settled, "cpu")
    assert isinstance(encoder, LatentEncoder)
    return encoder


def rows_of(encoder: LatentEncoder, made: Rows | Encoded) -> list[dict[str, Tensor]]:
    """Return the arrays of each row, of which a variable one is as long as its caption."""
    variable = {field.name for field in encoder.fields if field.is_variable}
    rows = [
        dict(zip(made.arrays, row, strict=True)) for row in zip(*made.arrays.values(), strict=True)
    ]
    if made.lengths is not None:
        for row, length in zip(rows, made.lengths.tolist(), strict=True):
            row.update({name: row[name][:length] for name in variable & row.keys()})
    return rows
