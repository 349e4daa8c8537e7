"""`pack`: from a source to image shards.

`pack` is the public function, and `options` declares all that it is given. `slices` says what is
left to do, `changed_sources` whether files with another date have changed, `worker_plan` how many
workers there are, and `work` what they are given. `worker` does one slice, and `sample_checks`
keeps or rejects each of its samples; `filters` reads the conditions on their facts.
`retry_rejected` fetches again what failed in a way that may pass.

In: A source and the rules for what is kept.
Out: An image dataset: shards by bucket, rejects, receipts.
"""

HASHES = ("sha256", "md5", "sha512")
"""The digests by which images are checked and kept."""
