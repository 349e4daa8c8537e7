"""What a denoiser makes of text: to show that nothing is lost by trimming it.

Text is cut to its true length when it is stored, and padded again when it is loaded. Where a
denoiser reads a mask, or lengths, what it makes of that must be what it made of the whole. The
pipeline's own code makes ready what the denoiser is given.
"""

import inspect
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.kit.families.folders import StopError, whole_pipeline

MASKS = ("prompt_attention_mask", "prompt_embeds_mask")


def denoised(
    folder: Path, outputs: dict[str, Any], rows: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """The first step of a denoiser from always the same noise, in fp32, given the outputs of one
    caption (`prompt_of`).

    `rows`, (tokens, ...), take the place of its text. `mask`, (tokens,) and bool, says which of
    them are words: a pipeline without a mask is given a list of these, or all of them. A mask of
    floats, as Chroma's, is given as bool.
    """
    pipeline, made = whole_pipeline(folder), []
    taken = inspect.signature(type(pipeline).__call__).parameters
    arguments = {name: value for name, value in outputs.items() if name in taken}
    arguments |= {"prompt_embeds": text_of(outputs)}
    arguments |= dict.fromkeys({"guidance_scale"}.intersection(taken), 0.0)
    if rows is not None and mask is not None:
        is_list = isinstance(text_of(outputs), list)
        arguments["prompt_embeds"] = [rows[mask]] if is_list else rows[None]
        arguments |= {name: mask[None].long() for name in set(MASKS).intersection(taken)}
    for name in set(MASKS).intersection(outputs):
        kind = outputs[name].dtype
        arguments[name] = arguments[name].to(torch.bool if kind.is_floating_point else kind)
    forward = pipeline.transformer.forward

    def noted(*words: Any, **options: Any) -> Any:
        made.append(forward(*words, **options))
        raise StopError

    with patch.object(pipeline.transformer, "forward", noted), pytest.raises(StopError):
        pipeline(
            **arguments,
            height=64,
            width=96,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(0),
        )
    first = made[0][0]
    return first[0] if isinstance(first, list) else first


def text_of(outputs: dict[str, Any]) -> Any:
    """The embedding of the words: a tensor of one row, or a list of a tensor."""
    return outputs.get("prompt_embeds", outputs.get("text_hiddens"))
