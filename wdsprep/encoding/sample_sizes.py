"""The bytes that a sample takes in a latent shard, without its model at hand.

They follow from the format and from what `presets` says of a model, to the byte but for captions
and json, which are taken to fill one tar block each, as they nearly always do. A sample is taken to
have one image in each role, of the size of its target, and a mask on the grid of its latent.
"""

from collections.abc import Sequence

from wdsprep.dataset.npy_arrays import FLIPPED, LATENT, OF_SIZES, Field
from wdsprep.dataset.samples import TARGET
from wdsprep.dataset.tar import BLOCK, padded
from wdsprep.encoding.models.presets import PRESETS, TOKENS
from wdsprep.encoding.recipe_defaults import role_fields

CLIP_ALONE = ("sd1", "sd2", "tiny")  # whose tokens need no mask


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
            names = (LATENT, FLIPPED) if flip else (LATENT,)
            arrays += [Field(name=name, dtype="<f2", shape=shape) for name in names]
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
            arrays.append(Field(name="tokens.npy", dtype="<i4", shape=ids))
            if model not in CLIP_ALONE:
                arrays.append(Field(name="tokens_mask.npy", dtype="|u1", shape=ids))
    return sum(BLOCK + padded(array.nbytes) for array in arrays) + 4 * BLOCK
