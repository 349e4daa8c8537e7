"""Compute permutations that never change, from the keyed hashes of `dataset.random_numbers`.

`shuffle_range` permutes one long range (the shards), and `permute_rows` many short ones at once
(the windows). Both sort by hash, which makes all permutations equally likely.
"""

import numpy as np

from wdsprep.dataset.random_numbers import Ints, Words, draw

_CHUNK = 1 << 13  # numbers hashed at once: they stay in the processor's cache
_MANY = 1 << 20  # words sorted at once, 8 MB
_LAST = (1 << 64) - 1


def shuffle_range(count: int, key: int) -> Ints:
    """Return a permutation of range(count): its numbers sorted by their hashes.

    A number stands in the lower bits of its own hash, so no two are equal and the result is the
    same whatever algorithm sorts them.
    """
    words = np.empty(count, np.uint64)
    for start in range(0, count, _CHUNK):
        numbers = np.arange(start, min(start + _CHUNK, count))
        words[start : start + _CHUNK] = _tag(draw(key, numbers), numbers, count)
    words.sort()
    words &= np.uint64(_mask(count))
    return words.view(np.int64)


def permute_rows(places: Ints, rows: Ints, sizes: Ints, keys: Words) -> Ints:
    """Return where each place goes under its row's permutation.

    The permutation of a row is one of range(sizes[row]), by keys[row]. It is a row of hashes,
    sorted as in `shuffle_range`. In a row that is shorter than others, what lies beyond its size
    sorts to the end.
    """
    width = int(sizes.max())
    height = max(1, _MANY // width)
    if len(sizes) <= height:
        return _permute_small(sizes, keys, width)[rows, places]
    result = np.empty_like(places)
    for start in range(0, len(sizes), height):
        here = np.flatnonzero((rows >= start) & (rows < start + height))
        some = slice(start, start + height)
        table = _permute_small(sizes[some], keys[some], width)
        result[here] = table[rows[here] - start, places[here]]
    return result


def _permute_small(sizes: Ints, keys: Words, width: int) -> Ints:
    numbers = np.arange(width)
    words = _tag(draw(keys[:, None], numbers), numbers, width)
    words[numbers >= sizes[:, None]] = np.uint64(_LAST)
    words.sort(axis=1)
    words &= np.uint64(_mask(width))
    return words.view(np.int64)


def _tag(words: Words, numbers: Ints, count: int) -> Words:
    words &= np.uint64(_LAST ^ _mask(count))
    words |= numbers.view(np.uint64)
    return words


def _mask(count: int) -> int:
    """Return a number with ones at the bits that numbers of range(count) use."""
    return (1 << (count - 1).bit_length()) - 1
