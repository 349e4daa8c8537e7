"""The format of datasets, and the digest by which a dataset knows its files: BLAKE3."""

from blake3 import blake3

FORMAT = 1
"""The format of the datasets that are written and read."""


def hex_digest(data: bytes | memoryview) -> str:
    return blake3(data).hexdigest()
