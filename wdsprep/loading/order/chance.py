"""Chance that never changes: keys, hashes and permutations on integer arithmetic of our own.

NumPy does not promise its random streams across versions, so the order of samples is built on three
things that are frozen by golden tests:

- `key_of` makes a 64-bit key from what an order is for (seed, stream, purpose) with BLAKE2b;
- `draw` is a counter-based generator: number i under a key is a hash of key + i * GOLDEN, so any
  number is had at once, without those before it;
- `shuffled` and `permuted` are permutations: of one long range (the shards), and of many short ones
  at once (the windows). Both sort by hash, which makes all permutations equally likely.
"""

import hashlib
import json

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, and odd
_CHUNK = 1 << 13  # numbers hashed at once: they stay in the processor's cache
_MANY = 1 << 20  # words sorted at once, 8 MB
_LAST = (1 << 64) - 1


def key_of(*parts: str | int) -> int:
    """64 bits that depend on every part and on where one part ends and the next begins."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def draw(key: int | Words, numbers: Ints) -> Words:
    """For each number 64 bits that look random: SplitMix64, at any place of its sequence."""
    words: Words = (numbers + 1).view(np.uint64) * np.uint64(GOLDEN) + np.asarray(key, np.uint64)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def shuffled(count: int, key: int) -> Ints:
    """A permutation of range(count): its numbers sorted by their hashes.

    A number stands in the lower bits of its own hash, so no two are equal and the result is the
    same whatever algorithm sorts them.
    """
    words = np.empty(count, np.uint64)
    for start in range(0, count, _CHUNK):
        numbers = np.arange(start, min(start + _CHUNK, count))
        words[start : start + _CHUNK] = _tagged(draw(key, numbers), numbers, count)
    words.sort()
    words &= np.uint64(_mask(count))
    return words.view(np.int64)


def permuted(places: Ints, rows: Ints, sizes: Ints, keys: Words) -> Ints:
    """Where each place goes under its row's permutation, that of range(sizes[row]) by keys[row].

    Each permutation is a row of hashes, sorted as in `shuffled`; in a row that is shorter than
    others, what lies beyond its size sorts to the end.
    """
    width = int(sizes.max())
    height = max(1, _MANY // width)
    if len(sizes) <= height:
        return _table(sizes, keys, width)[rows, places]
    result = np.empty_like(places)
    for start in range(0, len(sizes), height):
        here = np.flatnonzero((rows >= start) & (rows < start + height))
        some = slice(start, start + height)
        table = _table(sizes[some], keys[some], width)
        result[here] = table[rows[here] - start, places[here]]
    return result


def _table(sizes: Ints, keys: Words, width: int) -> Ints:
    numbers = np.arange(width)
    words = _tagged(draw(keys[:, None], numbers), numbers, width)
    words[numbers >= sizes[:, None]] = np.uint64(_LAST)
    words.sort(axis=1)
    words &= np.uint64(_mask(width))
    return words.view(np.int64)


def _tagged(words: Words, numbers: Ints, count: int) -> Words:
    words &= np.uint64(_LAST ^ _mask(count))
    words |= numbers.view(np.uint64)
    return words


def _mask(count: int) -> int:
    """Ones where the numbers of range(count) have bits."""
    return (1 << (count - 1).bit_length()) - 1
