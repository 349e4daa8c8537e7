"""Models: found by name, loaded onto a device, run in batches.

`find_model` says which parts and files a model has, what its VAE's rule is (`vae_rules`) and by
which digest it is known (`model_files`, of the hub or a folder); `presets` are those with a name.
None of these imports torch.

`encoder` is a loaded model (`base` has its inputs and outputs), and says whether both kinds of
network fit together: a VAE (`vae`), without what changes nothing, and for text one of the
`text_encoders`: one CLIPTextModel, or the pipeline's own code (`encode_prompt`). `load_networks`
loads and compiles them. Before that, a `dry_run` without networks counts the tokens of captions
and tells the shapes of arrays. `families` has what no signature tells, and `noise` the noise of
each key. `references` prepares reference images as an edit pipeline does. `device` keeps one device
busy, with batches of a size that fits, and says what an encoder has to do.
"""
