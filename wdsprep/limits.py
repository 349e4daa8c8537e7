"""Limits on what is read from files of others, unless the user sets other limits.

So neither a source nor a dataset decides how much a worker has to hold in memory.
"""

MAX_AREA = 100_000_000
"""The most pixels of an image."""
MAX_NBYTES = 250_000_000
"""The most bytes of an image in a file, a tar or a table."""
MAX_DOWNLOAD_NBYTES = 50_000_000
"""The most bytes of an image behind a URL."""
MAX_TEXT_NBYTES = 16 << 20
"""The most bytes of a caption file or a json."""
MAX_ARRAY_NBYTES = 1 << 30
"""The most bytes of an array of a latent sample."""
