"""Latents that are made on the fly, while a model is trained, as `encode` would make them.

`image_preparation` finds the model and prepares images for it, `step_batches` computes the arrays
of a step, and `latent_writer` stores the latents in the shards that `encode` would write. The
images are read, and batches handed out, by `wdsprep.loading.encoded_batches`.
"""
