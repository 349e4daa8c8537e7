"""Tar shards: a writer, a reader, and the index of sample offsets.

The bytes of the writer depend on its input alone, and the reader says what is wrong with a tar. The
index makes one positioned read bring one sample.

`members` parses headers, PAX records, long names and indexes; `read` makes samples of members, and
indexes of tars; `write` writes.
"""

BLOCK = 512
ZEROS = bytes(BLOCK)
END = 2 * ZEROS
"""The end of a tar, behind its last member."""


def padded(nbytes: int) -> int:
    """Return the room that `nbytes` of data take up in a tar."""
    return nbytes + BLOCK - 1 & -BLOCK
