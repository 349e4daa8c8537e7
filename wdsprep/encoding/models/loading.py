"""Networks and tokenizers from the files of a model. Nothing that a model brings along is run."""

import contextlib
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from wdsprep.encoding.models.configs import MOST_STATES, MOST_WIDTH
from wdsprep.encoding.models.find import Model
from wdsprep.encoding.models.parts import variant_of
from wdsprep.encoding.models.weights import tensors_in
from wdsprep.errors import UsageError, WdsprepError, WorkError
from wdsprep.text import plural

SPARE_NUMBERS, SPARE_PIECES = 1 << 24, 20_000
"""How much a network may have beside the tensors of its files: computed tables, and modules."""
LONGEST = 1 << 18
"""The most tokens that a tokenizer may pad to; what claims more has no limit."""
NO_LIMIT = int(1e30)
"""The length that transformers writes for a tokenizer without a limit."""


def load_vae(
    model: Model, dtype: Any, needed: tuple[str, ...] = ("encoder.", "quant_conv.")
) -> Any:
    import diffusers

    # Without low_cpu_mem_usage, which needs accelerate, diffusers loads just as well.
    options = {"torch_dtype": dtype, "low_cpu_mem_usage": False}
    return load_weights(getattr(diffusers, model.vae_kind), model, model.vae, options, needed)


def load_tower(kind: Any, model: Model, folder: str, dtype: Any) -> Any:
    """Load a text encoder."""
    return load_weights(kind, model, folder, {"dtype": dtype, "trust_remote_code": False})


class HasFiles(Protocol):
    """A model whose files lie in a folder."""

    @property
    def folder(self) -> str: ...
    @property
    def files(self) -> Sequence[str]: ...


def load_weights(
    kind: Any,
    model: HasFiles,
    folder: str,
    options: Mapping[str, Any],
    needed: tuple[str, ...] = ("",),
) -> Any:
    """Libraries make up what a file lacks, and merely log it: here it is an error."""
    files = [name for name in model.files if name.rpartition("/")[0] == folder]
    path = Path(model.folder, folder)
    weights = [Path(model.folder, name) for name in files if name.endswith(".safetensors")]
    with library_at_work(path, kind), held_to_weights(weights):
        made, info = kind.from_pretrained(
            str(path),
            variant=variant_of(files),
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    lost = sorted(name for name in info["missing_keys"] if name.startswith(needed))
    if lost:
        raise WorkError(
            f"{path} lacks {plural(len(lost), 'tensor')} of {kind.__name__}, such as {lost[0]}"
        )
    return made


def load_tokenizer(model: Model, kind: Any, folder: str) -> Any:
    path = Path(model.folder, folder)
    with library_at_work(path, kind):
        made = kind.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        own = getattr(made, "tokenizer", made)  # of a processor
        if getattr(own, "model_max_length", 0) > LONGEST:
            own.model_max_length = NO_LIMIT
        return made


def load_config(model: Model, kind: Any, folder: str) -> Any:
    """Load what stands for a text encoder without its weights."""
    path = Path(model.folder, folder)
    with library_at_work(path, kind):
        config = kind.config_class.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
        own = config.get_text_config()
        width = own.hidden_size
        layers = getattr(own, "num_hidden_layers", None) or own.num_layers
    for name, number, most in (
        ("hidden_size", width, MOST_WIDTH),
        ("hidden_size times layers", width * layers, MOST_STATES),
    ):
        if not isinstance(number, int) or not 0 < number <= most:
            raise UsageError(
                f"{path / 'config.json'} says {name} {number}, and no text encoder has over "
                f"{most:,}: choose another --model"
            )
    return config


@contextlib.contextmanager
def library_at_work(path: Path, kind: Any) -> Iterator[None]:
    """Turn whatever a library raises over a model's files into one line that names them.

    A stranger wrote these files, and may make the library raise anything.
    """
    try:
        yield
    except WdsprepError:
        raise
    except Exception as error:
        raise cannot_load(path, kind, error) from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise cannot_load(path, kind, error) from error


def is_panic(error: BaseException) -> bool:
    """Return whether a library written in Rust gave up, which is no Exception."""
    return type(error).__name__ == "PanicException"


def cannot_load(path: Path, kind: Any, error: BaseException) -> WorkError:
    line = cause_of(error)
    if "ignore_mismatched_sizes" in line:  # a table that was logged has more, and is left out
        line = "its weights are of other sizes than its config.json says"
    return WorkError(f"{path} cannot be loaded as {kind.__name__}: {line}")


def cause_of(error: BaseException) -> str:
    """Return the first line of an error, with its class where the text alone says little."""
    line = str(error).strip().partition("\n")[0]
    plain = isinstance(error, OSError | ValueError | RuntimeError) and line
    return line if plain else f"{type(error).__name__}: {line}".removesuffix(": ")


@contextlib.contextmanager
def held_to_weights(files: Sequence[Path]) -> Iterator[None]:
    """Refuse a network that is built larger in this thread than its files are.

    A number in a config could take all memory, or never end, before anything is read.
    Embeddings may be built twice and tied.
    """
    from torch.nn.modules import module

    tensors = [entry for file in files for entry in tensors_in(file)]
    numbers = 2 * sum(entry.numel for entry in tensors) + SPARE_NUMBERS
    pieces = 16 * len(tensors) + SPARE_PIECES
    thread, seen = threading.get_ident(), set[tuple[int, str]]()

    def count(owner: Any, name: str, piece: Any) -> None:
        nonlocal numbers
        if threading.get_ident() != thread or (id(owner), name) in seen:
            return
        seen.add((id(owner), name))
        numbers -= piece.numel() if hasattr(piece, "numel") else 0
        if numbers < 0 or len(seen) > pieces:
            raise ValueError("its config.json describes a larger network than its weights are of")

    hooks = [
        module.register_module_parameter_registration_hook(count),
        module.register_module_buffer_registration_hook(count),
        module.register_module_module_registration_hook(count),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def silence() -> None:
    """Workers' stderr is the user's: what these libraries say there is of no use to one."""
    import diffusers
    import transformers

    warnings.filterwarnings("ignore", ".*torch.jit.script", FutureWarning)  # Kolors' encoder
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
