"""Latents that somebody else has cached, as a dataset of ours: the twin of `export`.

`import_` is the run, and `options` what it is given. `foreign` reads the rows of what lies
somewhere: MDS shards, Arrow files of `datasets`, Parquet, or tars. `names` is the one table of what
trainers call their columns, and `arrays` turns what stands there into arrays as we store them.
`layout` looks at the first rows and settles what every sample will be, `empty` what stands for no
caption; `worker` makes a latent shard of each file.

In: A folder of cached latents, where `store` can read it.
Out: Latent shards with all that a dataset has, which the loader serves.
"""
