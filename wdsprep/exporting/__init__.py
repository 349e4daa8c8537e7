"""`export`: write a dataset as other trainers read it.

1. A *layout* is what one reader expects. It says which datasets fit, what becomes of a shard, and
   what is written after all shards. `tars` has those of programs that read tars, or metadata about
   ours: energon, primus, wids and webshart; `folders` those of image files with files beside them:
   imagefolder and kohya; `edit_caches` those of a file for each sample, for trainers of edits:
   musubi and automodel; `mds` and `parquet` have one each.
2. `layout` has what all layouts share. It writes their files, with digests, and checks those that
   are there.
3. `read_samples` reads a shard and what is joined to it, and checks digests.
4. `export` is the run, and `options` has its options: workers export the shards, and a shard that
   is exported is not exported again.

energon and webshart get metadata alone, and the tars stay where they are. All others write every
sample again. A mark below `.wdsprep/` says what became of a shard. It is written last: a
shard without one counts as not exported, and so does one whose files have other digests. The file
that a reader opens first is missing until there are all marks.

In: Datasets of images, latents or text.
Out: Folders that other programs read.
"""

LAYOUTS = {
    "energon": "",
    "primus": "tars:PrimusLayout",
    "wids": "tars:WidsLayout",
    "webshart": "tars:WebshartLayout",
    "mds": "mds:MdsLayout",
    "parquet": "parquet:ParquetLayout",
    "imagefolder": "folders:ImageFolderLayout",
    "kohya": "folders:KohyaLayout",
    "musubi": "edit_caches:MusubiLayout",
    "automodel": "edit_caches:AutomodelLayout",
}
"""The module and class of each layout by its name in `--to`; energon reads tars as they are."""
