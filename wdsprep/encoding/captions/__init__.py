"""Captions in place of the samples' own, from a table or from a field of their json.

`options` has the options, and `sources` the source of captions that follows for each dataset;
`table` reads a table, `sample_names` says by which names it may list the samples of image shards,
and `laid_out` joins both and writes for each unit its `unit_captions`, which its worker reads.
`report` says what samples lack before a run, and what came of it at its end.
"""
