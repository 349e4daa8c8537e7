"""Make batches of latents from image shards on the fly, while a model is trained.

`encoded_batches` reads the images, has `wdsprep.encoding.on_the_fly` encode them, and arranges
batches as those of stored latents are.
"""
