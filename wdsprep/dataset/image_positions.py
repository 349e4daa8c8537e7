"""Rows: the position in the image shard of each sample of a shard of latents or text.

All that is made of one image shard has its keys in its order, so a sample is found by its number:
its position in the image shard, which `NAME.tar.rows` has as an unsigned 32-bit little-endian
number for each sample. There is such a file only where the numbers are not 0, 1, 2 and so on: where
a sample before the last one was rejected, or where samples stand by their shapes. The files of a
receipt have its digest. Of images that pack packed, keys tell the numbers as well, since they rise
in an image shard. Of others nothing else tells them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from wdsprep.dataset.file_names import LATENTS, is_rows, latent_shard
from wdsprep.dataset.receipts import Receipt
from wdsprep.dataset.samples import key_order
from wdsprep.dataset.shapes import shape_ranges
from wdsprep.errors import DamageError
from wdsprep.text import plural

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DTYPE = "<u4"
NBYTES = 4
"""The bytes of a number."""
NOWHERE = 0xFFFFFFFF
"""Stands in place of the number of a sample that a shard does not have."""


@dataclass(frozen=True, eq=False, slots=True)
class ImagePositions:
    """The position in its image shard of each sample of a shard, in the order of the samples."""

    positions: "NDArray[np.uint32]"

    @classmethod
    def from_numbers(cls, positions: Iterable[int]) -> "ImagePositions":
        import numpy as np

        return cls(np.fromiter(positions, DTYPE))

    @classmethod
    def plain(cls, samples: int) -> "ImagePositions":
        """Return the positions in a shard in which no sample moved: 0, 1, 2 and so on."""
        import numpy as np

        return cls(np.arange(samples, dtype=DTYPE))

    @classmethod
    def from_bytes(cls, data: bytes, what: str = "rows") -> "ImagePositions":
        """Parse a file of positions. An error names the file `what`."""
        import numpy as np

        if len(data) % NBYTES:
            raise DamageError(what, f"{plural(len(data), 'byte')} make no 4-byte numbers")
        return cls(np.frombuffer(data, DTYPE))

    def to_bytes(self) -> bytes:
        """Return the content of a file of positions."""
        return self.positions.tobytes()

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def is_plain(self) -> bool:
        """Return whether the positions are 0, 1, 2 and so on, which needs no file."""
        return bool((self.positions == type(self).plain(len(self)).positions).all())

    def is_sound(self, samples: int, inputs: int) -> bool:
        """Return whether there are as many positions as samples, all different and below `inputs`.

        `inputs` is the number of samples in the image shard.
        """
        import numpy as np

        is_inside = len(self) == samples and self.positions.max(initial=0) < max(1, inputs)
        return bool(is_inside and len(np.unique(self.positions)) == samples)

    def numbers(self, inputs: int) -> "NDArray[np.uint32]":
        """Return for each of the `inputs` positions the number of the sample that has it.

        The positions are those in the image shard, the numbers those in this one. A position that
        no sample has gets NOWHERE.
        """
        import numpy as np

        found = np.full(inputs, NOWHERE, DTYPE)
        inside = self.positions < inputs
        found[self.positions[inside]] = np.flatnonzero(inside)
        return found

    def others(self, inputs: int) -> "NDArray[np.int64]":
        """Return which of the `inputs` positions in the image shard no sample has."""
        import numpy as np

        return np.setdiff1d(np.arange(inputs), self.positions)

    def without(self, numbers: Iterable[int], lost: Sequence[int] = ()) -> "ImagePositions":
        """Return the positions of the samples that stay when those with these `numbers` go.

        If the image shard loses samples too, `lost` are their positions, which rise; positions
        after them become lower.
        """
        import numpy as np

        left = np.delete(self.positions, np.fromiter(numbers, np.int64))
        return type(self)((left - np.searchsorted(lost, left)).astype(DTYPE))


def has_rows(receipt: Receipt) -> bool:
    """Return whether a unit lacks samples of its image shard, or has them in another order."""
    return any(map(is_rows, receipt.files))


def keys_may_tell(receipt: Receipt) -> bool:
    """Return whether pack seems to have made the image shard, so that keys may tell positions.

    It seems so if the shard has a name that pack gives, and the receipt has no digest of what was
    read.
    """
    return bool(LATENTS.fullmatch(latent_shard(receipt.unit))) and not receipt.content


def positions_from_keys(
    receipt: Receipt, keys: Sequence[str], rejected: Sequence[str]
) -> ImagePositions | None:
    """Return the positions of samples with these keys, or None if keys do not tell them.

    Keys tell the positions if pack made the keys: such keys rise in the image shard, and here
    within each shape. `rejected` are the keys of the image shard's other samples.
    """
    both = [*keys, *rejected]
    if not are_pack_keys(receipt, both):
        return None
    both.sort(key=key_order)
    numbers = {key: number for number, key in enumerate(both)}
    found = [numbers[key] for key in keys]
    runs = shape_ranges(receipt.settings, receipt.counts).values() or [range(len(keys))]
    rises = (a < b for run in runs for a, b in pairwise(found[run.start : run.stop]))
    return ImagePositions.from_numbers(found) if all(rises) else None


def are_pack_keys(receipt: Receipt, keys: Iterable[str]) -> bool:
    """Return whether all keys look like keys that pack gives in the slice of the unit."""
    stem = receipt.unit.partition("/")[2].partition("_")[0]
    return keys_may_tell(receipt) and all(key.isdecimal() and key.startswith(stem) for key in keys)
