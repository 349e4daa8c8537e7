"""Rows of a batch that are as long as their captions, and zeros from there on.

Of a short caption's row, clearing what is behind the caption takes longer than reading the sample,
and memory is used again and again. So it is kept in mind of each row how far it may hold anything
but zeros, and no more than that is cleared. This is kept behind the rows, in their own memory:
whoever has the one has the other, be it fresh, used again, or shared with a trainer.

A trainer may have written into the padding of a batch that it had. So before a row is used again,
the first 8 bytes of every other token and the last 8 of those between are looked at, and where one
of them should be zero and is not, the whole row is cleared.
"""

from collections.abc import Sequence
from math import gcd
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wdsprep.dataset.arrays import Field
from wdsprep.loading.order.chance import Ints
from wdsprep.loading.worker_memory import Bytes


class PaddedRows:
    """The rows of a variable field. Each is opened, then filled from its start, then closed. `used`
    says of each how many bytes may be other than zero."""

    def __init__(self, field: Field, rows: Bytes, used: Ints) -> None:
        self.row_nbytes, self._token_nbytes = field.array_nbytes, field.row_nbytes
        self.rows, self._used = rows, used
        self._dirty = np.zeros(len(used), np.int64)

    def open(self, rows: range) -> None:
        """Until it is closed, any byte of a row may be other than zero."""
        some = slice(rows.start, rows.stop)
        used = self._used[some]
        if used.any():  # or the memory is fresh
            self._dirty[some] = np.where(self._written(some) > used, self.row_nbytes, used)
        used[:] = self.row_nbytes

    def _written(self, some: slice) -> Ints:
        """The end of the last token of each row that does not look like padding."""
        unit = gcd(self._token_nbytes, 8)
        words, two = self.rows[some].view(f"u{unit}"), 2 * self._token_nbytes // unit
        firsts, lasts = _last(words[:, ::two]), _last(words[:, two - 1 :: two])
        return np.maximum(2 * firsts - 1, 2 * lasts) * self._token_nbytes

    def close(self, rows: Sequence[int], ends: Ints, come: Ints) -> None:
        """Of each row the bytes up to its end are its array. So many have come into it, others'
        too."""
        stops = np.maximum(come, self._dirty[rows])
        for row, end, stop in zip(rows, ends.tolist(), stops.tolist(), strict=True):
            self.rows[row, end:stop] = 0
        self._used[rows] = ends

    def put(self, row: int, array: torch.Tensor) -> None:
        """An array that is there already."""
        data = array.contiguous().view(torch.uint8).numpy().reshape(-1)
        self.open(range(row, row + 1))
        self.rows[row, : len(data)] = data
        self.close([row], np.array([len(data)]), np.array([len(data)]))


def _last(words: NDArray[np.unsignedinteger[Any]]) -> Ints:
    """The number of the last one in each row that is not zero, from 1 on; 0 where all are."""
    found = words[:, ::-1] != 0
    last: Ints = np.where(found.any(axis=1), found.shape[1] - found.argmax(axis=1), 0)
    return last
