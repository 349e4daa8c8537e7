"""Convert the keys of joined tables to how they are stored and searched, and choose columns."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import KW_ONLY, dataclass

import numpy as np

from wdsprep.dataset.random_numbers import Ints

KEY = "key"
"""The name of the column of keys."""
LACKING = -1
DIGITS = 18  # the most digits that always fit in 64 bits


@dataclass(frozen=True, slots=True)
class WantedColumns:
    """The columns of a table that are read: those that are `named`.

    `for_batches` all other columns of numbers are read, too.
    """

    named: AbstractSet[str]
    _: KW_ONLY
    for_batches: bool

    @property
    def cache_key(self) -> tuple[str, ...]:
        return f"all numbers: {self.for_batches}", *sorted(self.named)

    def choose_numbers(self, columns: Mapping[str, str]) -> dict[str, str]:
        """Return those of a table's columns of numbers that are read."""
        return {n: dtype for n, dtype in columns.items() if self.for_batches or n in self.named}


def encode_keys(texts: Sequence[str]) -> list[bytes]:
    return [*map(_encode_key, texts)]


def _encode_key(text: str) -> bytes:
    """Encode a key; return b"" for one that no file can have, with half of a surrogate pair."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return b""


def keys_to_numbers(keys: Sequence[str], width: int) -> Ints:
    """Return keys of `width` digits as numbers, and LACKING for other keys.

    If all keys are such numbers, they are converted at once, in a fifth of the time.
    """
    whole = "".join(keys)
    if {*map(len, keys)} == {width} and whole.isdecimal() and whole.isascii():
        return parse_digits(whole.encode(), width)
    return np.fromiter(
        (int(k) if len(k) == width and k.isdecimal() and k.isascii() else LACKING for k in keys),
        np.int64,
        len(keys),
    )


def parse_digits(whole: bytes, width: int) -> Ints:
    """Parse decimal numbers of `width` digits each that are written one after another."""
    digits = np.frombuffer(whole, np.uint8).reshape(-1, width) - ord("0")
    numbers: Ints = digits @ 10 ** np.arange(width - 1, -1, -1, dtype=np.int64)
    return numbers
