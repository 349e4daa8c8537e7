"""Folders of models that a stranger has changed, with or without intent, and all that encodes."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import wdsprep
from tests.kit.fuzz.cases import TOY, Kind, Run, command, library, serve
from tests.kit.fuzz.mutations import mutate, mutate_json
from wdsprep.errors import WdsprepError

ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 10**9, 10**11, 10**20, 10**40, -(10**9), 1.5),
    *(float("nan"), float("inf"), float("-inf"), 1e300),
    *("", "a", "../../x", "/etc/passwd", "\0", "9" * 50, "transformers", "stranger/kernel"),
    *([], [[]], {}, {"a": {}}, [None], ["x", "y"], [1] * 100),
]
WAYS = (*["value"] * 8, *["missing"] * 3, "values", "empty", "cut", "bytes")
WAYS = (*WAYS, "deep", "loop", "folder", "list", "wrapped", "latin")
SPARE_NBYTES = 1_500_000_000
LONGEST_S, LARGEST_NBYTES = 15.0, 300_000_000


def damage(folder: Path, rng: Random) -> str:
    """Damage one of the JSON files there; return how."""
    path = rng.choice(sorted(folder.rglob("*.json")))
    kind, data = rng.choice(WAYS), path.read_bytes()
    how = f"{path.relative_to(folder)}: {kind}"
    if kind in ("loop", "folder"):
        path.unlink()
        path.mkdir() if kind == "folder" else path.symlink_to(path.name)
    elif kind in ("value", "missing", "values"):
        value = json.loads(data)
        for _ in range(5 if kind == "values" else 1):
            how += f" {_change(value, kind, rng)}"
        path.write_text(json.dumps(value))
    else:
        path.write_bytes(_rewritten(data, kind, rng))
    return how


def _change(value: Any, kind: str, rng: Random) -> str:
    places = sorted(_places(value), key=len)
    if not places:
        return "nothing"
    place = rng.choice(places[:60] if rng.random() < 0.7 else places)
    owner = value
    for name in place[:-1]:
        owner = owner[name]
    if kind == "missing":
        del owner[place[-1]]
        return str(place)
    owner[place[-1]] = odd = rng.choice(ODD)
    return f"{place} = {str(odd)[:60]!r}"


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    named = value.items() if isinstance(value, dict) else ()
    listed = enumerate(value[:20]) if isinstance(value, list) else ()
    for name, one in (*named, *listed):
        yield from _places(one, (*place, name))


def _rewritten(data: bytes, kind: str, rng: Random) -> bytes:
    depth = rng.choice([200, 900, 5000])
    made = {
        "empty": b"",
        "cut": data[: rng.randrange(len(data))],
        "deep": b'{"a":' * depth + b"1" + b"}" * depth,
        "list": b"[" + data + b"]",
        "wrapped": b'{"model": ' + data + b"}",
        "latin": data.replace(b"e", b"\xe9", 1),
    }
    if kind != "bytes":
        return made[kind]
    changed = bytearray(data)
    for _ in range(3):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def load(folder: Path, text: str) -> str:
    """Find a model and load what encodes with it; return the line that refuses it, or nothing."""
    from wdsprep.encoding.choices import settled_for
    from wdsprep.encoding.models.encoder import load_encoder
    from wdsprep.encoding.models.find import find_model
    from wdsprep.encoding.recipe import Recipe

    try:
        recipe, model = settled_for(
            Recipe(resolution=64, text=text), find_model(str(folder), text=text), "cpu"
        )
        load_encoder(model, recipe, "cpu")
    except WdsprepError as error:
        return str(error)
    return ""


def load(folder: Path, text: str) -> str:
    """Find a model and load what encodes with it; return the line that refuses it, or nothing."""
    from wdsprep.encoding.choices import settled_for
    from wdsprep.encoding.models.encoder import load_encoder
    from wdsprep.encoding.models.find import find_model
    from wdsprep.encoding.recipe import Recipe

    try:
        recipe, model = settled_for(
            Recipe(resolution=64, text=text), find_model(str(folder), text=text), "cpu"
        )
        load_encoder(model, recipe, "cpu")
    except WdsprepError as error:
        return str(error)
    return ""


def change(place: Path, rng: Random) -> str:
    """Change a JSON file in one of the ways of above, or of all JSON; at times another file."""
    others = sorted(p for p in place.rglob("*") if p.is_file() and p.suffix != ".json")
    if others and rng.random() < 0.2:
        path = rng.choice(others)
        path.write_bytes(mutate(path.read_bytes(), rng))
    elif rng.random() < 0.3:
        path = rng.choice(sorted(place.rglob("*.json")))
        path.write_bytes(mutate_json(path.read_bytes(), rng))
    else:
        return damage(place, rng)
    return path.relative_to(place).as_posix()


def load(folder: Path, text: str) -> str:
    """Find a model and load what encodes with it; return the line that refuses it, or nothing."""
    from wdsprep.encoding.choices import settled_for
    from wdsprep.encoding.models.encoder import load_encoder
    from wdsprep.encoding.models.find import find_model
    from wdsprep.encoding.recipe import Recipe

    try:
        recipe, model = settled_for(
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
    options = ("--resolution", "32", *TOY, "--model", place)
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


KINDS = tuple(
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
