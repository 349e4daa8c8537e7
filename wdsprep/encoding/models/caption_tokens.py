"""The tokens of a caption, as its text encoders get them: ids, number, and whether it was cut.

`dry_run` notes the calls of tokenizers and the inputs of encoders while a pipeline handles one
caption. A caption is counted before anything of it is cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from wdsprep.encoding.models.base import TokenizerResultKey, Tokens
from wdsprep.encoding.models.tokenizer_calls import call_unwrapped, result_keys


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
