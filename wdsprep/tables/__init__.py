"""The tables of a dataset, and questions to them.

In: a dataset, or rows of tables as Arrow, and a condition in the language of
`dataset.condition_syntax`. Out: which rows meet it. `condition_sql` compiles a condition to SQL,
`query` asks DuckDB, `key_join` finds the rows of a table by names that samples have, and
`stored_tables` reads the tables beside the shards.
"""
