"""How samples are had: from a local disk, from S3, from a cache of it."""
