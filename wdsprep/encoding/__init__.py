"""`encode`: from image shards to latents and text embeddings.

`encode` is the public function, `recipe` what decides its bytes, `fields` the arrays of a sample.
`image_shards` says what there is to do, `crew` who does it, `worker` feeds one shard after another
to the `engine`, which keeps a device busy; `latent_shard` writes what comes back. `models` find
and run a model family. For trainers that encode while they train there are `on_the_way`,
`step_batches` and `tee`. `estimate` reckons what it takes.

In: Image shards, a model and a recipe.
Out: A latent dataset with the same keys; or the same arrays for a trainer that waits for them.
Uses: dataset, images, runners, sources, store.
"""
