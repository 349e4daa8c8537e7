"""Networks and tokenizers, loaded from the files of a model without running its code, and compiled.

`compile_network` compiles a network for each shape that it is given. By default, torch.compile
compiles a function eight times at most, and computes all further shapes uncompiled without telling
the user. Here it may be more: each shape of a run in batches of the full size, of half of it and so
on, and each once more if another thread meanwhile changes what fp32 means in this process
(`encoder.precision_of`).
"""

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wdsprep.encoding.models.base import MAX_BATCH
from wdsprep.encoding.models.config_files import MOST_STATES, MOST_WIDTH, unsuitable
from wdsprep.encoding.models.find_model import Model
from wdsprep.encoding.models.model_files import LocalModel, cause_of, tensors_in, variant_of
from wdsprep.encoding.recipe_options import MOST_COMPILED
from wdsprep.errors import WdsprepError, WorkError
from wdsprep.text import plural

SPARE_NUMBERS, SPARE_PIECES = 1 << 24, 20_000
"""What a network may have beside the tensors of its files: numbers of tables, and modules."""
LONGEST = 1 << 18
"""The most tokens that a tokenizer may pad to; one that claims more is taken to have no limit."""
NO_LIMIT = int(1e30)
"""The length that transformers writes for a tokenizer without a limit."""


def load_vae(
    model: Model, dtype: Any, needed: tuple[str, ...] = ("encoder.", "quant_conv.")
) -> Any:
    import diffusers

    # Without low_cpu_mem_usage, which needs accelerate, diffusers loads just as well.
    kind, options = getattr(diffusers, model.vae_kind), {"low_cpu_mem_usage": False}
    return _load_weights(kind, model, model.vae, needed, torch_dtype=dtype, **options)


def load_tower(kind: Any, model: LocalModel, folder: str, dtype: Any) -> Any:
    """Load a network of transformers from its folder in a model."""
    return _load_weights(kind, model, folder, ("",), dtype=dtype, trust_remote_code=False)


def _load_weights(
    kind: Any, model: LocalModel, folder: str, needed: tuple[str, ...], **options: Any
) -> Any:
    """Load a network from the safetensors in a folder of a model.

    Raise WorkError if tensors are missing whose names begin with one of `needed`: the libraries
    would make them up and only log that.
    """
    path, weights = Path(model.folder, folder), model.weights_in(folder)
    with explain_load_errors(path, kind), limit_to_weights(weights):
        network, info = kind.from_pretrained(
            str(path),
            variant=variant_of(path.name for path in weights),
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    if lost := sorted(name for name in info["missing_keys"] if name.startswith(needed)):
        raise WorkError(
            f"{path} lacks {plural(len(lost), 'tensor')} of {kind.__name__}, such as {lost[0]}"
        )
    return network


def load_tokenizer(model: LocalModel, kind: Any, folder: str) -> Any:
    path = Path(model.folder, folder)
    with explain_load_errors(path, kind):
        made = kind.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        own = getattr(made, "tokenizer", made)  # of a processor
        if getattr(own, "model_max_length", 0) > LONGEST:
            own.model_max_length = NO_LIMIT
        return made


def load_config(model: Model, kind: Any, folder: str) -> Any:
    """Load the config of a text encoder, and check the sizes in it."""
    path = Path(model.folder, folder)
    with explain_load_errors(path, kind):
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
            what = f"{name} {number}, and no text encoder has over {most:,}"
            raise unsuitable(f"{path / 'config.json'} says {what}")
    return config


def explain_load_errors(path: Path, kind: Any) -> contextlib.AbstractContextManager[None]:
    """Turn any error that files of a model raise while they are read into a WorkError of one line.

    `kind` is the class that they are loaded as, or its name. Anyone may have written these files,
    and they can make a library raise any error.
    """

    def explain(error: BaseException) -> WorkError:
        line = cause_of(error)
        if "ignore_mismatched_sizes" in line:  # a table that was logged has more, and is left out
            line = "its weights are of other sizes than its config.json says"
        return WorkError(f"{path} cannot be loaded as {getattr(kind, '__name__', kind)}: {line}")

    return explain_errors(explain)


@contextlib.contextmanager
def explain_errors(
    explain: Callable[[BaseException], WdsprepError],
    is_left: Callable[[BaseException], bool] = lambda _error: False,
) -> Iterator[None]:
    """Turn any error in the context into the one that `explain` makes of it.

    Those that `is_left` names and those of wdsprep stay as they are. The panic of a library in Rust
    is an error too, though it is not an Exception.
    """
    try:
        yield
    except WdsprepError:
        raise
    except BaseException as error:
        is_error = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if not is_error or is_left(error):
            raise
        raise explain(error) from error


@contextlib.contextmanager
def limit_to_weights(files: Sequence[Path]) -> Iterator[None]:
    """Raise ValueError if a network that this thread builds in the context exceeds its files.

    A large number in a config could take all memory, or endless time, before any weights are read.
    Some more than twice the numbers in the files are allowed, since embeddings may be built twice
    and then tied.
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
            raise ValueError("its config.json describes a larger network than its weights have")

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


def silence_libraries() -> None:
    """Silence the warnings and progress bars of diffusers and transformers.

    A worker's stderr is shown to the user, to whom they are of no use.
    """
    import diffusers
    import transformers

    warnings.filterwarnings("ignore", ".*torch.jit.script", FutureWarning)  # Kolors' encoder
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()


MOST_VARIANTS = MOST_COMPILED * 2 * MAX_BATCH.bit_length()
NAMES = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit")
OLD_NAMES = ("cache_size_limit", "accumulated_cache_size_limit", "fail_on_cache_limit_hit")
"""The limits for one function and for all together, and whether exceeding them is an error."""
_log = logging.getLogger("wdsprep")


def compile_network(network: nn.Module) -> Callable[[Tensor], Any]:
    """Compile a network in up to MOST_VARIANTS. Batches of further shapes are computed without."""
    compiled, uncompiled = torch.compile(network, dynamic=False), set[torch.Size]()

    def compute(batch: Tensor) -> Any:
        if batch.shape in uncompiled:
            return network(batch)
        # A trainer in this process keeps its own limits, which had other names in torch 2.6.
        config: Any = torch._dynamo.config
        *most, is_error = NAMES if hasattr(config, NAMES[0]) else OLD_NAMES
        limits = {name: max(MOST_VARIANTS, getattr(config, name)) for name in most}
        try:
            with config.patch({**limits, is_error: True}):
                return compiled(batch)
        except Exception as error:
            if not type(error).__name__.endswith("LimitHit"):
                raise
        if not uncompiled:
            _log.warning(
                "--compile: %d variants are compiled, so batches of further shapes (%s) are "
                "computed uncompiled, which is slower",
                MOST_VARIANTS,
                "x".join(map(str, batch.shape)),
            )
        uncompiled.add(batch.shape)
        return network(batch)

    return compute


def check_compiler(device: torch.device) -> None:
    """Raise WorkError if torch.compile does not work here, which the first batch would show else.

    Where networks take turns on a GPU, that would be in the middle of a shard.
    """
    try:
        torch.compile(nn.ReLU(), dynamic=False)(torch.ones(1, device=device))
    except Exception as error:
        cause = cause_of(getattr(error, "inner_exception", error))  # of what compiles for torch
        raise WorkError(
            f"--compile does not work here ({cause}): install a C++ compiler, and Triton "
            "for a GPU, or leave --compile out"
        ) from error
