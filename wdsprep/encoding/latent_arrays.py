"""The arrays of a latent sample: their names, types and shapes."""

from dataclasses import replace

from wdsprep.dataset.npy_arrays import EMB, FLIPPED, LATENT, TOKENS, Field, text_fields
from wdsprep.encoding.models.find_model import Model
from wdsprep.encoding.recipe_options import Recipe


def fields(model: Model, recipe: Recipe) -> tuple[Field, ...]:
    """Return the fields of a latent sample, which are the arrays that are stored for it.

    If text comes from a pipeline, `model` has to be one that `settle_recipe` has returned. Arrays
    that are made from sizes of the image are stored with the latents.
    """
    if recipe.is_of_text:
        return text_fields(_text_fields(model, recipe))
    latent = _latent_field(model, recipe)
    flipped = (replace(latent, name=FLIPPED),) if recipe.flip else ()
    return latent, *flipped, *_text_fields(model, recipe)


def _latent_field(model: Model, recipe: Recipe) -> Field:
    """Return the field of the latent; moments have the shape that the VAE gives."""
    channels, side = model.channels, recipe.resolution // model.factor
    if recipe.latents == "moments":
        channels, side = 2 * channels // model.patch**2, side * model.patch
    return Field(name=LATENT, dtype="<f2", shape=(channels, side, side))


def _text_fields(model: Model, recipe: Recipe) -> tuple[Field, ...]:
    if recipe.text == "none" or model.pipeline is not None:
        return model.outputs
    tower = model.towers[0]
    if recipe.text == "tokens":
        return (Field(name=TOKENS, dtype="<i4", shape=(tower.length,)),)
    return (Field(name=EMB, dtype="<f2", shape=(tower.length, tower.width)),)
