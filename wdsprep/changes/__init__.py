"""What changes datasets that are finished, makes others of them, and finds what to change.

- `remove` takes samples out: `samples_to_remove` is what its user names, `finding` where that lies,
  and `rewriting` writes a unit again without it.
- `select` copies samples into new datasets: `selection` says which, `grouping` which datasets
  become one, `shard_plan` in which shards. `selected_datasets` has a run for each new dataset, and
  `copying` the work on a shard.
- `duplicates` finds what is in images more than once: `hashes` keeps what each picture looks like,
  `near_duplicates` finds which look alike, and `duplicate_groups` writes down what may go.

`options` are what each of them is given.

In: Datasets, and keys, URLs, digests or sources of samples, or a condition.
Out: The same datasets without them, and a list of what stays away; new ones; lists of copies.
"""
