"""The members of a latent sample that hold arrays: their names, types and shapes."""

from wdsprep.dataset.arrays import EMB, LATENT, TOKENS, Field
from wdsprep.encoding.models.find import ModelShape
from wdsprep.encoding.recipe import Recipe


def fields(model: ModelShape, recipe: Recipe) -> tuple[Field, ...]:
    """What becomes of every sample: the arrays that are stored."""
    channels = model.channels * (2 if recipe.latents == "moments" else 1)
    side = recipe.resolution // model.factor
    latent = Field(name=LATENT, dtype="<f2", shape=(channels, side, side))
    if recipe.text == "none":
        return (latent,)
    tower = model.towers[0]
    if recipe.text == "tokens":
        return latent, Field(name=TOKENS, dtype="<i4", shape=(tower.length,))
    return latent, Field(name=EMB, dtype="<f2", shape=(tower.length, tower.width))
