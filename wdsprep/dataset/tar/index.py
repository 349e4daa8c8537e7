"""The index: where each sample starts in its tar, then where the last one ends.

The file is the bare list of u64 little-endian offsets, which Megatron Energon reads as it is.
"""

import itertools
import struct
import sys
from array import array

from wdsprep.dataset.tar import BLOCK
from wdsprep.errors import DamageError
from wdsprep.text import plural


def encode_index(offsets: "array[int]") -> bytes:
    """Encode offsets as u64 little-endian: the start of each sample, then the end of the last."""
    if sys.byteorder == "big":
        offsets = array("Q", offsets)
        offsets.byteswap()
    return offsets.tobytes()


def decode_index(data: bytes, what: str) -> tuple[int, ...]:
    if len(data) % 8 or not data:
        raise DamageError(what, f"{plural(len(data), 'byte')} make no list of 8-byte offsets")
    offsets = struct.unpack(f"<{len(data) // 8}Q", data)
    if offsets[0] % BLOCK or any(a >= b or b % BLOCK for a, b in itertools.pairwise(offsets)):
        raise DamageError(what, "its offsets do not rise in whole blocks")
    return offsets
