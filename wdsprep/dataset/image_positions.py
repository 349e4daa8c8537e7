"""The position in the image shard of each sample of a shard of latents, text or scores.

All that is made of one image shard has its keys in its order, so a sample is found by its number:
its position in the image shard, which the column `row` of the table has. Where no sample was
rejected and none stand by their shapes, the receipt tells that the positions are 0, 1, 2 and so on.
Of images that pack packed, keys tell the positions as well, since they rise in an image shard. Of
others nothing else tells them.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from wdsprep.dataset.file_names import LATENTS, latent_shard
from wdsprep.dataset.manifest import Receipt
from wdsprep.dataset.samples import key_order
from wdsprep.dataset.shapes import shape_ranges

Positions: TypeAlias = NDArray[np.uint32]
DTYPE = "<u4"
NBYTES = 4
"""The bytes of a number."""
NOWHERE = 0xFFFFFFFF
"""Stands in place of the number of a sample that a shard does not have."""


def plain_positions(samples: int) -> Positions:
    """Return the positions in a shard in which no sample moved: 0, 1, 2 and so on."""
    return np.arange(samples, dtype=DTYPE)


def are_sound(positions: Positions, samples: int, inputs: int) -> bool:
    """Return whether there are as many positions as samples, all different and below `inputs`.

    `inputs` is the number of samples in the image shard.
    """
    is_inside = len(positions) == samples and positions.max(initial=0) < max(1, inputs)
    return bool(is_inside and len(np.unique(positions)) == samples)


def numbers_at(positions: Positions, inputs: int) -> Positions:
    """Return for each of the `inputs` positions the number of the sample that has it.

    The positions are those in the image shard, the numbers those in this one. A position that no
    sample has gets NOWHERE.
    """
    numbers = np.full(inputs, NOWHERE, DTYPE)
    inside = positions < inputs
    numbers[positions[inside]] = np.flatnonzero(inside)
    return numbers


def may_have_moved(receipt: Receipt) -> bool:
    """Return whether samples of a unit may have other positions than 0, 1, 2 and so on.

    They may if the unit lacks samples of its image shard, or has samples of several shapes.
    """
    if receipt.dataset == "images":
        return False
    is_whole = receipt.inputs == sum(shard.samples for shard in receipt.shards)
    return not is_whole or len(shape_ranges(receipt.settings, receipt.counts)) > 1


def keys_may_tell(receipt: Receipt) -> bool:
    """Return whether pack seems to have made the image shard, so that keys may tell positions.

    It seems so if the shard has a name that pack gives, and the receipt has no digest of what was
    read.
    """
    return bool(LATENTS.fullmatch(latent_shard(receipt.unit))) and not receipt.content


def positions_from_keys(
    receipt: Receipt, keys: Sequence[str], rejected: Sequence[str]
) -> Positions | None:
    """Return the place of each sample in its image shard, or None if the keys do not tell it.

    They do if pack made them: such keys rise in the image shard, and within each shape of the
    shard that the receipt is of.
    `rejected` are the keys of the image shard's other samples.
    """
    both = [*keys, *rejected]
    numbers = {key: number for number, key in enumerate(sorted(both, key=key_order))}
    stem = receipt.unit.partition("/")[2].partition("_")[0]
    are_of_pack = all(key.isdecimal() and key.startswith(stem) for key in both)
    if len(numbers) != receipt.inputs or not (keys_may_tell(receipt) and are_of_pack):
        return None
    positions = [numbers[key] for key in keys]
    runs = shape_ranges(receipt.settings, receipt.counts).values() or [range(len(keys))]
    rises = (a < b for run in runs for a, b in pairwise(positions[run.start : run.stop]))
    return np.fromiter(positions, DTYPE) if all(rises) else None
