"""Random numbers by key that never change, for the order and the choice of samples.

NumPy does not promise its random streams across versions, so these are integer arithmetic of our
own, frozen by golden tests:

- `key_of` makes a 64-bit key from what chance is for (seed, stream, purpose) with BLAKE2b;
- `draw` is a counter-based generator: number i under a key is a hash of key + i * GOLDEN, so any
  number is had at once, without those before it.
"""

import hashlib
import json

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, and odd


def key_of(*parts: str | int) -> int:
    """Return 64 bits that depend on every part, and on where one ends and the next begins."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def draw(key: int | Words, numbers: Ints) -> Words:
    """Return 64 bits for each number that look random: SplitMix64, at any place of its sequence."""
    words: Words = (numbers + 1).view(np.uint64) * np.uint64(GOLDEN) + np.asarray(key, np.uint64)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words
