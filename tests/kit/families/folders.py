"""What a pipeline's folder says of itself, and the whole pipeline that diffusers makes of it."""

import contextlib
import json
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
from safetensors.torch import load_file


def class_of(folder: Path, part: str | None = None) -> str:
    """The class of the pipeline, or of a part of it."""
    listed = json.loads((folder / "model_index.json").read_text())
    return str(listed[part][1] if part else listed["_class_name"])


def denoiser_of(folder: Path) -> str:
    return "unet" if (folder / "unet").is_dir() else "transformer"


def pipeline_class(name: str) -> Any:
    with quiet():
        return getattr(diffusers, f"{name}Pipeline")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Diffusers warns of what it uses itself: with Chroma of a class of its own, with Kolors, which
    cannot even be imported where warnings are errors, of a function of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


class StopError(Exception):
    """A pipeline has come as far as was asked for."""


@cache
def whole_pipeline(folder: Path) -> Any:
    """In fp32. Its denoiser is loaded by hand: without accelerate diffusers refuses Krea2's."""
    part = denoiser_of(folder)
    with quiet():
        kind = getattr(diffusers, class_of(folder, part))
        denoiser = kind.from_config(kind.load_config(str(folder / part)))
        denoiser.load_state_dict(load_file(folder / part / "diffusion_pytorch_model.safetensors"))
        pipeline = getattr(diffusers, class_of(folder)).from_pretrained(
            str(folder), **{part: denoiser.float().eval()}, low_cpu_mem_usage=False
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
