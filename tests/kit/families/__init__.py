"""Small random pipelines of every family, and what diffusers alone makes of text and images.

    small("Sana", folder)                 a pipeline's folder, under a megabyte
    prompt_of(folder, "a cat")            the outputs of its encode_prompt, by name
    negative_of(folder)                   those of its own unconditional prompt
    latent_of(folder, pixels)             the latent that its denoiser is trained on
    denoised(folder, outputs)             what its small denoiser makes of such text

Nothing here imports wdsprep, but for the vocabulary of its toy model. No class is left out but PRX,
which cleans captions with ftfy and fails without it.
"""

from collections.abc import Collection, Iterable
from typing import Any

import diffusers
import pytest
import transformers

from tests.kit.families.pipelines import EDITS, FAMILIES, small
from tests.kit.families.reference import denoised, latent_of, negative_of, prompt_of

for library in (diffusers, transformers):
    library.utils.logging.disable_progress_bar()

NAMES = tuple(FAMILIES)
OF_EACH_VAE = ("StableDiffusion", "Flux", "Sana", "QwenImage", "Flux2Klein", "HunyuanImage")
"""A family for each VAE: those of the others differ in the numbers of their normalisation alone."""

QUICK = ("StableDiffusionXL", "QwenImage")
"""Those that the quick half of the tests looks at: two lengths of text, masked and not."""


def each_family(names: Iterable[str] = NAMES, *, quick: Collection[str] = QUICK) -> list[Any]:
    """Return the names as parameters of a test, of which all but a few are for the whole run."""
    marks = {name: () if name in quick else pytest.mark.system for name in names}
    return [pytest.param(name, marks=marks[name]) for name in names]


__all__ = ["EDITS", "NAMES", "OF_EACH_VAE", "QUICK", "denoised", "each_family"]
__all__ += ["latent_of", "negative_of", "prompt_of", "small"]
