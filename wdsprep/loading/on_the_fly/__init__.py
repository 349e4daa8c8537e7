"""Batches of latents that are made on the fly, while a model is trained, from image shards.

`image_shapes` says which latents the images will be, and `encoded_batches` reads the images, has
`wdsprep.encoding.on_the_fly` encode them, and lays batches out as those of stored latents are.
"""
