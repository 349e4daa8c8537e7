"""The tables of a dataset, and questions to them.

In: a dataset, or rows of tables as Arrow, and a condition in the language of
`dataset.condition_syntax`. Out: which rows meet it. `column_conditions` evaluates a condition over
columns, `query` asks it of tables, or which rows have one of a list of texts, and `stored_tables`
reads the tables beside the shards. `relation` is all of them for whoever asks by himself.

Columns of others are joined to the samples of a dataset: `other_tables` reads a table, `key_join`
finds its rows by names that samples have, and `join_columns` keeps their columns in the order of
the samples, as `joined_columns`.
"""
