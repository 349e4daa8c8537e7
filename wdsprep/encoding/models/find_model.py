"""The search for a model, whose files are found, fetched and checked before any weights are loaded.

The configs of a model say what it is and which of its files are needed: never the denoiser of a
pipeline, and no text encoder if no text is wanted. A digest tells two models apart. Only
safetensors are read, and no code that comes with a model is run. This module does not import torch:
a driver knows the shapes of all latents that workers will make.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from wdsprep.dataset.npy_arrays import Field
from wdsprep.dataset.shapes import Size, shape_name
from wdsprep.encoding.models.config_files import (
    MOST_WIDTH,
    Config,
    check_part,
    check_sizes,
    check_weight_index,
)
from wdsprep.encoding.models.model_files import (
    COMMIT,
    Folder,
    ModelFiles,
    UnreachableError,
    ask_hub_or_keep,
    file_sizes,
    find_cached,
    find_on_node,
    is_local,
)
from wdsprep.encoding.models.pipeline_parts import (
    INDEX,
    VAE_WEIGHTS,
    ModelParts,
    TextPipeline,
    is_ported,
    parts_of,
    variant_of,
)
from wdsprep.encoding.models.presets import PRESETS
from wdsprep.encoding.models.vae_rules import NO_VAE, add_batch_norm, multiple_of, vae_rule
from wdsprep.encoding.models.weights import check_digest, weights_digest
from wdsprep.errors import UsageError, WorkError
from wdsprep.store import did_you_mean_place
from wdsprep.store.base import expand_home
from wdsprep.text import did_you_mean, shortened

TINY = Path(__file__).parent / "tiny"
TINY_NOTE = (
    "tiny is a toy model that comes with wdsprep, for trials: nothing of use can be trained on "
    "what it makes"
)
LENGTH = 77
ANY_LENGTH = 10**40
"""The largest length that a tokenizer may claim: those without a limit write 10^30."""
ADAPTER = "adapter_config.json"
"""A file that names a base model, which transformers would load instead of the weights here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tower:
    """A text encoder and its tokenizer, of a pipeline that has one CLIPTextModel."""

    folder: str
    """empty where only the tokenizer is wanted"""
    tokenizer: str
    width: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model on this machine: its VAE, its text encoders, and what their configs say.

    A latent is stored as (patchify(z) - shift) * scale, where z is what the VAE gives: one number
    for all channels, or one for each stored channel.
    """

    name: str
    folder: str
    revision: str
    """the commit; empty for a folder"""
    weights: str
    """a digest over the names and bytes of `files`"""
    files: tuple[str, ...]
    sizes: tuple[int, ...]
    """the bytes of each of them"""
    vae: str
    """empty where `folder` is itself the VAE's"""
    vae_kind: str
    """the class; empty if no VAE is wanted, so that the fields after this have no meaning"""
    channels: int
    """the channels of a latent as it is stored"""
    factor: int
    """how many pixels of a side become one of a stored latent's"""
    multiple: int
    """what the sides of an image have to be a multiple of"""
    scale: float | tuple[float, ...]
    shift: float | tuple[float, ...]
    patch: int
    """the side of the squares of z that become channels of one place; 1 leaves z as it is"""
    is_sampled: bool
    """whether the VAE gives a distribution, and not the latent itself"""
    fits_fp16: bool
    """whether the VAE is an AutoencoderKL whose config does not warn that fp16 overflows"""
    note: str
    """what a user should know of it, or nothing"""
    towers: tuple[Tower, ...] = ()
    pipeline: TextPipeline | None = None
    """the pipeline whose own code encodes text; None if `towers` do, or if no text is wanted"""
    pipeline_kind: str = ""
    """the class of the model's pipeline, whether text is wanted or not; empty for Stable Diffusion,
    whose pipeline is not needed"""
    outputs: tuple[Field, ...] = ()
    """the arrays that the pipeline makes from a caption and from sizes, once a dry run has told"""
    text_settings: Mapping[str, Any] = field(default_factory=dict)
    """the settings of the pipeline that decide their bytes"""


class ModelNeeds(NamedTuple):
    """The networks of a model that are to be used."""

    text: str
    vae: bool = True


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
    wanted = ModelNeeds(text, has_vae)
    if name == "tiny":
        return replace(_load(name, Folder(TINY, "tiny"), wanted), note=TINY_NOTE)
    folder = expand_home(name)
    if name not in PRESETS and folder.is_dir():
        return _load(name, Folder(folder.absolute(), name), wanted)
    repo, _, revision = name.partition("@")
    repo = _repo_of(repo)
    if is_local(repo):
        raise UsageError(
            f"{name} is not a folder here{_suggest_name(name)}: give one, a repository of the hub "
            "as OWNER/NAME or OWNER/NAME@REVISION, or a name that `wdsprep models` lists, such as "
            "sd2, sdxl or flux"
        )
    if is_offline:
        return _from_cache(name, repo, revision, wanted)
    return _from_hub(name, repo, revision, wanted, listener)


def _suggest_name(name: str) -> str:
    """Return a question that suggests a model or a folder with a similar name, or "" if none."""
    model = name.partition("@")[0]
    if model in PRESETS:
        return ""
    return did_you_mean(model, PRESETS) or did_you_mean_place(name)


def _repo_of(name: str) -> str:
    return PRESETS[name].repo if name in PRESETS else name


def _from_cache(name: str, repo: str, revision: str, wanted: ModelNeeds) -> Model:
    cached = find_cached(name, repo, revision)
    if cached is None:
        raise WorkError(f"{name} is not on this machine")
    return _load(name, cached, wanted)


def _from_hub(
    name: str, repo: str, revision: str, wanted: ModelNeeds, listener: Callable[[str], None]
) -> Model:
    """Return a model of the hub, from the cache or downloaded.

    A commit never changes, so the hub is not asked if the cache has it; a branch may have moved. If
    the hub does not give the model, a complete copy in the cache is used.
    """
    what = repo if repo == name.partition("@")[0] else f"{name} ({repo})"
    cached = find_cached(what, repo, revision)
    has = parts_of(cached, wanted.text, has_vae=wanted.vae) if cached else None
    if cached and has and COMMIT.fullmatch(revision) and has.is_best:
        return _load(name, cached, wanted)
    try:
        kept = cached if has and not has.missing else None
        place = ask_hub_or_keep(what, repo, revision, listener, kept)
    except UnreachableError as error:
        state = f"lacks {has.missing[0]} on this machine" if has else "is not on this machine"
        state += _suggest_name(name)
        raise WorkError(f"{what} {state} and {_explain_unreachable(error, repo, wanted)}") from None
    except UsageError as error:
        raise UsageError(f"{error}{_suggest_name(name)}") from None
    return _load(name, place, wanted)


def _explain_unreachable(reason: Exception, repo: str, wanted: ModelNeeds) -> str:
    text, names = wanted.text, [INDEX]
    names += ["vae/*.json"]
    names += [f"vae/{VAE_WEIGHTS}.safetensors"] * wanted.vae
    names += ["tokenizer*/*", "*processor/*"] * (text != "none")
    names += ["text_encoder*/*.json"] * (text != "none")
    weights = [f"text_encoder*/model{part}.safetensors" for part in ("", "-0*")]
    names += weights * (text == "emb")
    include = " ".join(f'--include "{name}"' for name in names)
    return (
        f"the hub cannot be reached ({reason}): run `hf download {repo} {include}` on a machine "
        "with a network and copy its cache here, give --model FOLDER, or try with --model tiny"
    )


def _load(name: str, place: ModelFiles, wanted: ModelNeeds) -> Model:
    try:
        return _read_model(name, place, wanted)
    except OSError as error:
        raise WorkError(f"the files of {place.what} cannot be read: {error}") from error


def _read_model(name: str, place: ModelFiles, wanted: ModelNeeds) -> Model:
    """Return the model in a folder or a repository.

    The configs are checked first, so that the weights of an unsuitable model are not downloaded.
    """
    what, text = place.what, wanted.text
    parts = parts_of(place, text, has_vae=wanted.vae)
    if text != "none" and not parts.vae:
        raise UsageError(f"{what} is a VAE alone: add --text none, or pass a whole pipeline")
    if parts.pickled:
        raise UsageError(
            f"{what} has only pickled weights ({parts.pickled[0]}), which can run code when they "
            "are opened: convert it to safetensors, or pass another --model"
        )
    if parts.missing:
        raise UsageError(f"{what} lacks {', '.join(parts.missing)}: choose another --model")
    jsons = {file for file in parts.files if file.endswith(".json")}
    of_vae = f"{parts.vae}/config.json" if parts.vae else "config.json"
    configs = place.fetch(sorted(jsons))
    _check_configs(place, configs, parts, jsons)
    config = Config.read(configs / of_vae) if of_vae in jsons else Config(configs)
    rule = NO_VAE
    if wanted.vae:
        rule = vae_rule(what, config, parts.kind, has_unet="unet" in parts.index)
    towers: tuple[Tower, ...] = ()
    if text != "none" and parts.pipeline is None:
        towers = (_read_tower(what, configs, text),)
    folder = place.fetch(parts.files)
    weights = [file for file in parts.files if file.endswith(".safetensors")]
    own = [folder / file for file in weights if file.rpartition("/")[0] == parts.vae]
    rule = add_batch_norm(rule, config, parts.kind, own)
    return Model(
        name=name,
        folder=str(folder),
        revision=place.revision,
        weights=weights_digest(folder, parts.files),
        files=parts.files,
        sizes=file_sizes(folder, parts.files),
        vae=parts.vae,
        vae_kind=rule.kind,
        channels=rule.channels,
        factor=rule.factor,
        multiple=multiple_of(rule, parts.kind, has_transformer="transformer" in parts.index),
        scale=rule.scale,
        shift=rule.shift,
        patch=rule.patch,
        is_sampled=rule.is_sampled,
        fits_fp16=rule.fits_fp16,
        towers=towers,
        pipeline=parts.pipeline,
        pipeline_kind="" if parts.is_plain else parts.kind,
        note=f"{what} has half-precision weights only" if variant_of(weights) else "",
    )


def _check_configs(
    place: ModelFiles, folder: Path, parts: ModelParts, jsons: Iterable[str]
) -> None:
    """Raise UsageError if a config would run code, open other files or make too large a network.

    Raise UsageError too if a part has an adapter, as its weights lie elsewhere.
    """
    components = parts.pipeline.components if parts.pipeline else ()
    ported = {part.name for part in components if is_ported(part)}
    names = place.names()
    for file in sorted(jsons):
        part, _, name = file.rpartition("/")
        if name.endswith("config.json"):
            config = Config.read(folder / file)
            check_part(config, is_ported=part in ported)
            if name == "config.json":
                check_sizes(config)
        elif ".safetensors.index" in name:
            check_weight_index(Config.read(folder / file), part, frozenset(parts.files))
        if f"{part}/{ADAPTER}" in names:
            raise UsageError(
                f"{place.what} has {part}/{ADAPTER}, so its weights lie elsewhere: merge them, or "
                "choose another --model"
            )


def _read_tower(what: str, folder: Path, text: str) -> Tower:
    path = folder / "tokenizer/tokenizer_config.json"
    own = Config.read(path) if path.is_file() else Config(path)
    length = min(own.whole("model_max_length", LENGTH, most=ANY_LENGTH), LENGTH)
    if text == "tokens":
        return Tower(folder="", tokenizer="tokenizer", width=0, length=length)
    config = Config.read(folder / "text_encoder/config.json")
    kinds = config.get("architectures", ["no class"])
    if not isinstance(kinds, list) or "CLIPTextModel" not in kinds:
        kind = kinds[0] if isinstance(kinds, list) and kinds else kinds
        raise UsageError(
            f"the text encoder of {what} is {shortened(str(kind))}, and it lacks {INDEX}, which "
            "says how that is run: copy that there too, or add --text none to encode the images "
            "alone"
        )
    length = min(length, config.whole("max_position_embeddings", LENGTH))
    width = config.whole("hidden_size", 512, most=MOST_WIDTH)  # as CLIPTextConfig has it
    return Tower(folder="text_encoder", tokenizer="tokenizer", width=width, length=length)


def rule_of(model: Model) -> dict[str, Any]:
    """Return the settings by which the output of the VAE becomes the stored latent."""
    patch = {"patch": model.patch} if model.patch > 1 else {}
    lists = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in (("scale", model.scale), ("shift", model.shift))
    }
    return patch | lists


def check_weights(model: Model) -> Model:
    """Return the driver's model as it lies on this node.

    A model of the hub is looked up in the cache of the node, and downloaded if it is missing. Raise
    WorkError if the node has no such model, or one with other weights.
    """
    repo = _repo_of(model.name.partition("@")[0])
    folder = TINY if model.name == "tiny" else find_on_node(model, repo)
    check_digest(model, folder)
    return replace(model, folder=str(folder))


def check_resolution(model: Model, resolution: int) -> None:
    if resolution < 1 or resolution % model.multiple:
        raise UsageError(
            f"--resolution {resolution} is not a multiple of {model.multiple}, "
            f"{_explain_multiple(model)}: give {_nearest_multiples(resolution, model.multiple)}"
        )


def check_shapes(model: Model, sizes: Iterable[Size]) -> None:
    """Raise UsageError if a side of a shape is not a multiple of what the model needs."""
    for size in sizes:
        for side in size:
            if side % model.multiple:
                raise UsageError(
                    f"--shapes: {side} of {shape_name(size)} is not a multiple of "
                    f"{model.multiple}, {_explain_multiple(model)}: give "
                    f"{_nearest_multiples(side, model.multiple)}"
                )


def _nearest_multiples(number: int, step: int) -> str:
    """Return the multiples of a step next to a number in words, such as "296 or 304"."""
    below = number // step * step
    return " or ".join(str(multiple) for multiple in (below, below + step) if multiple > 0)


def _explain_multiple(model: Model) -> str:
    whose = "VAE" if model.multiple == model.factor else "transformer"
    return f"as the {whose} of {model.name} needs"
