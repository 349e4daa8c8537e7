"""The check whether a GPU has room for the networks of images and text: together or in turn."""

from pathlib import Path

import torch

from wdsprep.encoding.models.base import DTYPES
from wdsprep.encoding.models.batch_size import TEXT_NBYTES, free_nbytes, peak_nbytes
from wdsprep.encoding.models.encode_prompt import dtype_of_tower
from wdsprep.encoding.models.find_model import Model
from wdsprep.encoding.models.weights import tensors_in
from wdsprep.encoding.recipe_options import Recipe
from wdsprep.errors import WorkError
from wdsprep.text import human_bytes


def is_split(model: Model, recipe: Recipe, device: torch.device, itemsize: int) -> bool:
    """Return whether a GPU has room for the networks of images and text only in turn.

    Raise WorkError if one of them alone does not fit.
    """
    if device.type != "cuda":
        return False
    images = 0
    if not recipe.is_of_text:
        images = weights_nbytes(model, model.vae, itemsize)
        images += peak_nbytes(1, recipe.resolution, itemsize)
    text = _text_nbytes(model, recipe) if recipe.text == "emb" else 0
    free = free_nbytes(device)
    if images + text <= free:
        return False
    if max(images, text) > free:
        raise WorkError(
            f"{model.name} needs {human_bytes(max(images, text))} of a GPU "
            f"({human_bytes(images)} for images, {human_bytes(text)} for text), which has "
            f"{human_bytes(free)} free here: use a larger GPU, or give --text none or tokens"
        )
    return True


def _text_nbytes(model: Model, recipe: Recipe) -> int:
    pipeline = model.pipeline
    parts = [part for part in pipeline.components if part.has_weights] if pipeline else []
    towers = [(tower.folder, "CLIPTextModel") for tower in model.towers]
    towers += [(part.name, part.kind) for part in parts]
    of = pipeline.kind if pipeline else ""
    dtypes = {name: dtype_of_tower(recipe.dtype, of, kind) for name, kind in towers}
    weights = (
        weights_nbytes(model, name, DTYPES[dtype].itemsize) for name, dtype in dtypes.items()
    )
    return sum(weights) + TEXT_NBYTES


def weights_nbytes(model: Model, folder: str, itemsize: int) -> int:
    """Return the bytes that the weights in a folder of a model take in memory.

    The headers of their files tell the numbers of values.
    """
    names = [name for name in model.files if name.rpartition("/")[0] == folder]
    files = [Path(model.folder, name) for name in names if name.endswith(".safetensors")]
    return itemsize * sum(entry.numel for path in files for entry in tensors_in(path))
