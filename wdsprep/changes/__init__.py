"""What changes datasets that are finished, makes others of them, and finds what to change.

- `remove` takes samples out: `wanted` is what its user names, `finding` where that lies, and
  `rewriting` what becomes of a unit that loses some of it.
- `select` copies samples into new datasets: `selection` says which, `grouping` which datasets
  become one, `cutting` in which shards. `filling` is a run for each new dataset, and `copying` the
  work on a shard.
- `duplicates` finds what is in images more than once: `hashes` keeps what each picture looks like,
  `near` finds which look alike, and `copies` writes down what may go.

`options` are what each of them is given.

In: Datasets, and keys, URLs, digests or sources of samples, or a condition.
Out: The same datasets without them, and a list of what stays away; new ones; lists of copies.
"""
