"""The arrays of a latent sample, with their types and shapes, and the bytes that they take.

`fields` says which arrays a sample has by a model and a recipe. `sample_nbytes` tells the bytes of
a sample without its model at hand, from the format and from what `presets` says of a model: to the
byte but for captions and json, which are taken to fill one tar block each, as they nearly always
do. It takes a sample to have one image in each role, of the size of its target, and a mask on the
grid of its latent.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from wdsprep.dataset.npy_arrays import FLIPPED, LATENT, OF_SIZES, Field, mirrored_name, text_fields
from wdsprep.dataset.npy_arrays import TOKENS as TOKEN_IDS
from wdsprep.dataset.samples import TARGET, is_mask
from wdsprep.dataset.tar import BLOCK, padded
from wdsprep.encoding.models.presets import PRESETS, TOKENS
from wdsprep.encoding.recipe_options import FULL, PIXELS, Encode

if TYPE_CHECKING:
    from wdsprep.encoding.models.find_model import Model

CLIP_ALONE = ("sd1", "sd2", "tiny")  # whose tokens need no mask


def fields(model: "Model", recipe: Encode) -> tuple[Field, ...]:
    """Return the fields of a latent sample, which are the arrays that are stored for it.

    If text comes from a pipeline, `model` has to be one that `settle_recipe` has returned. Arrays
    that are made from sizes of the image are stored with the latents.
    """
    if not recipe.is_of_text:
        latents = latent_fields(model, recipe) if recipe.has_target else ()
        in_roles = role_fields(
            recipe.rules,
            recipe.resolution,
            channels=model.channels,
            factor=model.factor,
            flip=recipe.flip,
        )
        return *latents, *in_roles, *model.outputs
    return text_fields(model.outputs)


def role_fields(
    rules: Mapping[str, object], side: int, *, channels: int, factor: int, flip: bool
) -> Iterator[Field]:
    """Yield the fields of each role, by its rule, for images in the shape of the square.

    `side` is that of the square. Masks and pixels have no array of their mirror images: whoever
    loads them turns them.
    """
    cells = side // factor
    for role, rule in rules.items():
        dtype, shape = "<f2", tuple[int, ...]((channels, cells, cells))
        if rule == PIXELS:
            dtype, shape = "|u1", (3, side, side)
        elif is_mask(role):
            dtype, shape = "|u1", (side, side) if rule == FULL else (cells, cells)
        field = Field(name=f"{role}.npy", dtype=dtype, shape=shape, is_of_role=True)
        yield field
        if flip and field.holds_latents:
            yield replace(field, name=mirrored_name(field.name))


def latent_fields(model: "Model", recipe: Encode) -> tuple[Field, ...]:
    """Return the fields of the target's latents.

    Latents have the patches of the model, if it takes any. Moments have none yet: they have twice
    the channels of the VAE, and its cells.
    """
    channels, side = model.channels, recipe.resolution // model.factor
    if recipe.latents == "moments":
        channels, side = 2 * channels // model.patch**2, side * model.patch
    names = (LATENT, FLIPPED) if recipe.flip else (LATENT,)
    return tuple(Field(name=name, dtype="<f2", shape=(channels, side, side)) for name in names)


def sample_nbytes(
    resolution: int,
    model: str = "sd2",
    *,
    latents: str = "sample",
    flip: bool = False,
    roles: Sequence[str] = (),
    text: str = "emb",
    tokens: int = TOKENS,
) -> int:
    """Return how many bytes a latent sample takes in a tar: arrays, json, caption, all headers.

    `roles` are those whose images are encoded, the target among them; () stands for the target
    alone. Captions have `tokens` tokens, for models that store no padding.
    """
    preset, arrays = PRESETS[model], list[Field]()
    if latents != "none":
        channels = preset.channels * (2 if latents == "moments" else 1)
        shape = channels, resolution // preset.factor, resolution // preset.factor
        if not roles or TARGET in roles:
            arrays += [Field(name=LATENT, dtype="<f2", shape=shape)] * (2 if flip else 1)
        arrays += role_fields(
            {role: "" for role in roles if role != TARGET},
            resolution,
            channels=preset.channels,
            factor=preset.factor,
            flip=flip,
        )
        arrays += [array for array in preset.arrays if array.name in OF_SIZES]
    if text == "emb":
        for array in preset.arrays:
            if array.name not in OF_SIZES:
                in_text = preset.text_shape(array, tokens)
                arrays.append(Field(name=array.name, dtype=array.dtype, shape=in_text))
    if text == "tokens":
        for _, length in preset.towers:
            ids = (preset.ids or length,)
            arrays.append(Field(name=TOKEN_IDS, dtype="<i4", shape=ids))
            if model not in CLIP_ALONE:
                arrays.append(Field(name="tokens_mask.npy", dtype="|u1", shape=ids))
    return sum(BLOCK + padded(array.nbytes) for array in arrays) + 4 * BLOCK
