"""Where samples come from: a folder of images, a set of tars, tables with image bytes or URLs.

`base` says what a source is: it lists its *items* in an order that depends on what it holds alone,
and reads one item into samples; a digest tells whether what items hold has changed. A slice, the
unit of work of `pack`, is a fixed run of items: ten thousand images of a folder, one tar, the row
groups of a table that make ten thousand rows.

`recognise` tells which kind of source lies at a path, `patterns` which files of it are meant. The
kinds are `folder`, `tars` and `table_sources`; `tables` reads the rows of the last, and of a table
of captions. `captions` finds the caption and metadata of an image, or the column of a table that
holds them, and `parsing` guards against what strangers' files hold.

In: A folder, tars or tables, where `store` can read them.
Out: Items in a fixed order, and of each its samples or rejects.
"""
