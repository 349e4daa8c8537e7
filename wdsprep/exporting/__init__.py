"""`export`: a dataset as other trainers read it.

1. A *layout* is what one reader wants: a file here for each, by its name in `--to`. It says which
   datasets fit, what a shard becomes, and what is written when all shards are there.
2. `layout` is what all of them have in common, and finds the one that is meant.
3. `samples` reads a shard and what is joined to it, each byte against its digest. `tars` writes
   shards whose members have other names.
4. `export` is the run, and `options` what it is given: shards go to workers, and what is done is
   not done again.

`energon` and `webshart` write metadata alone, and the tars stay where they are. All others write
every sample anew. What a shard became stands in a mark below `.wdsprep/`, written last: without one
it never happened. The file that a reader opens first is gone until every mark is there.

In: Datasets of images, latents or text.
Out: Folders that other programs read.
"""

LAYOUTS = ("energon", "primus", "wids", "webshart", "mds", "parquet", "imagefolder", "kohya")
WITH_IMAGES = ("kohya",)
"""Layouts of latents to which the images are joined."""
