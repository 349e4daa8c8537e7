"""Captions in place of the samples' own, from a table or from a field of their json.

`options` has the options, and `sources` the source of captions that follows for each dataset;
`table` reads a table, `sorted_pairs` sorts its rows, and `lookup` stores them for the workers.
"""
