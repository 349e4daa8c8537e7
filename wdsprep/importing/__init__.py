"""Latents that another tool has cached become a dataset of ours: the twin of `export`.

`import_latents` is the run, and `options` what the user decides. `cache` reads the rows of a cache:
MDS shards, Arrow files of `datasets`, Parquet, or tars. `column_names` is the one table of what
trainers call their columns, and `arrays` turns their values into arrays as we store them. `layout`
looks at the first rows and settles what every sample will be, and `empty_caption` what stands for
no caption. `worker` makes a latent shard of each file.

In: A folder of cached latents, where `store` can read it.
Out: Latent shards with all that a dataset has, which the loader serves.
"""
