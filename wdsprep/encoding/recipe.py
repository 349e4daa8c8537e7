"""What is made of an image and its caption: the settings of encoding that decide its bytes."""

from dataclasses import dataclass

from wdsprep.limits import MAX_AREA, MAX_NBYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What is made of an image and its caption."""

    resolution: int = 256
    latents: str = "sample"
    """sample, mean or moments"""
    text: str = "emb"
    """emb, tokens or none"""
    dtype: str = "fp32"
    """fp16, bf16 or fp32: of the models, not of what is stored"""
    seed: int = 0
    compile: bool = False
    max_area: int = MAX_AREA
    max_nbytes: int = MAX_NBYTES
