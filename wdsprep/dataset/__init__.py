"""The format: what lies where in a dataset, and how each file is read and written.

`samples` and `rejects` are what goes in, `tar` and `arrays` how it is stored. A unit of work gives
its files their names at one moment (`draft`), with a `receipts` line that lists them; `manifest`
lists all receipts, sealed by a digest (`sealed`). `state` is a dataset as it lies there: opened,
read, tidied, published. `edition` tells runs that meet from each other.

In: Samples and arrays, receipts of what was done.
Out: A dataset: tars, indexes, rejects, receipts and the manifest; and what is known of one.
Uses: store.
"""
