"""The members of a latent sample that hold arrays: their names, types and shapes."""

from dataclasses import replace

from wdsprep.dataset.arrays import EMB, FLIPPED, LATENT, TOKENS, Field, text_fields
from wdsprep.encoding.models.find import Model
from wdsprep.encoding.recipe import Recipe


def fields(model: Model, recipe: Recipe) -> tuple[Field, ...]:
    """Return the arrays that are stored of every sample.

    Before this, a pipeline has to have been asked for what it makes of a caption. Arrays that
    are made of sizes stand with the latents.
    """
    if recipe.is_of_text:
        return text_fields(_text(model, recipe))
    latent = _latent(model, recipe)
    flipped = (replace(latent, name=FLIPPED),) if recipe.flip else ()
    return latent, *flipped, *_text(model, recipe)


def _latent(model: Model, recipe: Recipe) -> Field:
    """Moments are what the VAE gives, before anything is folded."""
    channels, side = model.channels, recipe.resolution // model.factor
    if recipe.latents == "moments":
        channels, side = 2 * channels // model.patch**2, side * model.patch
    return Field(name=LATENT, dtype="<f2", shape=(channels, side, side))


def _text(model: Model, recipe: Recipe) -> tuple[Field, ...]:
    if recipe.text == "none" or model.pipeline is not None:
        return model.outputs
    tower = model.towers[0]
    if recipe.text == "tokens":
        return (Field(name=TOKENS, dtype="<i4", shape=(tower.length,)),)
    return (Field(name=EMB, dtype="<f2", shape=(tower.length, tower.width)),)
