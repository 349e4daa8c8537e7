"""The parts of a repository that latents and text need, their files, and the classes they may have.

A pipeline's index lists its parts. A prompt needs the text encoders, tokenizers and processors; the
denoiser is never needed. A part that would run code of the model is refused here.

The index names a library and a class for each part, and the class then loads a folder as it likes:
a pipeline in the place of a tokenizer would read an index of its own, and run a class that lies
beside it. So each role has base classes, and nothing is loaded by another. What can be told by
names is refused without an import, before anything is fetched.
"""

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from wdsprep.encoding.models.config_files import NO_CODE, read_json
from wdsprep.encoding.models.model_files import ModelFiles, weight_files
from wdsprep.encoding.models.presets import PRESETS
from wdsprep.errors import UsageError, WorkError
from wdsprep.text import shortened

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


Index = Mapping[str, Any]
"""What `model_index.json` says of a pipeline; empty if there is none."""


def parts_of(
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


def lacks_index(what: str) -> UsageError:
    """Return the error of a pipeline of which nobody knows how it encodes text."""
    return UsageError(
        f"{what} lacks {INDEX}, which says how its text encoders are used: copy that there too, "
        "choose another --model, or add --text none to encode the images alone"
    )


def plain_values(index: Index) -> dict[str, Any]:
    """Return the plain values of an index, which the pipeline's class takes too."""
    plain = {name: value for name, value in index.items() if not _is_part(value)}
    return {name: value for name, value in plain.items() if not name.startswith("_")}


def is_stable_diffusion(index: Index) -> bool:
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
            raise lacks_index(place.what)
        return ()
    parts = _text_parts(index)
    kind = str(index.get("_class_name"))
    check_names(place.what, index.get("_class_name"), parts)
    if is_stable_diffusion(index):
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


def check_names(what: str, kind: object, parts: Iterable[Component]) -> None:
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
