"""The tokens of a caption, as its text encoders get them: ids, number, and whether it was cut.

`dry_run` notes the calls of tokenizers and the inputs of encoders while a pipeline handles one
caption. A caption is counted before anything of it is cut.

The calls of a pipeline's tokenizers are watched, and answered with what is known already. Pipelines
call a tokenizer for one caption at a time in the dry run, and for a batch when they
encode it. A call from Python takes 0.2 ms beside the few microseconds that a text takes, and SDXL
makes four. So the dry run lets a tokenizer make many texts together first (`split_result`), and
what it made of a caption goes with the caption's tokens into its batch (`KnownResults`). What a
tokenizer makes of a text does not depend on the other texts of a call, but for the padding to the
longest of them.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wdsprep.encoding.models.base import TokenizerResult, TokenizerResultKey, Tokens


@dataclass(frozen=True, slots=True)
class TokenizerCall:
    """A call of a tokenizer: its arguments and its result."""

    name: str
    texts: list[str]
    options: dict[str, Any]
    made: Any
    tokenizer: Any

    @property
    def keys(self) -> list[TokenizerResultKey]:
        """Return, for each text, the key by which what the tokenizer makes of it is kept."""
        return result_keys(self.name, self.texts, self.options)

    def count(self, text: str) -> int:
        """Return the number of tokens of a text that is not cut."""
        return len(call_unwrapped(self.tokenizer, text)["input_ids"])


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """The tokens that an encoder gets for one caption, and how a tokenizer made them."""

    ids: list[int]
    mask: list[int]
    count: int
    is_fixed: bool = False
    """whether its length is the same for every caption"""
    tokenizer: str = ""
    most: int = 0


def is_result(call: TokenizerCall, ids: Tensor) -> bool:
    """Return whether ids are the result of a tokenizer's call.

    The ids of the result may be a tensor, a list for each text, or for one text a plain list.
    """
    made = to_list(call.made["input_ids"])
    rows = made if made and isinstance(made[0], list) else [made]
    return bool(rows == ids.tolist())


def encoder_input(
    call: TokenizerCall | None, row: int, ids: list[int], mask: list[int]
) -> EncoderInput:
    if call is None:
        return EncoderInput(ids, mask, sum(mask))
    most = call.options.get("max_length") or len(ids)
    count = sum(mask)
    if call.options.get("truncation") and count >= most:
        count = max(count, call.count(call.texts[row]))
    is_fixed = call.options.get("padding") == "max_length"
    return EncoderInput(ids, mask, count, is_fixed, call.name, most)


def to_list(ids: Any) -> Any:
    return ids.tolist() if isinstance(ids, Tensor) else ids


def combine_tokens(caption: str, given: Sequence[EncoderInput]) -> Tokens:
    """Return the tokens of a caption, from the inputs of all encoders.

    The encoder that takes the most tokens tells how many there are, and whether any were cut.
    """
    largest = max(given, key=lambda one: one.most)
    return Tokens(
        caption=caption,
        count=largest.count,
        cut=largest.count > largest.most > 0,
        ids=_pad_ids(given),
        shape=tuple(sum(one.mask) for one in given if not one.is_fixed),
    )


def _pad_ids(given: Sequence[EncoderInput]) -> dict[str, list[int]]:
    """Return ids and masks, padded to one length for all captions, by their file names."""
    found = {}
    for one in given:
        if one.tokenizer:
            name = one.tokenizer.replace("tokenizer", "tokens")
            padding = [0] * (one.most - len(one.ids))
            found[f"{name}.npy"] = one.ids + padding
            found[f"{name}_mask.npy"] = one.mask + padding
    return found


IDS, ATTENTION = "input_ids", "attention_mask"
MORE = "more"
"""The option under which `wrap_calls` notes further arguments that have no name."""
MOST_TOKENS = 1 << 12
"""The longest result that is kept: a caption may be a file of 16 MB."""
TO_LONGEST = (True, "longest")
"""The values of a call's `padding` with which the longest of its texts decides the length."""


def wrap_calls(tokenizer: Any, around: Callable[..., Any]) -> Any:
    """Let `around` answer each call of a tokenizer, which is changed in place and returned.

    `around` gets the tokenizer, a function without arguments that makes the call itself, a list of
    the texts and the other options. The tokenizer's new class derives from the old one, since
    pipelines check it.
    """
    kind = type(tokenizer)

    def called(self: Any, *words: Any, **options: Any) -> Any:
        call = partial(kind.__call__, self, *words, **options)
        texts = options.pop("text") if "text" in options else words[0]
        listed = [texts] if isinstance(texts, str) else list(texts)
        more = {MORE: words[1:]} if words[1:] else {}
        return around(self, call, listed, {**options, **more})

    tokenizer.__class__ = type(kind.__name__, (kind,), {"__call__": called})
    return tokenizer


def call_unwrapped(tokenizer: Any, *words: Any, **options: Any) -> Any:
    """Call a tokenizer of `wrap_calls` as if it were not wrapped."""
    _wrapped, kind, *_ = type(tokenizer).__mro__
    return kind.__call__(tokenizer, *words, **options)


class KnownResults:
    """The results of tokenizers for single captions, with which calls for a batch are answered."""

    def __init__(self) -> None:
        self._here = threading.local()

    @contextmanager
    def answering(self, texts: Sequence[Tokens]) -> Iterator[None]:
        """Answer this thread's calls in the context with the results that the tokens have."""
        self._here.found = {key: made for text in texts for key, made in text.results.items()}
        try:
            yield
        finally:
            self._here.found = {}

    def watch(self, name: str, tokenizer: Any) -> Any:
        def around(own: Any, call: Callable[[], Any], texts: list[str], options: Any) -> Any:
            found = getattr(self._here, "found", {})
            return join_results(found, name, own, texts, options) or call()

        return wrap_calls(tokenizer, around)


def result_keys(
    name: str, texts: Sequence[str], options: Mapping[str, Any]
) -> list[TokenizerResultKey]:
    settings = repr(sorted(options.items()))
    return [(name, text, settings) for text in texts]


def split_result(made: Any, tokenizer: Any, options: Mapping[str, Any]) -> list[TokenizerResult]:
    """Return what a tokenizer would make of each text of a call alone, or [] if that is not known.

    The arrays are copied, since some pipelines write to them.
    """
    arrays = dict(made)
    if MORE in options or not hasattr(tokenizer, "padding_side"):  # such as a processor of images
        return []
    if not arrays.keys() <= {IDS, ATTENTION}:  # others may not be padded with zeros
        return []
    if not all(isinstance(array, Tensor) and array.ndim == 2 for array in arrays.values()):
        return []
    length = arrays[IDS].shape[1]
    if length > MOST_TOKENS:
        return []
    lengths = [length] * len(arrays[IDS])
    if len(lengths) > 1 and options.get("padding") in TO_LONGEST:
        if ATTENTION not in arrays or "pad_to_multiple_of" in options:
            return []
        lengths = arrays[ATTENTION].sum(1).tolist()
    is_left = _pads_left(tokenizer, options)
    places = [slice(length - n, None) if is_left else slice(n) for n in lengths]
    rows = {name: array.numpy() for name, array in arrays.items()}
    return [
        {name: array[row, place].copy() for name, array in rows.items()}
        for row, place in enumerate(places)
    ]


def join_results(
    found: Mapping[TokenizerResultKey, TokenizerResult],
    name: str,
    tokenizer: Any,
    texts: Sequence[str],
    options: Mapping[str, Any],
) -> Any:
    """Return a tokenizer's result for several texts, or None if it does not follow from `found`."""
    if not found or not texts:
        return None
    rows = [found.get(key) for key in result_keys(name, texts, options)]
    known = [row for row in rows if row is not None]
    lengths = {len(row[IDS]) for row in known}
    if len(known) < len(rows) or (len(lengths) > 1 and options.get("padding") not in TO_LONGEST):
        return None
    from transformers import BatchEncoding

    padding = {IDS: tokenizer.pad_token_id or 0, ATTENTION: 0}
    is_left = _pads_left(tokenizer, options)
    longest = max(len(row[IDS]) for row in known)
    joined = {
        each: np.full((len(known), longest), padding[each], dtype=array.dtype)
        for each, array in known[0].items()
    }
    for each, arrays in joined.items():
        for own, row in zip(arrays, known, strict=True):
            length = len(row[each])
            own[longest - length if is_left else 0 :][:length] = row[each]
    return BatchEncoding({each: torch.tensor(arrays) for each, arrays in joined.items()})


def _pads_left(tokenizer: Any, options: Mapping[str, Any]) -> bool:
    return bool((options.get("padding_side") or tokenizer.padding_side) == "left")
