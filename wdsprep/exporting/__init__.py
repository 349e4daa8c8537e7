"""`export`: write a dataset as other trainers read it.

1. A *layout* is what one reader expects. Each has a module here, named as in `--to`. It says which
   datasets fit, what becomes of a shard, and what is written after all shards.
2. `layout` has what all layouts share, also tars whose members have other names, and finds a layout
   by its name. `output` writes their files, with digests, and checks those that are there.
3. `read_samples` reads a shard and what is joined to it, and checks digests.
4. `export` is the run, and `options` has its options: workers export the shards, and a shard that
   is exported is not exported again.

`energon` and `webshart` write metadata alone, and the tars stay where they are. All others write
every sample again. A mark below `.wdsprep/` says what became of a shard. It is written last: a
shard without one counts as not exported, and so does one whose files have other digests. The file
that a reader opens first is missing until there are all marks.

In: Datasets of images, latents or text.
Out: Folders that other programs read.
"""

LAYOUTS = ("energon", "primus", "wids", "webshart", "mds", "parquet", "imagefolder", "kohya")
WITH_IMAGES = ("kohya",)
"""The layouts of latents to which images may be joined."""
