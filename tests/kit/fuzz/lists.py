"""What users give beside datasets: keys, captions, shapes, joined tables, states of loaders."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import wdsprep
from tests.kit.fuzz.cases import TOY, Kind, Make, Run, change_one, command, library, serve
from tests.kit.fuzz.mutations import mutate, mutate_json, mutate_text
from tests.kit.fuzz.tables import change_table, write_tables

KEYS = [f"{number // 4:06d}{number % 4:06d}" for number in range(8)]
ROWS = [
    {"key": key, "caption": f"picture {key}", "score": number / 2, "many": number, "is_red": True}
    for number, key in enumerate(KEYS)
]


def _beside(*names: str, write: Callable[[Path], None]) -> Make:
    """Copy datasets, and write what is given with them."""

    def make(sound: Path, place: Path, _rng: Random) -> None:
        for name in names:
            shutil.copytree(sound / "datasets" / name, place / name)
        write(place)

    return make


def _captioned(place: Path, out: Path) -> list[Run]:
    (table,) = place.glob("t.*")
    encode = ("encode", place / "images", out, "--resolution", "32", *TOY, "--captions", table)
    return [command(*encode), command(*encode, "--latents", "none", "--caption-column", "caption")]


def _joined(place: Path, _out: Path) -> list[Run]:
    (table,) = place.glob("t.*")

    def load(**options: Any) -> Run:
        options = {"join": [str(table)], "global_batch": 2, **options}
        return library("load(join=)", lambda: serve(wdsprep.load(place / "latents", **options)))

    return [load(), load(where="score >= 1 and many < 7"), load(where="caption != 'x'")]


def _write_lists(place: Path) -> None:
    digests = [hashlib.sha256(key.encode()).hexdigest() for key in KEYS]
    lists = {
        "keys": KEYS,
        "urls": [f"http://127.0.0.1/{key}.jpg" for key in KEYS],
        "sha256": digests,
        "sources": ["photo-0000.jpg", *KEYS],
    }
    for name, lines in lists.items():
        (place / f"{name}.list").write_text("".join(f"{line}\n" for line in lines))


def _listed(place: Path, out: Path) -> list[Run]:
    images = place / "images"
    removed = [
        command("remove", images, f"--{name}", place / f"{name}.list", "--yes")
        for name in ("keys", "urls", "sha256", "sources")
    ]
    return [*removed, command("select", images, out, "--keys", place / "keys.list")]


def _shaped(place: Path, out: Path) -> list[Run]:
    encode = ("encode", place / "images", out, "--resolution", "32", *TOY)
    return [command(*encode, "--shapes", place / "shapes.list")]


def _write_shapes(place: Path) -> None:
    (place / "shapes.list").write_text("24x40\n32x32\n40x24\n")


def _write_states(place: Path) -> None:
    for name, options in STATES.items():
        loader = wdsprep.load(place / "latents", **options)
        next(iter(loader))
        (place / f"{name}.state").write_text(json.dumps(loader.state_dict()))


def _resumed(place: Path, _out: Path) -> list[Run]:
    return [library("load_state_dict", lambda name=name: _resume(place, name)) for name in STATES]


def _resume(place: Path, name: str) -> None:
    loader = wdsprep.load(place / "latents", **STATES[name])
    try:
        state = json.loads((place / f"{name}.state").read_bytes())
    except (ValueError, RecursionError):
        return
    loader.load_state_dict(state)
    serve(loader)


STATES: dict[str, dict[str, Any]] = {
    "plain": {"global_batch": 2},
    "endless": {"global_batch": 2, "epochs": None, "seed": 3},
    "raw": {"global_batch": 2, "raw": True},
}


def _tables(place: Path) -> None:
    write_tables(place, ROWS)


KINDS = (
    Kind(
        name="list-captions",
        make=_beside("images", write=_tables),
        change=change_table,
        runs=_captioned,
        most=1,
    ),
    Kind(
        name="list-joins",
        make=_beside("latents", write=_tables),
        change=change_table,
        runs=_joined,
    ),
    Kind(
        name="list-keys",
        make=_beside("images", write=_write_lists),
        change=change_one("*.list", mutate, mutate_text, mutate_text),
        runs=_listed,
        most=5,
        is_ours=True,
    ),
    Kind(
        name="list-shapes",
        make=_beside("images", write=_write_shapes),
        change=change_one("*.list", mutate, mutate_text, mutate_text),
        runs=_shaped,
    ),
    Kind(
        name="list-states",
        make=_beside("latents", write=_write_states),
        change=change_one("*.state", mutate_json),
        runs=_resumed,
    ),
)
