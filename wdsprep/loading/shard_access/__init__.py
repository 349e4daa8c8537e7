"""Read samples from a local disk, from S3, or from a local cache (on NVMe) of what came from S3."""
