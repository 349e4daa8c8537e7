"""The picture of the house: its rooms from the ground up, and what each may import.

Imports point down this list, never up or across what is not listed; no files import each other in a
circle; what begins with `_` stays in its room; each heavy package has its place.
"""

import ast
import copy
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.kit.paths import ROOT

PACKAGE = ROOT / "wdsprep"
GROUND = ("version", "limits", "cpus", "errors", "text")
"""Files at the top that every room may import. They import those before them alone."""
HOUSE = {
    "store": (),
    "dataset": ("store",),
    "fetch": ("dataset", "store"),
    "images": ("dataset",),
    "runners": ("dataset", "store"),
    "sources": ("dataset", "images", "store"),
    "packing": ("dataset", "fetch", "images", "runners", "sources", "store"),
    "encoding": ("dataset", "images", "runners", "sources", "store"),
    "importing": ("dataset", "encoding", "runners", "sources", "store"),
    "loading": ("dataset", "encoding", "images", "runners", "sources", "store"),
    "changes": (*("dataset", "images", "loading", "packing", "runners", "sources", "store"),),
    "checks": ("dataset", "images", "packing", "runners", "store"),
    "reporting": ("dataset", "encoding", "images", "store"),
    "exporting": ("dataset", "runners", "store"),
    "cli": (
        *("changes", "checks", "dataset", "encoding", "exporting", "importing", "packing"),
        *("reporting", "runners", "sources", "store"),
    ),
}
PLACES = {
    "click": ("cli",),
    "boto3": ("store.s3",),
    "botocore": ("store.s3",),
    "pycurl": ("fetch.multi", "fetch.outcomes", "fetch.transfer"),
    "PIL": (
        *("images.rule", "images.colour", "images.formats", "images.orientation", "images.crop"),
        *("images.perceptual", "images.pixels"),
        *("reporting.sheet.pictures", "cli.demo"),
    ),
    "pyarrow": (
        *("sources.tables.parquet", "sources.tables.arrow", "sources.tables.mds"),
        *("sources.image_tables", "images.crop", "importing.foreign", "encoding.sorted_pairs"),
        *("loading.streaming.source", "changes.hashes", "changes.copies", "exporting.parquet"),
        "reporting.sheet.copies",
    ),
    "ray": ("runners.ray", "loading.streaming"),
    "numpy": (
        *("loading", "checks.inspect", "dataset.arrays", "dataset.rows", "importing.arrays"),
        *("images.crop", "images.perceptual", "changes", "encoding.sorted_pairs"),
        *("reporting.sheet.copies", "reporting.sheet.pictures", "reporting.facts.spectrum"),
        *("exporting.arrays", "exporting.mds", "exporting.parquet", "exporting.primus"),
    ),
    "torch": ("encoding", "loading", "images.crop", "importing.arrays", "exporting.primus"),
    "torchvision": (),
    "diffusers": ("encoding.models.loading", "encoding.models.prompt_call"),
    "transformers": ("encoding.models.loading", "encoding.models.clip_text"),
    "huggingface_hub": ("encoding.models.hub", "store.hub"),
    "safetensors": ("encoding.models.loading",),
    "webdataset": (),
    "wandb": ("runners.track",),
    "tensorboard": ("runners.track",),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
ROOMS = sorted({name.partition(".")[0] for name in FILES if name} - {"__main__"})


def room_of(module: str) -> str:
    return module.partition(".")[0]


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


class Untyped(ast.NodeTransformer):
    """What is left at run time."""

    def visit_If(self, node: ast.If) -> ast.If | None:
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else node


@cache
def imports(module: str, *, typing: bool = True) -> tuple[tuple[str, str], ...]:
    """What is imported, and which name of it, wherever in the file that is said."""
    tree = tree_of(module)
    return tuple(_imports(tree if typing else Untyped().visit(copy.deepcopy(tree)), module))


def _imports(tree: ast.AST, module: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: relative import"
            yield from ((node.module or "", alias.name) for alias in node.names)


def own_imports(module: str, *, typing: bool = True) -> Iterator[tuple[str, str]]:
    """The modules of ours among them, and the name that is taken."""
    for there, name in imports(module, typing=typing):
        if room_of(there) == "wdsprep":
            inside = there.removeprefix("wdsprep").removeprefix(".")
            deeper = f"{inside}.{name}".strip(".")
            yield (deeper, "") if deeper in FILES else (inside, name)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_the_picture_says_and_no_more(room: str) -> None:
    found = {
        room_of(there) or "wdsprep"
        for module in FILES
        if room_of(module) == room
        for there, _ in own_imports(module)
    } - {room}
    if room in GROUND:
        assert found <= set(GROUND[: GROUND.index(room)])
        return
    if room == "cli":
        assert "wdsprep" in found
        found -= {"wdsprep"}
    assert found - set(GROUND) == set(HOUSE[room])


def test_rooms_stand_on_those_before_them() -> None:
    order = list(HOUSE)
    assert sorted([*order, *GROUND]) == ROOMS
    for room, below in HOUSE.items():
        assert set(below) <= set(order[: order.index(room)]), room
    floors: dict[str, int] = {}
    for room, below in HOUSE.items():
        floors[room] = 1 + max((floors[each] for each in below), default=0)
    assert max(floors.values()) <= 9
    top = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert sum(path.is_dir() for path in top) == len(HOUSE) <= 15
    assert sum(path.suffix == ".py" for path in top) <= 7


@pytest.mark.parametrize("room", HOUSE)
def test_a_room_says_at_its_door_what_it_uses(room: str) -> None:
    lines = " ".join((ast.get_docstring(tree_of(room)) or "").split())
    below = ", ".join(HOUSE[room]) or "no other room"
    assert " In: " in lines
    assert " Out: " in lines
    assert lines.endswith(f" Uses: {below}.")


def test_no_files_import_each_other_in_a_circle() -> None:
    below = {
        name: {there for there, _ in own_imports(name, typing=False)} - {name}
        for name in FILES
        if name
    }
    while free := [name for name, there in below.items() if not there & below.keys()]:
        for name in free:
            del below[name]
    assert not below


def test_nothing_private_is_imported_from_another_room() -> None:
    for module in FILES:
        for there, name in own_imports(module):
            parts = (*there.split("."), name)
            private = [p for p in parts if p.startswith("_") and not p.endswith("__")]
            same = room_of(there) == room_of(module)
            assert same or not private, f"{module} imports {name} from {there}"


def test_a_class_name_stands_for_one_thing() -> None:
    named = Counter(
        node.name
        for module in FILES
        for node in tree_of(module).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in named.items() if count > 1] == []


@pytest.mark.parametrize("package", PLACES)
def test_heavy_packages_are_imported_in_their_place_only(package: str) -> None:
    for module in FILES:
        if any(room_of(there) == package for there, _ in imports(module)):
            homes = PLACES[package]
            assert any(f"{module}.".startswith(f"{home}.") for home in homes), module


def loaded_by(code: str) -> set[str]:
    script = f"import sys, json\n{code}\njson.dump(sorted(sys.modules), sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return {name.partition(".")[0] for name in json.loads(done.stderr)}


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], *([name, "--help"] for name in ("pack", "encode", "verify"))],
)
def test_help_and_version_load_nothing_heavy(words: list[str]) -> None:
    loaded = loaded_by(f"from wdsprep.cli import main\nmain({words})")
    assert loaded & set(PLACES) == {"click"}
    if len(words) == 1:
        heavy = {"asyncio", "multiprocessing", "concurrent", "http", "importlib_metadata"}
        assert not loaded & heavy


def test_pack_needs_no_torch() -> None:
    loaded = loaded_by(
        "import wdsprep.cli.pack, wdsprep.packing.worker, wdsprep.sources.image_tables\n"
        "import wdsprep.runners.local"
    )
    assert not loaded & {"torch", "torchvision", "diffusers", "transformers", "webdataset", "ray"}
