"""`pack`: from a source to image shards.

`pack` is the public function, and says how many workers there are and what they are given;
`options` declares its options. `slices` finds the slices that are left to do, and says whether
files with another date have changed. `worker` packs one slice: it keeps or rejects each of its
samples, and has the json that is written of it. `retry_rejected` fetches rows again that failed for
a reason that may pass.

In: A source and the rules for what is kept.
Out: An image dataset: shards by bucket, rejects, receipts.
"""

HASHES = ("sha256", "md5", "sha512")
"""The digests by which images are checked and kept."""
