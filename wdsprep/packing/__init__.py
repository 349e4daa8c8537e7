"""`pack`: from a source to image shards.

`pack` is the public function, `rules` what its user decides: all its options are declared there.
`slices` says what is left to do, `touched` whether what has another date has changed, `crew` who
does it, `work` what they are given, `worker` does one slice, and `judge` decides about each of its
images; `filters` reads the conditions on their facts. `retry_rejected` fetches again what failed in
a way that may pass.

In: A source and the rules for what is kept.
Out: An image dataset: shards by bucket, rejects, receipts.
"""

HASHES = ("sha256", "md5", "sha512")
"""By which digests of images are checked and kept."""
