"""Rows of a batch that are as long as their captions, and zeros from there on.

Of a short caption's row, clearing what is behind the caption takes longer than reading the sample,
and memory is used again and again. So it is kept in mind of each row how far it may hold anything
but zeros, and no more than that is cleared: a batch of captions of 60 tokens in rows of 300 takes
1.4 times as long as one without padding, and 2.7 times where all is cleared. Clearing in one call
of the kernel, or without giving up the interpreter's lock, is no faster.
"""

from collections.abc import Sequence

import numpy as np
import torch

from wdsprep.dataset.aio import Bytes
from wdsprep.dataset.arrays import Field
from wdsprep.dataset.chance import Ints


class PaddedRows:
    """The rows of a variable field. Each is opened, then filled from its start, then closed. `used`
    says of each how many of its first bytes may be other than zero, and is kept up to date."""

    def __init__(self, field: Field, rows: Bytes, used: Ints) -> None:
        self.row_nbytes = field.array_nbytes
        self.rows, self._used, self._dirty = rows, used, used.copy()

    def open(self, rows: Sequence[int]) -> None:
        """Until it is closed, any byte of a row may be other than zero."""
        some = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        self._dirty[some] = self._used[some]
        self._used[some] = self.row_nbytes

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
