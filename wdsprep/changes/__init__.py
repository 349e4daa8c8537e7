"""Change finished datasets, make new ones of them, and find copies in them.

- `remove` removes samples: `find_samples` finds those that a user lists, and latents beside the
  images, which may have to lose them later. `rewrite_units` writes a unit of work again without
  them.
- `select` copies samples into new datasets, by a run for each: `merged_datasets` says which
  datasets become one and what is joined to them, and `selected_samples` which samples, in which
  shards. `copy_samples` is the work on a shard.
- `duplicates` finds copies among images: `image_hashes` keeps what each picture looks like, and
  `near_duplicates` finds which look alike.

`options` has the options of all three.

In: Datasets, and keys, URLs, digests or sources of samples, or a condition.
Out: Datasets without the removed samples, which stay away; new datasets; lists of copies.
"""
