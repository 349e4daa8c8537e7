"""Folders of models that a stranger has changed, with or without intent, and all that encodes."""

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import wdsprep
from tests.kit.fuzz.cases import HERE, Kind, Run, command, library, serve
from tests.kit.fuzz.mutations import mutate, mutate_json
from wdsprep.errors import WdsprepError

REWRITTEN = ("empty", "cut", "bytes", "deep", "loop", "folder", "list", "wrapped", "latin")


def damage(folder: Path, rng: Random) -> str:
    """Change values of a JSON file there, or what kind of file it is."""
    path = rng.choice(sorted(folder.rglob("*.json")))
    kind, data = rng.choice([*["value"] * 12, *["values"] * 2, *REWRITTEN]), path.read_bytes()
    if kind in ("loop", "folder"):
        path.unlink()
        path.mkdir() if kind == "folder" else path.symlink_to(path.name)
    elif kind in REWRITTEN:
        path.write_bytes(_rewritten(data, kind, rng))
    else:
        path.write_bytes(mutate_json(data, rng, times=1 if kind == "value" else 5))
    return f"{path.relative_to(folder)}: {kind}"


def _rewritten(data: bytes, kind: str, rng: Random) -> bytes:
    depth = rng.choice([200, 900, 5000])
    return {
        "empty": b"",
        "cut": data[: rng.randrange(len(data))],
        "bytes": mutate(data, rng),
        "deep": b'{"a":' * depth + b"1" + b"}" * depth,
        "list": b"[" + data + b"]",
        "wrapped": b'{"model": ' + data + b"}",
        "latin": data.replace(b"e", b"\xe9", 1),
    }[kind]


def load(folder: Path, text: str) -> str:
    """Find a model and load what encodes with it; return the line that refuses it, or nothing."""
    from wdsprep.encoding.models.encoder import load_encoder
    from wdsprep.encoding.models.find_model import find_model
    from wdsprep.encoding.recipe_defaults import settle_recipe
    from wdsprep.encoding.recipe_options import Recipe

    try:
        recipe, model = settle_recipe(
            Recipe(resolution=64, text=text), find_model(str(folder), text=text), "cpu"
        )
        load_encoder(model, recipe, "cpu")
    except WdsprepError as error:
        return str(error)
    return ""


def copied(folder: Path, into: Path) -> Path:
    """A copy without the denoiser, which nobody reads."""
    shutil.rmtree(into, ignore_errors=True)
    left_out = shutil.ignore_patterns("transformer", "unet")
    return Path(shutil.copytree(folder, into, ignore=left_out))


def _make(sound: Path, place: Path, rng: Random) -> None:
    """Copy the pipeline of a family, which is made when it is first asked for."""
    from tests.kit.families import NAMES, small

    folder = sound / "models" / rng.choice(NAMES)
    copied(folder if folder.is_dir() else small(folder.name, folder), place)
    place.with_name("images").symlink_to(sound / "datasets/images")


def _change(*patterns: str) -> Callable[[Path, Random], str]:
    def change(place: Path, rng: Random) -> str:
        there = sorted({path for pattern in patterns for path in place.rglob(pattern)})
        path = rng.choice(there or sorted(place.rglob("config.json")))
        is_json = path.suffix == ".json" and rng.random() < 0.8
        path.write_bytes((mutate_json if is_json else mutate)(path.read_bytes(), rng))
        return path.relative_to(place).as_posix()

    return change


def _runs(place: Path, out: Path) -> list[Run]:
    images = place.with_name("images").resolve()
    options = ("--resolution", "32", *HERE, "--model", place)
    latents = ("encode", images, out, *options)
    return [
        command(*latents),
        command(*latents, "--text", "tokens"),
        command(*latents, "--latents", "none"),
        library("load(encode=)", lambda: _serve(images, place, "emb")),
        library("load(encode=)", lambda: _serve(images, place, "none")),
    ]


def _serve(images: Path, model: Path, text: str) -> None:
    how = wdsprep.Encode(resolution=32, model=str(model), text=text)
    serve(wdsprep.load(images, encode=how, global_batch=2, device="cpu"), 1)


def _make_scoring(sound: Path, place: Path, rng: Random) -> None:
    """Copy a model that scores, with a head for its embedding beside it."""
    from tests.kit.scoring_models import KINDS, SIDE, head, small

    folder = sound / "scoring" / rng.choice(KINDS)
    copied(folder if folder.is_dir() else small(folder.name, folder), place)
    head(place / "head.safetensors", {"clip": 24}.get(folder.name, SIDE))
    place.with_name("images").symlink_to(sound / "datasets/images")


def _score_runs(place: Path, out: Path) -> list[Run]:
    images = place.with_name("images").resolve()
    scores = ("score", images, out, *HERE, "--model", place)
    return [
        command(*scores),
        command(*scores, "--head", f"good={place / 'head.safetensors'}", "--overwrite"),
    ]


SCORING_KINDS = tuple(
    Kind(name=f"scoring-{name}", make=_make_scoring, change=change, runs=_score_runs, most=2)
    for name, change in (
        ("config", _change("config.json")),
        ("processor", _change("preprocessor_config.json")),
        ("head", _change("head.safetensors")),
        ("damaged", damage),
    )
)
KINDS = SCORING_KINDS + tuple(
    Kind(name=f"model-{name}", make=_make, change=change, runs=_runs, most=2)
    for name, change in (
        ("index", _change("model_index.json")),
        ("configs", _change("config.json")),
        ("tokenizers", _change("*token*/*", "processor/*")),
        ("weights", _change("*.safetensors", "*.index.json")),
        ("damaged", damage),
        ("damaged-again", damage),
    )
)
