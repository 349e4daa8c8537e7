"""What pipelines of diffusers do with text, as far as their signatures do not say it.

A pipeline's own `encode_prompt` makes the arrays, and `__call__` says which of its outputs the
denoiser wants: those are stored. The tables here have what only the denoiser's code tells, and one
output whose batch is not the first axis. A class that no table lists follows the rules alone.
"""

import re

from wdsprep.encoding import HALF

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
NOT_OF_TEXT_ALONE = frozenset(
    {
        *("aesthetic_score", "control_image", "image_guidance_scale", "mask_image", "noise_level"),
        *("prior_num_inference_steps", "prior_token_ids", "strength"),
    }
)
"""Arguments of `__call__` of classes that make images from more than a prompt. A language model
generates the tokens of a prior from the prompt."""
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
    numbered = re.search(r"_\d+(?=_mask$|$)", name)
    number = numbered[0] if numbered else ""  # such as the _2 of prompt_embeds_2
    if name == first:
        stem = "emb"
    elif is_mask(name):
        stem = f"emb{number}_mask"
    elif name.startswith("pooled_"):
        stem = f"pooled{number}"
    else:
        stem = f"emb{number}" if number else name.removeprefix(FIRST).strip("_") or name
    return f"{stem}.npy"


def dtype_of_tower(dtype: str, pipeline: str, tower: str) -> str:
    """Return the dtype of a text encoder; `half` stands for the half precision of its class.

    Except in CLIP, activations leave the range of fp16: T5's are clipped there, and Gemma's
    documentation forbids fp16.
    """
    text = dtype.partition("+")[0]
    if text != HALF:
        return text
    return "fp16" if tower.startswith("CLIP") and pipeline not in IN_ONE_PRECISION else "bf16"
