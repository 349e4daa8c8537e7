"""The search for a model, whose files are found, fetched and checked before any weights are loaded.

The configs of a model say what it is and which of its files are needed: never the denoiser of a
pipeline, and no text encoder if no text is wanted. A digest tells two models apart. Only
safetensors are read. This module does not import torch: a driver knows the shapes of all latents
that workers will make.

A pipeline's index names a library and a class for each part, and the class then loads a folder as
it likes: a pipeline in the place of a tokenizer would read an index of its own, and run a class
that lies beside it. So each role has base classes, and nothing is loaded by another. What can be
told by names is refused without an import, before anything is fetched.
"""

import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from wdsprep.dataset.npy_arrays import EMB, TOKENS, Field
from wdsprep.encoding.models.config_files import (
    MOST_WIDTH,
    NO_CODE,
    Config,
    fetch_configs,
    read_json,
)
from wdsprep.encoding.models.model_files import (
    Folder,
    LocalModel,
    ModelFiles,
    fetch_files,
    find_files,
    find_on_node,
    variant_of,
    weight_files,
)
from wdsprep.encoding.models.presets import PRESETS
from wdsprep.encoding.models.vae_rules import NO_VAE, VaeRule, add_batch_norm, vae_rule
from wdsprep.errors import UsageError, WorkError
from wdsprep.text import shortened

REPOS = {name: preset.repo for name, preset in PRESETS.items()}
TINY = Path(__file__).parent / "tiny"
TINY_NOTE = (
    "tiny is a toy model that comes with wdsprep, for trials: nothing of use can be trained on "
    "what it makes"
)
LENGTH = 77
ANY_LENGTH = 10**40
"""The largest length that a tokenizer may claim: those without a limit write 10^30."""
INDEX = "model_index.json"
VAE_WEIGHTS = "diffusion_pytorch_model"
TEXT_WEIGHTS = ("model", VAE_WEIGHTS)
"""The names that transformers and diffusers give files of weights."""
TOKENIZER_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".vocab", ".tiktoken")


class Component(NamedTuple):
    """A part of a pipeline, as `model_index.json` names it."""

    name: str
    """the name of the part and of its folder"""
    library: str
    kind: str
    """the class"""

    @property
    def has_weights(self) -> bool:
        """Return whether a part of a pipeline is a network, not a tokenizer or a processor."""
        return not re.search("tokenizer|processor", f"{self.name} {self.kind}", re.IGNORECASE)

    @property
    def is_ported(self) -> bool:
        """Return whether diffusers has its class, in place of code of the model's authors."""
        return self.library != "transformers"

    @property
    def is_of_text(self) -> bool:
        if OTHER_NAME.search(self.name):
            return False
        is_named = bool(TEXT_NAME.search(self.name))
        return is_named or (not self.is_ported and bool(TEXT_KIND.search(self.kind)))


CLIP = (
    Component("text_encoder", "transformers", "CLIPTextModel"),
    Component("tokenizer", "transformers", "CLIPTokenizer"),
)
"""The parts of Stable Diffusion 1 and 2 for text."""
TEXT_NAME = re.compile("text_encoder|tokenizer|processor")
TEXT_KIND = re.compile("TextModel|TextEncoder|EncoderModel|ForCausalLM|Tokenizer")
OTHER_NAME = re.compile(
    "image|vision|siglip|audio|sound|feature_extractor|safety|prompt_enhancer|^pe$|^pe_|^prior_"
)
"""Matches parts that encode no prompt: those for images and sounds, or that rewrite prompts."""
OTHER_CLIP = re.compile("XL|Upscale|Pix2Pix|Un[Cc][Ll][Ii][Pp]|UniDiff|Video|VGen|Marigold|GLIGEN")
"""Classes with one CLIPTextModel that are not used as Stable Diffusion is."""
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
LEFT_OUT = {
    "HiDreamImagePipeline": (
        Component("text_encoder_4", "transformers", "LlamaForCausalLM"),
        Component("tokenizer_4", "transformers", "PreTrainedTokenizerFast"),
    )
}
"""Parts that a class needs and its repositories lack, as they have terms of their own."""


@dataclass(frozen=True, kw_only=True)
class Model(LocalModel, VaeRule):
    """A model on this machine: its VAE with its rule, its text encoders, and its configs' facts."""

    vae: str
    """empty where `folder` is itself the VAE's"""
    note: str
    """what a user should know of it, or nothing"""
    components: tuple[Component, ...] = ()
    """the parts for text of the pipeline whose own code encodes text; none if no code does"""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """the plain values of its index, which its class takes too"""
    pipeline_kind: str = ""
    """the class of the model's pipeline, whether text is wanted or not; empty for Stable Diffusion,
    whose pipeline is not needed"""
    references: int = 0
    """the most reference images of a sample"""
    outputs: tuple[Field, ...] = ()
    """the arrays that are made from a caption and from sizes; a pipeline's are not known before a
    dry run"""
    text_settings: Mapping[str, Any] = field(default_factory=dict)
    """the settings of the pipeline that decide their bytes"""


def find_model(
    name: str,
    *,
    text: str,
    has_vae: bool = True,
    is_offline: bool = False,
    listener: Callable[[str], None] = lambda _line: None,
) -> Model:
    """Return the model that a user named, with all of its files on this machine.

    Without `has_vae` these are the files for text alone. With `is_offline` nothing is downloaded.
    """

    def needs(folder: Folder) -> list[str]:
        return _parts_of(folder, text, has_vae=has_vae)[-1]

    patterns = [INDEX, "vae/*.json"]
    patterns += [f"vae/{VAE_WEIGHTS}.safetensors"] * has_vae
    patterns += ["tokenizer*/*", "*processor/*", "text_encoder*/*.json"] * (text != "none")
    weights = [f"text_encoder*/model{part}.safetensors" for part in ("", "-0*")]
    patterns += weights * (text == "emb")
    place: ModelFiles = Folder(TINY, name)
    if name != "tiny":
        place = find_files(
            name,
            REPOS,
            needs,
            others="a name that `wdsprep models` lists, such as sd2, sdxl or flux",
            patterns=patterns,
            tell=listener,
            is_offline=is_offline,
        )
    try:
        model = _read_model(name, place, text, has_vae=has_vae)
    except OSError as error:
        raise WorkError(f"the files of {place.what} cannot be read: {error}") from error
    return replace(model, note=TINY_NOTE) if name == "tiny" else model


def _read_model(name: str, place: ModelFiles, text: str, *, has_vae: bool) -> Model:
    """Return the model in a folder or a repository.

    The configs are checked first, so that the weights of an unsuitable model are not downloaded.
    """
    index, vae, components, files = _parts_of(place, text, has_vae=has_vae)
    if text != "none" and not vae:
        raise UsageError(f"{place.what} is a VAE alone: add --text none, or pass a whole pipeline")
    ported = {part.name for part in components if part.is_ported}
    configs = fetch_configs(place, files, ported=ported)
    config, rule = Config(configs), NO_VAE
    if has_vae:
        config = Config.read(configs / vae / "config.json")
        rule = vae_rule(place.what, config, index)
    is_clip = text != "none" and not components
    kind = str(index.get("_class_name", ""))
    model = Model(
        name=name,
        outputs=_clip_outputs(place.what, configs, text) if is_clip else (),
        **fetch_files(place, files),
        **asdict(rule),
        vae=vae,
        components=components,
        arguments=_plain_values(index) if components else {},
        pipeline_kind="" if _is_stable_diffusion(index) else kind,
        note=f"{place.what} has half-precision weights only" if variant_of(files) else "",
    )
    return add_batch_norm(model, config, kind, model.weights_in(vae))


def _clip_outputs(what: str, folder: Path, text: str) -> tuple[Field, ...]:
    """Return the array that one CLIPTextModel makes of a caption: its embedding, or tokens."""
    path = folder / "tokenizer/tokenizer_config.json"
    tokenizer = Config.read(path) if path.is_file() else Config(path)
    length = min(tokenizer.whole("model_max_length", LENGTH, most=ANY_LENGTH), LENGTH)
    if text == "tokens":
        return (Field(name=TOKENS, dtype="<i4", shape=(length,)),)
    config = Config.read(folder / "text_encoder/config.json")
    kinds = config.get("architectures")
    if not isinstance(kinds, list) or "CLIPTextModel" not in kinds:
        raise _lacks_index(what)
    length = min(length, config.whole("max_position_embeddings", LENGTH))
    width = config.whole("hidden_size", 512, most=MOST_WIDTH)  # as CLIPTextConfig has it
    return (Field(name=EMB, dtype="<f2", shape=(length, width)),)


# --- the parts of a pipeline
Index = Mapping[str, Any]
"""What `model_index.json` says of a pipeline; empty if there is none."""


def _parts_of(
    place: ModelFiles, text: str, *, has_vae: bool = True
) -> tuple[Index, str, tuple[Component, ...], list[str]]:
    """Return what is needed of a model for a value of `--text`, and for its VAE if wanted.

    That is its index, the folder of its VAE, the parts of its pipeline that encode text, and the
    names of all files, whether they are there or not.
    """
    names = place.names()
    index = read_json(place.fetch([INDEX]) / INDEX) if INDEX in names else {}
    is_bare = "config.json" in names and not names & {"vae/config.json", INDEX}
    vae = "" if is_bare else "vae"
    prefix = f"{vae}/" if vae else ""
    wanted = []
    if has_vae:
        wanted += [f"{prefix}config.json", *weight_files(names, f"{prefix}{VAE_WEIGHTS}")]
    components = () if text == "none" or is_bare else _find_components(place, index)
    if components:
        wanted += [INDEX, *_text_files(names, components, text)]
    elif text != "none":
        wanted += _text_files(names, CLIP if text == "emb" else CLIP[1:], text)
    return index, vae, components, sorted(set(wanted))


def _lacks_index(what: str) -> UsageError:
    """Return the error of a pipeline of which nobody knows how it encodes text."""
    return UsageError(
        f"{what} lacks {INDEX}, which says how its text encoders are used: copy that there too, "
        "choose another --model, or add --text none to encode the images alone"
    )


def _plain_values(index: Index) -> dict[str, Any]:
    """Return the plain values of an index, which the pipeline's class takes too."""
    plain = {name: value for name, value in index.items() if not _is_part(value)}
    return {name: value for name, value in plain.items() if not name.startswith("_")}


def _is_stable_diffusion(index: Index) -> bool:
    """Return whether a VAE and one CLIPTextModel encode for a model, without code of its pipeline.

    A folder without an index counts as such a model.
    """
    towers = [(part.name, part.kind) for part in _text_parts(index) if part.has_weights]
    is_clip = towers == [("text_encoder", "CLIPTextModel")] and "transformer" not in index
    return not index or (is_clip and not OTHER_CLIP.search(str(index.get("_class_name"))))


def _text_files(names: frozenset[str], components: Sequence[Component], text: str) -> Iterator[str]:
    """Yield the files of a pipeline's text encoders and tokenizers, and those that they lack.

    Of a tokenizer's folder these are all but weights. Shapes are in the configs of the encoders, so
    these are needed for tokens too.
    """
    suffixed = [name.partition("/") for name in names if name.endswith(TOKENIZER_SUFFIXES)]
    for part in components:
        if part.has_weights:
            yield f"{part.name}/config.json"
            if text == "emb":
                stems = [f"{part.name}/{stem}" for stem in TEXT_WEIGHTS]
                there = [stem for stem in stems if any(name.startswith(stem) for name in names)]
                yield from weight_files(names, (there or stems)[0])
            continue
        inside = {name for folder, _, name in suffixed if folder == part.name}
        lacking: tuple[str, ...] = ()
        if "tokenizer" not in part.name:
            lacking = () if inside else ("preprocessor_config.json",)
        elif {"vocab.json", "merges.txt"} & inside and "tokenizer.json" not in inside:
            lacking = ("vocab.json", "merges.txt")
        elif not any(name.endswith((".model", ".txt", ".tiktoken")) for name in inside):
            is_bytes = part.kind.startswith("ByT5")  # which has no vocabulary
            lacking = ("tokenizer_config.json" if is_bytes else "tokenizer.json",)
        yield from (f"{part.name}/{name}" for name in (*inside, *lacking))


def _find_components(place: ModelFiles, index: Index) -> tuple[Component, ...]:
    """Return the parts of a pipeline that encode text; none if one CLIPTextModel is enough.

    Raise UsageError if the pipeline cannot be used for text.
    """
    names = place.names()
    folders = {name.partition("/")[0] for name in names}
    if not index:
        if "modular_model_index.json" in names or any(n.startswith("text_encoder_") for n in names):
            raise _lacks_index(place.what)
        return ()
    parts = _text_parts(index)
    kind = str(index.get("_class_name"))
    _check_names(place.what, index.get("_class_name"), parts)
    if _is_stable_diffusion(index):
        return ()
    if f'"{kind}"' not in _find_diffusers().read_text():
        raise UsageError(
            f"{place.what} is {shortened(kind)}, which the diffusers here does not know: install a "
            "newer one, or add --text none to encode the images alone"
        )
    needed = LEFT_OUT.get(kind, ())
    known = {part.name for part in parts}
    parts += [part for part in needed if part.name not in known]
    if lost := [part.name for part in needed if part.name not in folders]:
        raise UsageError(
            f"{place.what} leaves out {' and '.join(lost)}, which is Llama 3.1 with terms of its "
            f"own: accept them at https://huggingface.co/{LLAMA}, then run `hf auth login`; "
            f'`hf download {PRESETS["hidream"].repo} --exclude "transformer/*" --local-dir hidream'
            "`; "
            f'`hf download {LLAMA} --exclude "original/*" --local-dir hidream/text_encoder_4`; '
            f'`hf download {LLAMA} --include "*token*" --local-dir hidream/tokenizer_4`; '
            "and pass --model ./hidream"
        )
    if not any(part.has_weights for part in parts):
        raise UsageError(
            f"{place.what} ({kind}) has no text encoder: add --text none to encode the images alone"
        )
    return tuple(parts)


def _text_parts(index: Index) -> list[Component]:
    used = {name: value for name, value in index.items() if _is_part(value) and all(value)}
    return [part for name, value in used.items() if (part := Component(name, *value)).is_of_text]


def _is_part(value: object) -> bool:
    """Return whether a value of the index is a part: a library and a class, or two nulls."""
    words = value if isinstance(value, list) else []
    return len(words) == 2 and all(word is None or isinstance(word, str) for word in words)


NETWORKS = ("PreTrainedModel",)
TOKENIZERS = ("PreTrainedTokenizerBase", "ProcessorMixin")
PROCESSORS = (*TOKENIZERS, "ImageProcessingMixin", "FeatureExtractionMixin")
"""Base classes of transformers; those in diffusers' own pipelines, as Kolors', derive from them."""
LOADS_OTHERS = re.compile("Pipeline|^Auto")
"""Matches the names of classes that find out from files of the model what to load."""


def _check_names(what: str, kind: object, parts: Iterable[Component]) -> None:
    """Raise UsageError if a pipeline or a part has a class that would run code of the model.

    The classes are judged by their names, without an import. Allowed are those of transformers, and
    of a pipeline's package in diffusers: its other classes are not text encoders or tokenizers.
    """
    inside = _find_diffusers().parent / "pipelines"
    libraries = {"transformers", *(path.name for path in inside.iterdir() if path.is_dir())}
    foreign = [] if isinstance(kind, str | None) else [f"{INDEX} names {shortened(str(kind))}"]
    foreign += [
        f"{part.library}.{part.kind}"
        for part in parts
        if part.library not in libraries
        or not all(map(str.isidentifier, part))
        or LOADS_OTHERS.search(part.kind)
    ]
    if foreign:
        raise UsageError(
            f"{what} wants to run code that comes with it (trust_remote_code: "
            f"{shortened(foreign[0])}), {NO_CODE}"
        )


def _find_diffusers() -> Path:
    spec = find_spec("diffusers")
    if spec is None or spec.origin is None:
        raise WorkError("diffusers is not installed here, which has the code of pipelines")
    return Path(spec.origin)


def class_of(part: Component) -> Any:
    """Import and return the class that a pipeline's index names for a part.

    Raise WorkError if the libraries here lack the class, and UsageError if it derives from none of
    the base classes for such a part.
    """
    library = f"diffusers.pipelines.{part.library}" if part.is_ported else "transformers"
    try:
        kind = getattr(importlib.import_module(library), part.kind)
        _ = getattr(kind, "from_pretrained", None)  # what stands in for a class says what it lacks
    except (AttributeError, ImportError) as error:
        raise WorkError(
            f"{part.name} is a {shortened(part.kind)} of {part.library}, which the diffusers and "
            "transformers here do not have: install newer ones"
        ) from error
    bases: tuple[str, ...] = NETWORKS
    if not part.has_weights:
        bases = TOKENIZERS if "tokenizer" in part.name else PROCESSORS
    transformers = importlib.import_module("transformers")
    allowed = tuple(getattr(transformers, name) for name in bases)
    if not (isinstance(kind, type) and issubclass(kind, allowed)):
        raise UsageError(
            f"{part.name} is a {part.kind}, not a {' or '.join(bases)}, so it could run code "
            f"that comes with the model, {NO_CODE}"
        )
    return kind


def check_weights(model: Model) -> Model:
    """Return the driver's model as it lies on this node, or raise WorkError."""
    there = replace(model, folder=str(TINY)) if model.name == "tiny" else model
    return find_on_node(there, REPOS)
