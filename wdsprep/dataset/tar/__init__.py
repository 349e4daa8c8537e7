"""Tar shards: a writer whose bytes depend on its input alone, a reader that says what is wrong,
and the index of sample offsets that makes one positioned read bring one sample.
"""

BLOCK = 512
ZEROS = bytes(BLOCK)
END = 2 * ZEROS
"""Of a tar, behind its last member."""


def padded(nbytes: int) -> int:
    """Return the room that `nbytes` of data take up in a tar."""
    return nbytes + BLOCK - 1 & -BLOCK
