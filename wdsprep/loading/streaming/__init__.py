"""Stream latents into trainers: decoded and encoded by other processes on one Ray cluster.

    feed = wdsprep.stream(
        "shards/images", encode=Encode(resolution=256), global_batch=1024, trainers=8
    )
    # in the process of trainer `rank`, which was given feed.trainers[rank]:
    for batch in trainer:                        # latent, emb, key: this rank's share
        train(batch)
        state = trainer.state_dict()

1. Numbers of pieces go in, in the order of training, as far ahead as the trainers' pace and the
   object store allow (`stream`, `workers`).
2. Decoders read and crop on CPUs, encoders make latents on GPUs; Ray Data runs both as pools that
   grow and shrink (`stages`).
3. `streaming_split` deals the pieces out, one trainer after the other. With `preserve_order` that
   is exact: a trainer has every W-th piece, and joins them to batches (`stream`).

The batches are those of `wdsprep.load` on the stored latents, and so are the states: a run may stop
in one and go on in the other. Ray replaces a decoder or encoder that dies, and its piece is made
again. If a trainer or the driver dies, begin a new stream from the last state.
"""
