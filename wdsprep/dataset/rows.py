"""Rows: which samples of its image shard a shard of latents or text is made of, beside it.

All that is made of one image shard has its keys in its order, so a sample is found by its number:
its position in the image shard, which `NAME.tar.rows` has as an unsigned 32-bit little-endian
number for each sample. There is such a file only where the numbers are not 0, 1, 2 and so on:
where a sample was rejected, or where samples stand by their shapes. Of images that pack packed,
keys tell the numbers as well, since they rise in an image shard. Of others nothing else tells them,
so there is a file wherever a sample was rejected. The files of a receipt have its digest; those of
receipts from before there were rows do not.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from wdsprep.dataset.names import LATENTS, latent_shard
from wdsprep.dataset.receipts import Receipt
from wdsprep.dataset.samples import key_order
from wdsprep.dataset.shapes import shape_ranges, shapes_of
from wdsprep.errors import FormatError
from wdsprep.text import plural

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DTYPE = "<u4"
NBYTES = 4
"""Of a number."""


def are_plain(positions: Iterable[int]) -> bool:
    """Whether they are 0, 1, 2 and so on, which needs no file."""
    return all(number == position for number, position in enumerate(positions))


def may_have_rows(receipt: Receipt) -> bool:
    """Whether a unit's samples may be other than all of the image shard's, in its order."""
    is_reordered = bool(receipt.rejects or shapes_of(receipt.settings))
    return receipt.dataset == "latents" and is_reordered


def keys_may_tell(receipt: Receipt) -> bool:
    """Whether its samples seem to be those of a shard that pack made."""
    return bool(LATENTS.fullmatch(latent_shard(receipt.unit))) and not receipt.content


def positions_of(
    receipt: Receipt, keys: Sequence[str], rejected: Sequence[str]
) -> list[int] | None:
    """The number of each of the `keys` among all of the image shard, where keys tell it: where they
    are those that pack gave, so that they rise there, and here in each shape."""
    stem = receipt.unit.partition("/")[2].partition("_")[0]
    both = [*keys, *rejected]
    if not keys_may_tell(receipt) or not all(
        key.isdecimal() and key.startswith(stem) for key in both
    ):
        return None
    both.sort(key=key_order)
    numbers = {key: number for number, key in enumerate(both)}
    found = [numbers[key] for key in keys]
    runs = shape_ranges(receipt.settings, receipt.counts).values() or [range(len(keys))]
    rises = (a < b for run in runs for a, b in pairwise(found[run.start : run.stop]))
    return found if all(rises) else None


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
