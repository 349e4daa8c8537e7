"""Serve datasets to a trainer: `load` and `stream` make batches of shards.

`order` computes which sample comes when, by arithmetic alone. `loader` serves that order:

- `options` declares what `load` and `stream` are given, and `arguments` checks it;
- `catalog` opens the `datasets`;
- `shelves` read samples from a disk or from S3;
- `reading` makes batches of them with their `sample_texts`, and puts `substitutes` in the places of
  damaged samples;
- `serving` has threads do that ahead of the trainer;
- `grid` says where each part of a sample lies in its bytes, `memory` holds the batch, and `effects`
  adds what chance decides;
- `to_device` copies batches to a GPU, and `worker_memory` brings them out of a DataLoader's worker.

`on_the_fly` makes latents of images. `streaming` does the same on other machines, with Ray.

A loader may serve a part of a dataset (`subsets`): the samples of one shape, those that meet a
condition (`where`), or those that have a row in a table (`tables`). The json of all samples says
which these are (`facts`). The answer is kept on this machine, and so are the shapes of images that
become latents on the fly.

`join` puts other datasets of the same images beside one. `join_positions` finds their samples, and
`wanted_arrays` says which arrays are read of each dataset.

In: Datasets of images or latents, a seed and a step. Out: Batches in one order, whatever the
cluster, and the state to go on from.
"""
