"""The format: what lies where in a dataset, and how each file is read and written.

`file_names` says what lies where. `samples` and `rejects` are what goes in, and `reject_codes` why
one is left out; `condition_syntax` is what a user may ask of a sample; `tar` and `npy_arrays` are
how it is stored, `shapes` which shape and bucket it has, `image_positions` which sample of an image
shard it is. `shard_reader` reads samples of a shard, and says what that costs, and `reindex` gives
tars of others their index; `thread_map` does many things at a time, `chunks` reads a file piece by
piece, `aio` many places of files with one call, and `kept_file` is what a look at all samples
found. `random_numbers` draws by keys. A unit of work gives its files their names at one moment
(`draft`), with a receipt that lists them and what it counts (`coarse_histograms`); `manifest` lists
all receipts, sealed by a digest and checked when it is read (`sealed_json`, and `settings` for the
settings in it). `stored_dataset` is a dataset as it lies there: opened, read, tidied, published.
`unit_locks` tells runs that meet from each other, and `removed_samples` is what must not come back.

In: Samples and arrays, receipts of what was done.
Out: A dataset: tars, indexes, rejects, receipts and the manifest; and what is known of one.
"""
