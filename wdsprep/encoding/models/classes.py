"""Which classes the parts of a pipeline may be of.

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

from wdsprep.encoding.models.configs import NO_CODE
from wdsprep.errors import UsageError, WorkError
from wdsprep.text import shortened

if TYPE_CHECKING:
    from wdsprep.encoding.models.parts import Component

NETWORKS = ("PreTrainedModel",)
TOKENIZERS = ("PreTrainedTokenizerBase", "ProcessorMixin")
PROCESSORS = (*TOKENIZERS, "ImageProcessingMixin", "FeatureExtractionMixin")
"""Base classes of transformers; those in diffusers' own pipelines, as Kolors', derive from them."""
LOADS_OTHERS = re.compile("Pipeline|^Auto")
"""Matches the names of classes that find out from files of the model what to load."""


def bases_of(part: "Component") -> tuple[str, ...]:
    """Return the names of the classes of which a part in this role has to be one."""
    if part.has_weights:
        return NETWORKS
    return TOKENIZERS if "tokenizer" in part.name else PROCESSORS


def check_names(what: str, kind: object, parts: Iterable["Component"]) -> None:
    """Check the names of the pipeline's class and of its parts', without an import."""
    inside = _library().parent / "pipelines"
    packages = {path.name for path in inside.iterdir() if path.is_dir()}
    foreign = (
        [] if isinstance(kind, str | None) else [f"model_index.json names {shortened(str(kind))}"]
    )
    foreign += [f"{part.library}.{part.kind}" for part in parts if not _is_own(part, packages)]
    if foreign:
        raise UsageError(
            f"{what} wants to run code that comes with it (trust_remote_code: "
            f"{shortened(foreign[0])}), {NO_CODE}"
        )


def check_known(what: str, kind: str) -> None:
    """Check that diffusers has a pipeline of that name, without an import."""
    if f'"{kind}"' not in _library().read_text():
        raise UsageError(
            f"{what} is {shortened(kind)}, which the diffusers here does not know: install a newer "
            "one, or add --text none to encode the images alone"
        )


def _library() -> Path:
    found = find_spec("diffusers")
    if found is None or found.origin is None:
        raise WorkError("diffusers is not installed here, which has the code of pipelines")
    return Path(found.origin)


def _is_own(part: "Component", packages: set[str]) -> bool:
    """Return whether a part may be a class of transformers or of a pipeline's package.

    Other classes of diffusers are no text encoders and no tokenizers.
    """
    is_library = part.library == "transformers" or part.library in packages
    are_names = all(map(str.isidentifier, part))
    return is_library and are_names and not LOADS_OTHERS.search(part.kind)


def is_ported(part: "Component") -> bool:
    """Return whether diffusers has the class of this part, in place of its authors' code."""
    return part.library != "transformers"


def class_of(part: "Component") -> Any:
    """Return the class that a pipeline's index names, which is of the part's role."""
    library = "transformers" if not is_ported(part) else f"diffusers.pipelines.{part.library}"
    try:
        found = getattr(importlib.import_module(library), part.kind)
        _ = getattr(found, "from_pretrained", None)  # what stands in for a class says what it lacks
    except (AttributeError, ImportError) as error:
        raise WorkError(
            f"{part.name} is a {shortened(part.kind)} of {part.library}, which the diffusers and "
            "transformers here do not have: a newer one may"
        ) from error
    transformers = importlib.import_module("transformers")
    bases = bases_of(part)
    allowed = tuple(getattr(transformers, name) for name in bases)
    if not (isinstance(found, type) and issubclass(found, allowed)):
        raise UsageError(
            f"{part.name} is a {part.kind}, which is no {' or '.join(bases)}, so it could run code "
            f"that comes with the model, {NO_CODE}"
        )
    return found
