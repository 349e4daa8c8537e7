"""The output of `wdsprep models`: the models with a short name, and the size of their samples."""

import json
from collections.abc import Iterator
from typing import Any

from wdsprep.encoding.models.presets import PRESETS, TOKENS
from wdsprep.encoding.sample_arrays import sample_nbytes
from wdsprep.text import human_bytes, join_lines

SIDES = (512, 1024)


def model_lines(*, as_json: bool = False) -> str:
    """Return the text that `wdsprep models` prints."""
    if as_json:
        return json.dumps({"models": [facts(name) for name in PRESETS]}, sort_keys=True)
    return join_lines(_lines())


def facts(name: str) -> dict[str, Any]:
    """Return the facts about a model for --json.

    `sample_nbytes` counts a latent, an embedding, and all that belongs to them.
    """
    preset = PRESETS[name]
    longest = max(length for _, length in preset.towers)
    return {
        "arrays": [
            {
                "dtype": array.dtype,
                "name": array.name,
                "shape": array.shape,
                "trimmed": array.is_variable,
            }
            for array in preset.arrays
        ],
        "login": preset.needs_login,
        "name": name,
        "note": preset.note,
        "repository": preset.repo,
        "sample_nbytes": _by_side(name, longest),
        f"sample_nbytes_at_{TOKENS}_tokens": _by_side(name, min(TOKENS, longest)),
        "text_tower_nbytes": round(preset.tower_nbytes),
        "text_towers": [tower for tower, _ in preset.towers],
    }


def _by_side(name: str, tokens: int) -> dict[int, int]:
    return {side: sample_nbytes(side, name, tokens=tokens) for side in SIDES}


def _lines() -> Iterator[str]:
    yield f"{'':33} bytes a sample: latent, text, json"
    yield f"{'':13} {'text':>9} {'longest captions':>19} {f'of {TOKENS} tokens':>19}"
    sides = " ".join(f"{f'at {side}':>9}" for side in SIDES)
    yield f"{'model':13} {'towers':>9} {sides} {sides}  repository"
    for name, preset in PRESETS.items():
        row = facts(name)
        longest = " ".join(f"{human_bytes(nbytes):>9}" for nbytes in row["sample_nbytes"].values())
        trimmed = row[f"sample_nbytes_at_{TOKENS}_tokens"].values()
        short = " ".join(f"{human_bytes(n) if preset.is_trimmed else '':>9}" for n in trimmed)
        place = f"{preset.repo or 'in the package'}{' (login)' * preset.needs_login}"
        yield f"{name:13} {human_bytes(preset.tower_nbytes):>9} {longest} {short}  {place}"
    yield ""
    yield "login: accept the terms on https://huggingface.co/REPOSITORY, then run `hf auth login`"
    for name, preset in PRESETS.items():
        if preset.note:
            yield f"{name}: {preset.note}"
    yield "any other text-to-image pipeline of diffusers: --model OWNER/NAME, or its folder"
