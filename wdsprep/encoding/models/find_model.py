"""The search for a model, whose files are found, fetched and checked before any weights are loaded.

The configs of a model say what it is and which of its files are needed: never the denoiser of a
pipeline, and no text encoder if no text is wanted. A digest tells two models apart. Only
safetensors are read, and no code that comes with a model is run. This module does not import torch:
a driver knows the shapes of all latents that workers will make.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wdsprep.dataset.npy_arrays import Field
from wdsprep.dataset.shapes import shape_name
from wdsprep.encoding.models.config_files import MOST_WIDTH, Config, fetch_configs
from wdsprep.encoding.models.model_files import (
    Folder,
    LocalModel,
    ModelFiles,
    fetch_files,
    find_files,
    find_on_node,
    variant_of,
)
from wdsprep.encoding.models.pipeline_parts import (
    INDEX,
    VAE_WEIGHTS,
    Component,
    is_stable_diffusion,
    lacks_index,
    parts_of,
    plain_values,
)
from wdsprep.encoding.models.presets import PRESETS
from wdsprep.encoding.models.vae_rules import NO_VAE, VaeRule, add_batch_norm, multiple_of, vae_rule
from wdsprep.errors import UsageError, WorkError

if TYPE_CHECKING:
    from wdsprep.encoding.recipe_options import Recipe

REPOS = {name: preset.repo for name, preset in PRESETS.items()}
TINY = Path(__file__).parent / "tiny"
TINY_NOTE = (
    "tiny is a toy model that comes with wdsprep, for trials: nothing of use can be trained on "
    "what it makes"
)
LENGTH = 77
ANY_LENGTH = 10**40
"""The largest length that a tokenizer may claim: those without a limit write 10^30."""


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

    def needs(folder: Folder) -> list[str]:
        return parts_of(folder, text, has_vae=has_vae)[-1]

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
    what = place.what
    index, vae, components, files = parts_of(place, text, has_vae=has_vae)
    kind = str(index.get("_class_name", ""))
    if text != "none" and not vae:
        raise UsageError(f"{what} is a VAE alone: add --text none, or pass a whole pipeline")
    ported = {part.name for part in components if part.is_ported}
    configs = fetch_configs(place, files, ported=ported)
    config, rule = Config(configs), NO_VAE
    if has_vae:
        config = Config.read(configs / vae / "config.json")
        rule = vae_rule(what, config, kind, has_unet="unet" in index)
    is_clip = text != "none" and not components
    length, width = _read_clip(what, configs, text) if is_clip else (0, 0)
    facts = fetch_files(place, files)
    weights = LocalModel(name=name, **facts).weights_in(vae)
    rule = add_batch_norm(rule, config, kind, weights)
    return Model(
        name=name,
        **facts,
        vae=vae,
        multiple=multiple_of(rule, kind, has_transformer="transformer" in index),
        **asdict(rule),
        clip_length=length,
        clip_width=width,
        components=components,
        arguments=plain_values(index) if components else {},
        pipeline_kind="" if is_stable_diffusion(index) else kind,
        note=f"{what} has half-precision weights only" if variant_of(files) else "",
    )


def _read_clip(what: str, folder: Path, text: str) -> tuple[int, int]:
    """Return the length of captions and the width of their embedding, for one CLIPTextModel.

    For tokens alone the width is 0.
    """
    path = folder / "tokenizer/tokenizer_config.json"
    tokenizer = Config.read(path) if path.is_file() else Config(path)
    length = min(tokenizer.whole("model_max_length", LENGTH, most=ANY_LENGTH), LENGTH)
    if text == "tokens":
        return length, 0
    config = Config.read(folder / "text_encoder/config.json")
    kinds = config.get("architectures")
    if not isinstance(kinds, list) or "CLIPTextModel" not in kinds:
        raise lacks_index(what)
    length = min(length, config.whole("max_position_embeddings", LENGTH))
    return length, config.whole("hidden_size", 512, most=MOST_WIDTH)  # as CLIPTextConfig has it


def check_weights(model: Model) -> Model:
    """Return the driver's model as it lies on this node, or raise WorkError."""
    there = replace(model, folder=str(TINY)) if model.name == "tiny" else model
    return find_on_node(there, REPOS)


def check_multiples(model: Model, recipe: "Recipe") -> None:
    """Raise UsageError if a side of an image would not be a multiple of what the model needs."""
    sides = [(recipe.resolution, f"--resolution {recipe.resolution}")]
    lists = {"--shapes": recipe.sizes}
    lists |= {f"--role-size {role}": sizes for role, sizes in recipe.shape_lists.items()}
    for option, sizes in lists.items():
        for size in sizes:
            sides += [(side, f"{option}: {side} of {shape_name(size)}") for side in size]
    multiple = model.multiple
    for side, what in sides:
        if side % multiple:
            below = side // multiple * multiple
            near = f"{below} or {below + multiple}" if below else multiple
            why = f"is not a multiple of {multiple}, as {model.name} needs"
            raise UsageError(f"{what} {why}: give {near}")
