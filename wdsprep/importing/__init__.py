"""`import`: turn latents that another tool has cached into a dataset, the reverse of `export`.

`import_latents` is the run, and `options` has its options. `latent_caches` reads the rows of a
cache: MDS shards, Arrow files of `datasets`, Parquet, or tars; `sample_files` those of trainers
that keep files of their own for each sample, with references. `column_names` is the table of the
names that trainers give their columns and arrays, which `export` writes too. `column_arrays`
converts values into arrays as wdsprep stores them. `import_plan` decides from the first rows which
arrays all samples have, and which the empty caption. `worker` makes a latent shard of each file.

In: A folder of cached latents, in any place that `store` can read.
Out: A dataset of latent shards, for the loader.
"""
