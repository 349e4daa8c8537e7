"""The bytes that a sample takes in a latent shard, without its model at hand.

They follow from the format and from what `presets` says of a model, to the byte but for captions
and json, which are taken to fill one tar block each, as they nearly always do. A sample is taken to
have one image in each role, of the size of its target, and a mask on the grid of its latent.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from wdsprep.dataset.npy_arrays import FLIPPED, LATENT, OF_SIZES, Field
from wdsprep.dataset.samples import TARGET
from wdsprep.dataset.tar import BLOCK, padded
from wdsprep.encoding.models.presets import PRESETS, TOKENS, Preset
from wdsprep.encoding.recipe_options import role_fields

CLIP_ALONE = ("sd1", "sd2", "tiny")  # whose tokens need no mask


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The choices that decide what is stored of each sample."""

    model: str = "sd2"
    latents: str = "sample"
    flip: bool = False
    roles: tuple[str, ...] = ()
    """The roles whose images are encoded, the target among them; () for the target alone."""
    text: str = "emb"
    tokens: int = TOKENS
    """The number of tokens in a caption, for models that store no padding."""

    @property
    def is_of_text(self) -> bool:
        return self.latents == "none"

    @property
    def preset(self) -> Preset:
        return PRESETS[self.model]


def sample_nbytes(resolution: int, choice: Choice) -> int:
    """Return the bytes of a latent sample in its tar: arrays, json and caption, with headers."""
    return sum(BLOCK + padded(array.nbytes) for array in _arrays(resolution, choice)) + 4 * BLOCK


def _arrays(resolution: int, choice: Choice) -> Iterator[Field]:
    preset = choice.preset
    channels = preset.channels * (2 if choice.latents == "moments" else 1)
    side = resolution // preset.factor
    if not choice.is_of_text:
        if not choice.roles or TARGET in choice.roles:
            for name in (LATENT, FLIPPED) if choice.flip else (LATENT,):
                yield Field(name=name, dtype="<f2", shape=(channels, side, side))
        yield from role_fields(
            {role: "" for role in choice.roles if role != TARGET},
            resolution,
            channels=preset.channels,
            factor=preset.factor,
            flip=choice.flip,
        )
    sizes = [array for array in preset.arrays if array.name in OF_SIZES]
    if choice.text == "emb":
        for array in preset.arrays:
            if choice.is_of_text and array in sizes:
                continue
            shape = preset.text_shape(array, choice.tokens)
            yield Field(name=array.name, dtype=array.dtype, shape=shape)
    if choice.text == "tokens":
        for _, length in preset.towers:
            yield Field(name="tokens.npy", dtype="<i4", shape=(preset.ids or length,))
            if choice.model not in CLIP_ALONE:
                yield Field(name="tokens_mask.npy", dtype="|u1", shape=(preset.ids or length,))
        for array in [] if choice.is_of_text else sizes:
            yield Field(name=array.name, dtype=array.dtype, shape=array.shape)
