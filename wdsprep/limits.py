"""Limits on what is read of others' files, unless the user says otherwise.

So no source, and nobody's dataset, decides what a worker has to hold in memory.
"""

MAX_AREA = 100_000_000
"""Pixels of an image."""
MAX_NBYTES = 250_000_000
"""Bytes of an image in a file, a tar or a table."""
MAX_DOWNLOAD_NBYTES = 50_000_000
"""Bytes of an image behind a URL."""
MAX_TEXT_NBYTES = 16 << 20
"""Bytes of a caption file or a json."""
MAX_ARRAY_NBYTES = 1 << 30
"""Bytes of an array of a latent sample."""
MAX_TABLE_ROWS = 1 << 32
"""Rows of a table of captions."""
