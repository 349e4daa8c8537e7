"""`load` and `stream`: from shards to the batches of a trainer.

`order` says which sample comes when, by arithmetic alone. `loader` serves it: `options` are what
both are given, `arguments` checks what is asked, `catalog` opens the `datasets`, `shelves` bring
samples from a disk or from S3, `reading` makes batches of them with their `sample_texts`, puts
`substitutes` in the places of damaged samples, and `serving` has threads do that ahead. In a batch,
`grid` says what of a sample goes where, `memory` is where it lies, and `effects` is what chance
adds. `to_device` and `worker_memory` bring it to a GPU and out of a DataLoader's worker.
`on_the_fly` makes latents of images. `streaming` does the same with other machines, on Ray.

Of a dataset, `subsets` may be served: of one shape, or those samples that meet a condition
(`where`) or have a row in a table (`tables`). Which these are is found in the json of all samples
(`facts`) and kept on this machine; so are the shapes of images that become latents on the fly.
`join` puts other datasets of the same images beside one: `join_positions`
says where their samples are, and `wanted_arrays` what is read of each.

In: Datasets of images or latents, a seed and a step.
Out: Batches in one order, whatever the cluster, and the state to go on from.
"""
