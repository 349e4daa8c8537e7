"""Rows of a batch that are as long as their captions, and zeros from there on.

Of a short caption's row, clearing what is behind the caption takes longer than reading the sample,
and memory is used again and again. So it is kept in mind of each row how far it may hold anything
but zeros, and no more than that is cleared. This is kept behind the rows, in their own memory:
whoever has the one has the other, be it fresh, used again, or shared with a trainer.

A trainer may have written into the padding of a batch that it had. That shows at the ends of
tokens, their first or last bytes, which are looked at before a row is used again.
"""

from math import gcd

import numpy as np
import torch

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
            self._dirty[some] = np.maximum(used, self._written(some))
        used[:] = self.row_nbytes

    def _written(self, some: slice) -> Ints:
        """The end of the last token of each row that shows that somebody has written there."""
        unit = gcd(self._token_nbytes, 8)
        rows = self.rows[some].view(f"u{unit}")
        tokens = rows.reshape(len(rows), -1, self._token_nbytes // unit)
        touched = (tokens[:, ::-1, :1] | tokens[:, ::-1, -1:]).any(axis=2)
        ends = touched.shape[1] - touched.argmax(axis=1)
        found: Ints = np.where(touched.any(axis=1), ends * self._token_nbytes, 0)
        return found

    def close(self, row: int, nbytes: int, come: int) -> None:
        """The first `nbytes` of a row are its array. So many have come into it, others' too."""
        self.rows[row, nbytes : max(come, int(self._dirty[row]))] = 0
        self._used[row] = nbytes

    def put(self, row: int, array: torch.Tensor) -> None:
        """An array that is there already."""
        data = array.contiguous().view(torch.uint8).numpy().reshape(-1)
        self.open(range(row, row + 1))
        self.rows[row, : len(data)] = data
        self.close(row, len(data), len(data))
