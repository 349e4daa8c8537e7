"""`verify` and `repair`: check that a dataset is what it says it is, every file and every byte.

1. `dataset_check` reads the manifest, all receipts and one listing: which files there should be,
   and which there are.
2. `unit_check` checks one unit of work after another, on any number of processes. Each file of a
   unit is read once (`dataset.shard_reader`): a thread hashes it while `shard_check` compares the
   samples with the format.
3. `verify` puts both together; given images and their latents it also pairs them.
4. `repair` removes what they find damaged, so that `pack` or `encode` makes that again.

`options` has the options of the last two. What is wrong becomes a *finding* (`findings`), which
names one file and the next step. A *note* is a finding that does no harm.

In: Datasets.
Out: Findings, each with its next step; a repaired dataset.
"""
