"""The search for a model, whose files are found, fetched and checked before any weights are loaded.

The configs of a model say what it is and which of its files are needed: never the denoiser of a
pipeline, and no text encoder if no text is wanted. A digest tells two models apart. Only
safetensors are read, and no code that comes with a model is run. This module does not import torch:
a driver knows the shapes of all latents that workers will make.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

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
    LocalModel,
    ModelFiles,
    UnreachableError,
    ask_hub_or_keep,
    check_there,
    fetch_files,
    find_cached,
    find_on_node,
    is_local,
)
from wdsprep.encoding.models.pipeline_parts import (
    INDEX,
    VAE_WEIGHTS,
    Component,
    ModelParts,
    parts_of,
    variant_of,
)
from wdsprep.encoding.models.presets import PRESETS
from wdsprep.encoding.models.vae_rules import NO_VAE, VaeRule, add_batch_norm, multiple_of, vae_rule
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
SIZED = ("config.json", "preprocessor_config.json", "processor_config.json")
"""Files with sizes of networks, and of what processors make of images."""
ADAPTER = "adapter_config.json"
"""A file that names a base model, which transformers would load instead of the weights here."""


@dataclass(frozen=True, kw_only=True)
class Model(LocalModel, VaeRule):
    """A model on this machine: its VAE with its rule, its text encoders, and its configs' facts."""

    vae: str
    """empty where `folder` is itself the VAE's"""
    multiple: int
    """what the sides of an image have to be a multiple of"""
    note: str
    """what a user should know of it, or nothing"""
    clip_length: int = 0
    """the tokens of a caption, where one CLIPTextModel without a pipeline encodes text, or 0"""
    clip_width: int = 0
    """the width of its embedding, if that is wanted"""
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
    """the arrays that the pipeline makes from a caption and from sizes, once a dry run has told"""
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
    place = _find_files(name, text, has_vae=has_vae, is_offline=is_offline, listener=listener)
    try:
        model = _read_model(name, place, text, has_vae=has_vae)
    except OSError as error:
        raise WorkError(f"the files of {place.what} cannot be read: {error}") from error
    return replace(model, note=TINY_NOTE) if name == "tiny" else model


def _find_files(
    name: str, text: str, *, has_vae: bool, is_offline: bool, listener: Callable[[str], None]
) -> ModelFiles:
    """Return the folder of a model, or its repository on the hub.

    A commit never changes, so the hub is not asked if the cache has it; a branch may have moved. If
    the hub does not give the model, a complete copy in the cache is used.
    """
    if name == "tiny":
        return Folder(TINY, name)
    folder = expand_home(name)
    if name not in PRESETS and folder.is_dir():
        return Folder(folder.absolute(), name)
    model, _, revision = name.partition("@")
    repo = PRESETS[model].repo if model in PRESETS else model
    meant = "" if model in PRESETS else did_you_mean(model, PRESETS) or did_you_mean_place(name)
    if is_local(repo):
        raise UsageError(
            f"{name} is not a folder here{meant}: give one, a repository of the hub as OWNER/NAME "
            "or OWNER/NAME@REVISION, or a name that `wdsprep models` lists, such as sd2, sdxl or "
            "flux"
        )
    what = repo if repo == model else f"{name} ({repo})"
    cached = find_cached(what, repo, revision)
    if is_offline:
        if cached is None:
            raise WorkError(f"{name} is not on this machine")
        return cached
    parts = parts_of(cached, text, has_vae=has_vae) if cached else None
    is_whole = parts and not parts.missing and variant_of(parts.files) is None
    if cached and is_whole and COMMIT.fullmatch(revision):
        return cached
    try:
        kept = cached if parts and not parts.missing else None
        return ask_hub_or_keep(what, repo, revision, listener, kept)
    except UnreachableError as error:
        state = f"lacks {parts.missing[0]} on this machine" if parts else "is not on this machine"
        raise WorkError(
            f"{what} {state}{meant} and {_explain_unreachable(error, repo, text, has_vae=has_vae)}"
        ) from None
    except UsageError as error:
        raise UsageError(f"{error}{meant}") from None


def _explain_unreachable(reason: Exception, repo: str, text: str, *, has_vae: bool) -> str:
    names = [INDEX, "vae/*.json"]
    names += [f"vae/{VAE_WEIGHTS}.safetensors"] * has_vae
    names += ["tokenizer*/*", "*processor/*", "text_encoder*/*.json"] * (text != "none")
    weights = [f"text_encoder*/model{part}.safetensors" for part in ("", "-0*")]
    names += weights * (text == "emb")
    include = " ".join(f'--include "{name}"' for name in names)
    return (
        f"the hub cannot be reached ({reason}): run `hf download {repo} {include}` on a machine "
        "with a network and copy its cache here, give --model FOLDER, or try with --model tiny"
    )


def _read_model(name: str, place: ModelFiles, text: str, *, has_vae: bool) -> Model:
    """Return the model in a folder or a repository.

    The configs are checked first, so that the weights of an unsuitable model are not downloaded.
    """
    what = place.what
    parts = parts_of(place, text, has_vae=has_vae)
    if text != "none" and not parts.vae:
        raise UsageError(f"{what} is a VAE alone: add --text none, or pass a whole pipeline")
    check_there(what, parts.missing, parts.pickled)
    jsons = {file for file in parts.files if file.endswith(".json")}
    of_vae = f"{parts.vae}/config.json" if parts.vae else "config.json"
    configs = place.fetch(sorted(jsons))
    _check_configs(place, configs, parts, jsons)
    config = Config.read(configs / of_vae) if of_vae in jsons else Config(configs)
    has_unet = "unet" in parts.index
    rule = vae_rule(what, config, parts.kind, has_unet=has_unet) if has_vae else NO_VAE
    is_clip = text != "none" and not parts.components
    length, width = _read_clip(what, configs, text) if is_clip else (0, 0)
    facts = fetch_files(place, parts.files)
    weights = [file for file in parts.files if file.endswith(".safetensors")]
    of_vae_alone = [Path(facts["folder"], f) for f in weights if f.rpartition("/")[0] == parts.vae]
    rule = add_batch_norm(rule, config, parts.kind, of_vae_alone)
    return Model(
        name=name,
        **facts,
        vae=parts.vae,
        multiple=multiple_of(rule, parts.kind, has_transformer="transformer" in parts.index),
        **asdict(rule),
        clip_length=length,
        clip_width=width,
        components=parts.components,
        arguments=parts.arguments if parts.components else {},
        pipeline_kind="" if parts.is_plain else parts.kind,
        note=f"{what} has half-precision weights only" if variant_of(weights) else "",
    )


def _check_configs(
    place: ModelFiles, folder: Path, parts: ModelParts, jsons: Iterable[str]
) -> None:
    """Raise UsageError if a config would run code, open other files or make too large a network.

    Raise UsageError too if a part has an adapter, as its weights lie elsewhere.
    """
    ported = {part.name for part in parts.components if part.is_ported}
    names = place.names()
    for file in sorted(jsons):
        part, _, name = file.rpartition("/")
        if name.endswith("config.json"):
            config = Config.read(folder / file)
            check_part(config, is_ported=part in ported)
            if name == "processor_config.json":  # a video's are larger, and there is none
                config = replace(config, values=config.get("image_processor", {}))
            if name in SIZED:
                check_sizes(config)
        elif ".safetensors.index" in name:
            check_weight_index(Config.read(folder / file), part, frozenset(parts.files))
        if f"{part}/{ADAPTER}" in names:
            raise UsageError(
                f"{place.what} has {part}/{ADAPTER}, so its weights lie elsewhere: merge them, or "
                "choose another --model"
            )


def _read_clip(what: str, folder: Path, text: str) -> tuple[int, int]:
    """Return the length of captions and the width of their embedding, for one CLIPTextModel.

    For tokens alone the width is 0.
    """
    path = folder / "tokenizer/tokenizer_config.json"
    own = Config.read(path) if path.is_file() else Config(path)
    length = min(own.whole("model_max_length", LENGTH, most=ANY_LENGTH), LENGTH)
    if text == "tokens":
        return length, 0
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
    return length, config.whole("hidden_size", 512, most=MOST_WIDTH)  # as CLIPTextConfig has it


def rule_of(model: Model) -> dict[str, Any]:
    """Return the settings by which the output of the VAE becomes the stored latent."""
    patch = {"patch": model.patch} if model.patch > 1 else {}
    lists = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in (("scale", model.scale), ("shift", model.shift))
    }
    return patch | lists


def check_weights(model: Model) -> Model:
    """Return the driver's model as it lies on this node, or raise WorkError."""
    repo = model.name.partition("@")[0]
    repo = PRESETS[repo].repo if repo in PRESETS else repo
    there = replace(model, folder=str(TINY)) if model.name == "tiny" else model
    return find_on_node(there, repo)


def check_resolution(model: Model, resolution: int) -> None:
    _check_multiple(model, resolution, f"--resolution {resolution}")


def check_shapes(model: Model, sizes: Iterable[Size], option: str = "--shapes") -> None:
    """Raise UsageError if a side of a shape is not a multiple of what the model needs."""
    for size in sizes:
        for side in size:
            _check_multiple(model, side, f"{option}: {side} of {shape_name(size)}")


def _check_multiple(model: Model, side: int, what: str) -> None:
    if side > 0 and side % model.multiple == 0:
        return
    whose = "VAE" if model.multiple == model.factor else "transformer"
    below = side // model.multiple * model.multiple
    near = " or ".join(str(each) for each in (below, below + model.multiple) if each > 0)
    raise UsageError(
        f"{what} is not a multiple of {model.multiple}, as the {whose} of {model.name} needs: give "
        f"{near}"
    )
