"""Serve datasets to a trainer: `load` and `stream` make batches of shards.

`order` computes which sample comes when, by arithmetic alone. `loader` serves that order:

- `options` declares what `load` and `stream` are given, and `load_plan` checks it;
- `open_datasets` opens datasets, and `served_datasets` says what is served of each, which arrays
  are read for that, and what replaces a sample that cannot be served;
- `shard_access` reads samples from a disk or from S3, and `sample_cache` keeps those of S3;
- `batch_reader` makes batches of them;
- `prefetch` has threads do that ahead of the trainer;
- `sample_layout` says where each part of a sample lies in its bytes, and `augmentation` adds what
  chance decides;
- `batch_memory` holds the batch, pads it with zeros, brings it out of a DataLoader's worker, and
  copies it to a GPU.

`encoded_batches` has images encoded on the fly (`wdsprep.encoding.on_the_fly`), and arranges
batches as those of stored latents are. `streaming` does the same on other machines, with Ray.

A loader may serve a part of a dataset: the samples of one shape, those that meet a condition
(`where`), or those that have a row in a table (`subsets`). Tables of samples say which these are
(`dataset_tables`). The answer is kept on this machine, and so are the shapes of images that become
latents on the fly, and the sizes of images in roles.

`join` puts other datasets of the same images beside one, and finds their samples.

In: Datasets of images or latents, a seed and a step. Out: Batches in one order, whatever the
cluster, and the state to go on from.
"""
