"""`score`: numbers about images and captions, by which samples are chosen.

`score` is the public function, and `options` declares its options. `models` finds classifiers, dual
encoders and other encoders of transformers, and says which columns each gives; `heads` reads linear
layers on top of them; `networks` loads and runs the models, and prepares images for them.
`languages` makes the columns of captions. `worker` writes the scores of one image shard, and makes
batches of images for the engine of `encode`, by which they are computed.

Scores are stored like a text dataset: its shards have the names, keys and order of the image
shards. But they are tables, whose rows have the columns; only embeddings are arrays in a tar.

In: Image shards, and models of transformers.
Out: A dataset of columns and embeddings with the same keys.
"""
