"""Latents that are made on the fly, while a model is trained, as `encode` would make them.

`encoding` finds the model and makes images ready for it, `step_batches` computes the arrays of a
step, and `latent_writer` keeps what passes as the shards that `encode` would write. What reads the
images and hands out batches is `wdsprep.loading.on_the_fly`.
"""
