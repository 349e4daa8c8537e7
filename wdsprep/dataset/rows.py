"""Rows: which samples of its image shard a shard of latents or text is made of, beside it.

All that is made of one image shard has its keys in its order, so a sample is found by its number:
its position in the image shard, which `NAME.tar.rows` has as an unsigned 32-bit little-endian
number for each sample. There is such a file only where the numbers are not 0, 1, 2 and so on:
where a sample was rejected, or where samples stand by their shapes.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from wdsprep.dataset.names import rows_name
from wdsprep.errors import FormatError
from wdsprep.text import plural

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["are_plain", "rows_bytes", "rows_name", "rows_of"]
DTYPE = "<u4"
NBYTES = 4
"""Of a number."""


def are_plain(positions: Iterable[int]) -> bool:
    """Whether they are 0, 1, 2 and so on, which needs no file."""
    return all(number == position for number, position in enumerate(positions))


def rows_bytes(positions: Iterable[int]) -> bytes:
    """What the file of a shard holds."""
    import numpy as np

    return np.fromiter(positions, DTYPE).tobytes()


def rows_of(data: bytes, what: str = "rows") -> "NDArray[np.uint32]":
    """The positions in a file of them; an error that names `what` where it is none."""
    import numpy as np

    if len(data) % NBYTES:
        raise FormatError(f"{what} is damaged: {plural(len(data), 'byte')} make no 4-byte numbers")
    return np.frombuffer(data, DTYPE)
