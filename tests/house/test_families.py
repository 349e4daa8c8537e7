"""The small pipelines that tests of encoding are held against are what they say they are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kit.families import denoised, each_family, negative_of, prompt_of
from tests.kit.families.reference import MASKS, class_of, text_of

MEGABYTE = 1_000_000
BIGGER = {"HunyuanImage": 2.5 * MEGABYTE}
CAPTION = "A small dog, running on the beach"
MASKED = [
    *["PixArtAlpha", "PixArtSigma", "Sana", "Lumina2", "QwenImage", "ZImage", "Chroma"],
    *["HunyuanImage", "Krea2", "ErnieImage"],
]
ZEROED = ["AuraFlow", "OvisImage"]
UNGUIDED = {"Flux", "QwenImage", "QwenImage21", "HunyuanImage"}

Family = Callable[[str], Path]


@pytest.mark.parametrize("name", each_family())
def test_a_family_is_small_and_says_something_of_each_caption(name: str, family: Family) -> None:
    folder = family(name)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert size < BIGGER.get(name, MEGABYTE)
    assert class_of(folder) == f"{name}Pipeline"
    assert (negative_of(folder) is None) == (name in UNGUIDED)
    floats = [_floats(prompt_of(folder, caption)) for caption in (CAPTION, "two red cars")]
    for one, other in zip(*floats, strict=True):
        assert 0.05 < one.std() < 20
        assert one.shape != other.shape or not torch.equal(one, other)


@pytest.mark.parametrize("name", each_family(MASKED))
def test_text_cut_to_its_words_and_padded_again_is_worth_the_whole(
    name: str, family: Family
) -> None:
    folder = family(name)
    outputs = prompt_of(folder, CAPTION)
    whole = denoised(folder, outputs)
    rows = text_of(outputs)[0]
    for name in set(MASKS).intersection(outputs):  # which may leave words anywhere
        rows = rows[outputs[name][0].bool()]
    padded, mask = _padded(rows, len(rows) + 17)
    again = denoised(folder, outputs, padded, mask)
    torch.testing.assert_close(again, whole, rtol=0, atol=1e-5)
    unmasked = denoised(folder, outputs, padded, torch.ones_like(mask))
    assert (unmasked - whole).abs().max() > 1e-3  # so the mask is what did it


@pytest.mark.parametrize("name", ZEROED)
def test_text_after_the_words_is_zeros_where_the_denoiser_has_no_mask(
    name: str, family: Family
) -> None:
    folder = family(name)
    outputs = prompt_of(folder, CAPTION)
    (text,) = outputs["prompt_embeds"]
    words = int(text.abs().sum(1).count_nonzero())
    assert 0 < words < len(text) == 256
    assert torch.equal(_padded(text[:words], len(text))[0], text)
    shorter = outputs | {"prompt_embeds": text[None, : words + 1]}
    apart = denoised(folder, outputs) - denoised(folder, shorter)
    assert apart.abs().max() > 1e-3  # so they must be padded to the length that they had


def _floats(outputs: dict[str, Any]) -> list[Tensor]:
    """The outputs that say something of the caption, without masks and places."""
    named = {name: value for name, value in outputs.items() if not name.endswith("ids")}
    flat = [value[0] if isinstance(value, list) else value for value in named.values()]
    return [each for each in flat if each.is_floating_point() and each.unique().numel() > 2]


def _padded(rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
    more = rows.new_zeros(length - len(rows), *rows.shape[1:])
    return torch.cat([rows, more]), torch.arange(length) < len(rows)
