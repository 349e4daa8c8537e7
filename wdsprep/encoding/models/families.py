"""What pipelines of diffusers do with text that their signatures do not say.

A pipeline's own `encode_prompt` makes the arrays, and `__call__` says which of its outputs the
denoiser wants: those are stored. Left for a table is what only the denoiser's code tells, and one
output whose batch is not the first axis. A class that no table names works by the rules alone.
"""

import re

BY_MASK = frozenset(
    {
        "ChromaPipeline",  # its mask keeps one pad
        "HunyuanImagePipeline",
        "Krea2Pipeline",
        "Lumina2Pipeline",
        "LuminaPipeline",
        "PRXPipeline",
        "PixArtAlphaPipeline",
        "PixArtSigmaPipeline",
        "QwenImagePipeline",
        "SanaPipeline",
        "SanaSprintPipeline",
    }
)
"""Their denoisers see no token that the mask leaves out, so what lies there need not be stored."""
BY_ZEROS = frozenset({"AuraFlowPipeline", "OvisImagePipeline"})
"""Their embeddings are exact zeros behind the last token, and a trainer may put those back."""
BATCH_AXIS = {"prompt_embeds_llama3": 1}
"""The axis of the batch, by the name of an output, where it is not the first."""
IN_ONE_PRECISION = frozenset({"StableDiffusion3Pipeline"})
"""They put the states of several encoders into one array."""
GENERATES = frozenset({"GlmImagePipeline"})
"""Their denoisers want what a language model makes up of the prompt."""
NOT_OF_TEXT_ALONE = frozenset(
    {
        *("aesthetic_score", "control_image", "image_guidance_scale", "mask_image", "noise_level"),
        *("prior_num_inference_steps", "strength"),
    }
)
"""Arguments of `__call__` by which a class is known that makes images of more than a prompt."""
EDITS = re.compile("Edit|I2I")
"""Matches the names of classes whose `encode_prompt` looks at an image beside the prompt."""
FIRST = "prompt_embeds"


def is_embedding(name: str) -> bool:
    """Return whether a parameter of `__call__` takes an embedding or mask of the prompt itself.

    Those of the negative prompt and of IP adapters are not meant.
    """
    wanted = re.search(r"prompt_(embeds|attention_mask|embeds_mask)|^attention_mask$", name)
    return wanted is not None and not name.startswith(("negative_", "ip_adapter"))


def is_mask(name: str) -> bool:
    return "mask" in name


def member_of(name: str, first: str) -> str:
    """Return the member that holds an output; `first` is the name of the first embedding."""
    if name == first:
        return "emb.npy"
    if is_mask(name):
        return f"mask{_number(name)}.npy"
    if name.startswith("pooled_"):
        return f"pooled{_number(name)}.npy"
    if number := _number(name):
        return f"emb{number}.npy"
    return f"{name.removeprefix(FIRST).strip('_') or name}.npy"


def _number(name: str) -> str:
    """`_2` of prompt_embeds_2."""
    found = re.search(r"_\d+(?=_mask$|$)", name)
    return found[0] if found else ""


def half_of(network: str) -> str:
    """Return the half precision that a network of this class may run in.

    Beyond CLIP, activations leave the range of fp16: T5's are clipped there, and Gemma's
    documentation forbids it.
    """
    return "fp16" if network.startswith("CLIP") else "bf16"
