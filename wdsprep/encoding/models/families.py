"""What pipelines of diffusers do with text, as far as their signatures do not say it.

A pipeline's own `encode_prompt` makes the arrays, and `__call__` says which of its outputs the
denoiser wants: those are stored. The tables here have what only the denoiser's code tells, and one
output whose batch is not the first axis. A class that no table lists follows the rules alone.
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
        "QwenImage21Pipeline",
        "QwenImageEditPipeline",
        "QwenImageEditPlusPipeline",
        "QwenImagePipeline",
        "SanaPipeline",
        "SanaSprintPipeline",
    }
)
"""Classes whose denoisers see no token that the mask leaves out, so it need not be stored."""
BY_ZEROS = frozenset({"AuraFlowPipeline", "OvisImagePipeline"})
"""Classes whose embeddings are exact zeros after the last token, which a trainer can put back."""
BATCH_AXIS = {"prompt_embeds_llama3": 1}
"""The axis of the batch, by the name of an output, if it is not the first."""
IN_ONE_PRECISION = frozenset({"StableDiffusion3Pipeline"})
"""Classes that put the states of several encoders into one array."""
GENERATES = frozenset({"GlmImagePipeline"})
"""Classes whose denoisers want tokens that a language model generates from the prompt."""
NOT_OF_TEXT_ALONE = frozenset(
    {
        *("aesthetic_score", "control_image", "image_guidance_scale", "mask_image", "noise_level"),
        *("prior_num_inference_steps", "strength"),
    }
)
"""Arguments of `__call__` of classes that make images from more than a prompt."""
EDITS = re.compile("Edit|I2I")
"""Matches the names of classes whose `encode_prompt` uses an image beside the prompt."""
FIRST = "prompt_embeds"


def is_embedding(name: str) -> bool:
    """Return whether a parameter of `__call__` takes an embedding or a mask of the prompt.

    Parameters for the negative prompt and for IP adapters do not count.
    """
    wanted = re.search(r"prompt_(embeds|attention_mask|embeds_mask)|^attention_mask$", name)
    return wanted is not None and not name.startswith(("negative_", "ip_adapter"))


def is_mask(name: str) -> bool:
    return "mask" in name


def member_name(name: str, first: str) -> str:
    """Return the file name in a sample for an output of `encode_prompt`, such as emb.npy.

    `first` is the name of the first embedding.
    """
    if name == first:
        return "emb.npy"
    if is_mask(name):
        return f"emb{_number(name)}_mask.npy"
    if name.startswith("pooled_"):
        return f"pooled{_number(name)}.npy"
    if number := _number(name):
        return f"emb{number}.npy"
    return f"{name.removeprefix(FIRST).strip('_') or name}.npy"


def _number(name: str) -> str:
    """Return the number at the end of a name, such as `_2` of prompt_embeds_2, or "" if none."""
    found = re.search(r"_\d+(?=_mask$|$)", name)
    return found[0] if found else ""


def half_precision_of(network: str) -> str:
    """Return the half precision that a network of this class may run in.

    Except in CLIP, activations leave the range of fp16: T5's are clipped there, and Gemma's
    documentation forbids fp16.
    """
    return "fp16" if network.startswith("CLIP") else "bf16"
