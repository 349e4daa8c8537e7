"""`load` and `stream`: from shards to the batches of a trainer.

`order` says which sample comes when, by arithmetic alone. `loader` serves it: `arguments` checks
what is asked, `catalog` opens the datasets, `shelves` bring samples from a disk or from S3,
`reading` makes batches of them, `serving` has threads do that ahead. In a batch, `grid` says what
of a sample goes where, `memory` is where it lies, and `effects` is what chance adds. `to_device`
and `worker_memory` bring it to a GPU and out of a DataLoader's worker. `encoded` makes latents on
the way. `streaming` does the same with other machines, on Ray.

In: Datasets of images or latents, a seed and a step.
Out: Batches in one order, whatever the cluster, and the state to go on from.
Uses: dataset, encoding, images, runners, store.
"""
