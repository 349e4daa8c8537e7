"""Captions in place of the samples' own, from a table or from a field of their json.

`options` has the options, and the source of captions that follows for each dataset. `table`
says which columns of a table are wanted, what samples lack before a run, and what came of it at its
end; `sources.tables` opens the files. `join_captions`
joins the table with the samples of image shards, and writes for each unit its `unit_captions`,
which its worker reads.
"""
