"""Captions in place of the samples' own: out of a table, or out of a field of their json.

`sources` has what a user says of captions and what becomes of it for one dataset, `table` reads a
table, `sorted_pairs` sorts its rows, and `lookup` keeps them for the workers.
"""
