"""Models: found by name, loaded onto a device, run in batches.

`find_model` says which files a model has (`pipeline_parts`, in `model_files` of the hub or a
folder), what its VAE's rule is (`vae_rules`) and by which digest it is known (`weights`); `presets`
are those with a name. None of these imports torch.

`encoder` is a loaded model (`base` has its inputs and outputs): a VAE (`vae`), and for text
`clip_text`, or `pipeline_text`, which calls the pipeline's own code (`encode_prompt`). Before that,
a `dry_run` without networks counts the tokens of captions (`caption_tokens`), and what tokenizers
made there is used again (`tokenizer_calls`). `families` has what no signature tells. `device` keeps
one device busy, with batches of a size that fits (`batch_size`); `gpu_memory` says whether both
kinds of network fit together. `division_by_one` makes a VAE faster without another
result. `decoder` turns latents back into pictures.
"""
