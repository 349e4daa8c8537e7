"""The classes that the parts of a pipeline may have.

A pipeline's index names a library and a class for each part, and the class then loads a folder as
it likes: a pipeline in the place of a tokenizer would read an index of its own, and run a class
that lies beside it. So each role has base classes, and nothing is loaded by another. What can be
told by names is refused without an import, before anything is fetched.
"""

import importlib
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wdsprep.encoding.models.config_files import NO_CODE
from wdsprep.errors import UsageError, WorkError
from wdsprep.text import shortened

if TYPE_CHECKING:
    from wdsprep.encoding.models.pipeline_parts import Component

NETWORKS = ("PreTrainedModel",)
TOKENIZERS = ("PreTrainedTokenizerBase", "ProcessorMixin")
PROCESSORS = (*TOKENIZERS, "ImageProcessingMixin", "FeatureExtractionMixin")
"""Base classes of transformers; those in diffusers' own pipelines, as Kolors', derive from them."""
LOADS_OTHERS = re.compile("Pipeline|^Auto")
"""Matches the names of classes that find out from files of the model what to load."""


def bases_of(part: "Component") -> tuple[str, ...]:
    """Return the names of base classes, one of which a part of a pipeline has to have."""
    if part.has_weights:
        return NETWORKS
    return TOKENIZERS if "tokenizer" in part.name else PROCESSORS


def check_names(what: str, kind: object, parts: Iterable["Component"]) -> None:
    """Raise UsageError if a pipeline or a part has a class that would run code of the model.

    The classes are judged by their names, without an import.
    """
    inside = _find_diffusers().parent / "pipelines"
    packages = {path.name for path in inside.iterdir() if path.is_dir()}
    foreign = (
        [] if isinstance(kind, str | None) else [f"model_index.json names {shortened(str(kind))}"]
    )
    foreign += [f"{part.library}.{part.kind}" for part in parts if not _is_allowed(part, packages)]
    if foreign:
        raise UsageError(
            f"{what} wants to run code that comes with it (trust_remote_code: "
            f"{shortened(foreign[0])}), {NO_CODE}"
        )


def check_known(what: str, kind: str) -> None:
    """Raise UsageError if diffusers has no pipeline of this name, without importing it."""
    if f'"{kind}"' not in _find_diffusers().read_text():
        raise UsageError(
            f"{what} is {shortened(kind)}, which the diffusers here does not know: install a newer "
            "one, or add --text none to encode the images alone"
        )


def _find_diffusers() -> Path:
    found = find_spec("diffusers")
    if found is None or found.origin is None:
        raise WorkError("diffusers is not installed here, which has the code of pipelines")
    return Path(found.origin)


def _is_allowed(part: "Component", packages: set[str]) -> bool:
    """Return whether a part has a class of transformers, or of a pipeline's package in diffusers.

    Other classes of diffusers are not text encoders or tokenizers. Classes such as Auto*, which
    find out from files of the model what to load, are not allowed.
    """
    is_library = part.library == "transformers" or part.library in packages
    are_names = all(map(str.isidentifier, part))
    return is_library and are_names and not LOADS_OTHERS.search(part.kind)


def is_ported(part: "Component") -> bool:
    """Return whether diffusers has the class of a part, in place of code of the model's authors."""
    return part.library != "transformers"


def class_of(part: "Component") -> Any:
    """Import and return the class that a pipeline's index names for a part.

    Raise WorkError if the libraries here lack the class, and UsageError if it derives from none of
    the base classes for such a part.
    """
    library = "transformers" if not is_ported(part) else f"diffusers.pipelines.{part.library}"
    try:
        found = getattr(importlib.import_module(library), part.kind)
        _ = getattr(found, "from_pretrained", None)  # what stands in for a class says what it lacks
    except (AttributeError, ImportError) as error:
        raise WorkError(
            f"{part.name} is a {shortened(part.kind)} of {part.library}, which the diffusers and "
            "transformers here do not have: install newer ones"
        ) from error
    transformers = importlib.import_module("transformers")
    bases = bases_of(part)
    allowed = tuple(getattr(transformers, name) for name in bases)
    if not (isinstance(found, type) and issubclass(found, allowed)):
        raise UsageError(
            f"{part.name} is a {part.kind}, not a {' or '.join(bases)}, so it could run code "
            f"that comes with the model, {NO_CODE}"
        )
    return found
