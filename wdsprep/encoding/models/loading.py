"""Networks and tokenizers from the files of a model. Nothing that a model brings along is run."""

import importlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wdsprep.encoding.models.find import Model
from wdsprep.encoding.models.parts import Component, variant_of
from wdsprep.errors import WorkError
from wdsprep.text import plural


def load_vae(
    model: Model, dtype: Any, needed: tuple[str, ...] = ("encoder.", "quant_conv.")
) -> Any:
    import diffusers

    # Without low_cpu_mem_usage, which needs accelerate, diffusers loads just as well.
    options = {"torch_dtype": dtype, "low_cpu_mem_usage": False}
    return load_weights(getattr(diffusers, model.vae_kind), model, model.vae, options, needed)


def load_weights(
    kind: Any,
    model: Model,
    folder: str,
    options: Mapping[str, Any],
    needed: tuple[str, ...] = ("",),
) -> Any:
    """Libraries make up what a file lacks, and merely log it: here it is an error."""
    from safetensors import SafetensorError

    files = [name for name in model.files if name.rpartition("/")[0] == folder]
    path = Path(model.folder, folder)
    try:
        made, info = kind.from_pretrained(
            str(path),
            variant=variant_of(files),
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise cannot_load(path, kind, error) from error
    lost = sorted(name for name in info["missing_keys"] if name.startswith(needed))
    if lost:
        raise WorkError(
            f"{path} lacks {plural(len(lost), 'tensor')} of {kind.__name__}, such as {lost[0]}"
        )
    return made


def load_tokenizer(model: Model, kind: Any, folder: str) -> Any:
    path = Path(model.folder, folder)
    try:
        return kind.from_pretrained(str(path), local_files_only=True)
    except (ImportError, KeyError, OSError, TypeError, ValueError) as error:
        raise cannot_load(path, kind, error) from error


def cannot_load(path: Path, kind: Any, error: Exception) -> WorkError:
    line = str(error).strip().partition("\n")[0]
    if "ignore_mismatched_sizes" in line:  # a table that was logged has more, and is left out
        line = "its weights are of other sizes than its config.json says"
    return WorkError(f"{path} cannot be loaded as {kind.__name__}: {line}")


def class_of(component: Component) -> Any:
    """The class of transformers or diffusers that a pipeline's index names."""
    library = component.library
    own = library in ("diffusers", "transformers")
    try:
        module = importlib.import_module(library if own else f"diffusers.pipelines.{library}")
        return getattr(module, component.kind)
    except (AttributeError, ImportError) as error:
        raise WorkError(
            f"{component.name} is a {component.kind} of {library}, which the diffusers and "
            "transformers here do not have: a newer one may"
        ) from error


def silence() -> None:
    """Workers' stderr is the user's: what these libraries say there is of no use to one."""
    import diffusers
    import transformers

    warnings.filterwarnings("ignore", ".*torch.jit.script", FutureWarning)  # Kolors' encoder
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
