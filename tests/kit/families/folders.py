"""What a pipeline's folder says of itself."""

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers


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
