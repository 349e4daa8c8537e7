"""The order of the rooms, and what each may import.

Imports point down this list, never up; no files import each other in a circle when they run; what
begins with `_` stays in its room; each heavy package has its rooms, and is not loaded by `--help`.
Which files a room has, and what they are called, is the room's own matter."""

import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.kit.command_lines import python
from tests.kit.paths import ROOT, blocks, pages

PACKAGE = ROOT / "wdsprep"
ROOMS = (
    *("store", "dataset", "fetch", "images", "runners", "sources", "tables", "packing"),
    *("encoding", "importing", "scoring", "loading", "changes", "checks", "reporting"),
    *("exporting", "cli"),
)
"""From the ground up. Files beside them are the ground itself: every room may import them."""
PLACES = {
    "click": ("cli",),
    "boto3": ("store",),
    "botocore": ("store",),
    "pycurl": ("fetch",),
    "jinja2": ("reporting",),
    "PIL": ("images", "scoring", "reporting", "cli"),
    "pyarrow": (
        *("dataset", "tables", "sources", "images", "importing", "encoding", "loading"),
        *("changes", "exporting", "reporting"),
    ),
    "duckdb": ("tables",),
    "ray": ("runners", "loading"),
    "numpy": (
        *("dataset", "tables", "images", "encoding", "importing", "scoring", "loading"),
        *("changes", "checks", "reporting", "exporting"),
    ),
    "torch": ("encoding", "loading", "images", "importing", "scoring", "exporting"),
    "torchvision": (),
    "diffusers": ("encoding",),
    "transformers": ("encoding", "scoring"),
    "huggingface_hub": ("encoding", "store", "reporting"),
    "safetensors": ("encoding",),
    "webdataset": (),
    "wandb": ("runners",),
    "tensorboard": ("runners",),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
GROUND = {path.stem for path in PACKAGE.glob("[!_]*.py")}


def room_of(module: str) -> str:
    return module.partition(".")[0]


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


def nodes(tree: ast.AST, *, typing: bool) -> Iterator[ast.AST]:
    """All that is in a file, or what is left of it at run time."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if typing or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            waiting += ast.iter_child_nodes(node)


@cache
def imports(module: str, *, typing: bool = True) -> tuple[tuple[str, str], ...]:
    """What is imported, and which name of it, wherever in the file that is said."""
    found: list[tuple[str, str]] = []
    for node in nodes(tree_of(module), typing=typing):
        if isinstance(node, ast.Import):
            found += ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: relative import"
            found += ((node.module or "", alias.name) for alias in node.names)
    return tuple(found)


def own_imports(module: str, *, typing: bool = True) -> Iterator[tuple[str, str]]:
    """The modules of ours among them, and the name that is taken."""
    for there, name in imports(module, typing=typing):
        if room_of(there) == "wdsprep":
            inside = there.removeprefix("wdsprep").removeprefix(".")
            deeper = f"{inside}.{name}".strip(".")
            yield (deeper, "") if deeper in FILES else (inside, name)


def test_every_folder_is_a_room() -> None:
    folders = {room_of(module) for module in FILES} - GROUND - {"", "__main__"}
    assert folders == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_those_below_it(room: str) -> None:
    below = {*ROOMS[: ROOMS.index(room)], *GROUND, room}
    if room == "cli":
        below.add("")  # the package's own front: the library that commands call
    for module in FILES:
        if room_of(module) == room:
            above = {there for there, _ in own_imports(module) if room_of(there) not in below}
            assert not above, f"{module} imports {sorted(above)}, which stand above {room}"


def test_the_ground_imports_no_room() -> None:
    for module in GROUND:
        assert {room_of(there) for there, _ in own_imports(module)} <= GROUND, module


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_at_its_door_what_goes_in_and_out(room: str) -> None:
    lines = " ".join((ast.get_docstring(tree_of(room)) or "").split())
    assert " In: " in lines
    assert " Out: " in lines


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


@pytest.mark.parametrize("package", PLACES)
def test_heavy_packages_are_imported_in_their_rooms_only(package: str) -> None:
    for module in FILES:
        if any(room_of(there) == package for there, _ in imports(module)):
            assert room_of(module) in PLACES[package], f"{module} imports {package}"


def loaded_by(code: str) -> set[str]:
    script = f"import sys, json\n{code}\njson.dump(sorted(sys.modules), sys.stderr)"
    modules = json.loads(python(script).stderr.splitlines()[-1])
    return {name.partition(".")[0] for name in modules}


def test_help_and_version_load_nothing_heavy() -> None:
    ours = "from wdsprep.cli import cli, main\n"
    quick = loaded_by(f'{ours}main(["--help"])\nmain(["--version"])')
    heavy = {"asyncio", "multiprocessing", "concurrent", "http", "importlib_metadata"}
    assert not quick & heavy
    every = loaded_by(f'{ours}[main([name, "--help"]) for name in cli.commands]')
    assert every & set(PLACES) == {"click"}


NO_TENSORS = ("store", "dataset", "sources", "runners", "packing", "changes", "checks", "exporting")


def test_rooms_that_make_no_tensors_load_no_torch_and_pack_no_ray() -> None:
    """Functions may, where they are called."""
    pack = ["cli.output.packing", "packing.worker", "sources.table_sources", "runners.local"]
    others = [module for module in FILES if room_of(module) in NO_TENSORS]
    lines = [f"import wdsprep.{module}" for module in pack]
    lines += ["assert not {'webdataset', 'ray'} & sys.modules.keys()"]
    lines += [
        f"import wdsprep.{module}; assert 'torch' not in sys.modules, {module!r}"
        for module in others
    ]
    tensors = {"torch", "torchvision", "diffusers", "transformers"}
    assert not loaded_by("\n".join(lines)) & tensors


PYPROJECT = (ROOT / "pyproject.toml").read_text()
LINE = re.compile(r'    "([\w.-]+)[^"]*",(?:  # (.+))?')


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """A line of a list of dependencies."""

    name: str
    comment: str


def normal(name: str) -> str:
    """As package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def named(what: str) -> list[list[Named]]:
    """The groups of this list, each of which a comment begins, or the list does."""
    body = PYPROJECT.partition(f"\n{what} = [\n")[2].partition("\n]\n")[0]
    groups: list[list[Named]] = [[]]
    for line in body.splitlines():
        if line.startswith("    # "):
            groups.append([])
            continue
        found = LINE.fullmatch(line)
        assert found, line
        groups[-1].append(Named(name=normal(found[1]), comment=found[2] or ""))
    return [group for group in groups if group]


IMPORT = re.compile(r"^ *(?:from (\w+)[\w.]* import|import (\w+)[\w.]*(?: as \w+)?$)", re.MULTILINE)
"""A line that imports, wherever in the code it stands; to parse all tests would take seconds."""


def distributions(codes: Iterable[str], *, own: Iterable[str] = ()) -> set[str]:
    """What must be installed for it."""
    return installed_for(
        {"".join(names) for code in codes for names in IMPORT.findall(code)} - {*own}
    )


def installed_for(modules: Iterable[str]) -> set[str]:
    known = packages_distributions()
    others = {*modules} - {"wdsprep", *sys.stdlib_module_names}
    return {normal(name) for module in others for name in known.get(module, [module])}


@cache
def of_package() -> set[str]:
    """Read once, and not where tests are only collected: that is 450 files."""
    return installed_for({room_of(there) for module in FILES for there, _ in imports(module)})


IMPORTED, GIVEN = named("dependencies")
EXTRAS = set(re.findall(r'\n(?:language|tensorboard|wandb) = \["([\w-]+)>', PYPROJECT))
"""What is imported where somebody has asked for it."""


def test_the_lists_are_read_whole() -> None:
    """Or what is below would hold for nothing."""
    assert {"pillow", "ray", "torch"} <= of_package()
    assert [each.name for each in named("dev")[0]][:2] == ["wdsprep", "pytest"]
    for group in (IMPORTED, GIVEN):
        names = [each.name for each in group]
        assert names == sorted(set(names))


def test_the_package_imports_what_is_named_so_and_nothing_else() -> None:
    assert {each.name for each in IMPORTED} == of_package() - EXTRAS
    assert of_package() >= EXTRAS


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: given.name)
def test_what_the_package_does_not_import_serves_trainers(given: Named) -> None:
    """Its line says who uses it, and a recipe of a page does."""
    assert given.name not in of_package()
    assert given.comment
    recipes = [code for page in pages() for _kind, code in blocks(page, "py", "python")]
    assert given.name in distributions(recipes)


def test_tests_import_what_is_named() -> None:
    """But for the readers that a test is skipped without."""
    dev = {each.name for group in named("dev") for each in group}
    both = {each.name for each in (*IMPORTED, *GIVEN)} | dev | EXTRAS
    ours = ("tests", "tools", "train_example", "lora_edit", "tiny_pipeline")
    own = (*ours, "megatron", "streaming", "webshart", "wids")
    texts = (path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert distributions(texts, own=own) <= both
