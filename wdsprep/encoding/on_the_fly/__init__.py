"""Latents that are made on the fly, while a model is trained, as `encode` would make them.

`encode_steps` finds the model, prepares images for it, and computes the arrays of a step;
`latent_writer` stores the latents in the shards that `encode` would write. The images are read, and
batches handed out, by `wdsprep.loading.encoded_batches`.
"""
