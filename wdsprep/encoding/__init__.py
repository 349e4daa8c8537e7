"""`encode`: from image shards to latents and text embeddings.

`encode` is the public function, `options` all that it is given, and where datasets go,
`recipe_options` what decides its bytes, `shape_lists` the shapes that a user names;
`recipe_defaults` chooses what a recipe leaves open, `sample_arrays` says which arrays a sample then
has, and what they take. `captions` says where captions come from, if not from the samples. All is
planned before anything is written: which `image_shards` there are, how many workers encode them
(`worker_plan`), on which of the `gpus`, and for each dataset which shards are missing (`run_plan`,
which then carries out the plan).

`sample_chain` lists the steps of a sample's way through the work, and has what it becomes on it;
`role_images` cuts the images that it has in roles.
The `worker` makes one shard after another: it reads one and feeds the `engine`, which keeps a
device busy (in `two_passes` where it cannot hold all). There `batching` says which samples share a
batch, and computes several at once. `latent_shard` writes what comes back, and keeps what has to
wait for its turn. `models` find and run a model family. `progress` says how fast it goes.

Trainers may also encode on the fly, and get the latents that `encode` would store:

1. `recipe_options.Encode` says how: the settings of `wdsprep encode`, with its fingerprint.
2. `on_the_fly.encode_steps` finds its model, makes images ready for it, and computes: a step's
   pixels in device batches of one size, as a worker of `encode` does. Noise is that of the key, so
   no step or rank shows in what comes out.
3. `on_the_fly.latent_writer` keeps what passes, and writes each latent shard when the last of its
   samples has come.

The order is the loader's (`wdsprep.loading.loader`), whose threads read and crop; on other
machines that is done by `wdsprep.loading.streaming`.

In: Image shards, a model and a recipe.
Out: A latent dataset with the same keys; or the same arrays for a trainer that waits for them.
"""

from wdsprep.encoding.models.presets import PRESETS

MODELS = tuple(PRESETS)
"""Models that have a name of their own."""
LATENTS = ("auto", "sample", "mean", "moments", "none")
"""The kinds of latents that may be kept of the VAE's distribution. `auto` is a sample, where there
is one. With `none` no image is opened: only text is encoded."""
TEXTS = ("emb", "tokens", "none")
"""The kinds of text that may be made of a caption."""
DTYPES = ("auto", "fp16", "bf16", "fp32")
"""Dtypes of the models, not of what is stored; `auto` goes by the device, and is chosen before the
work."""
HALF, TF32 = "half", "tf32"
CHOSEN_DTYPES = (HALF, TF32, "half+fp16", "half+tf32", "half+fp32")
"""Further dtypes that `auto` becomes on a GPU. With `half` each text encoder has its own half
precision; after a plus comes the precision of the VAE, as in `half+tf32`."""
