"""What `pip install` brings is what the package imports, and what trainers are given by name."""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.kit.paths import ROOT, blocks, pages

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


def imported(code: str) -> Iterator[str]:
    """Whole packages by their first names, wherever in the code it is said."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def distributions(codes: Iterable[str], *, own: tuple[str, ...]) -> set[str]:
    """What must be installed for it."""
    modules = {module for code in codes for module in imported(code)}
    known = packages_distributions()
    others = modules - {*own, *sys.stdlib_module_names}
    return {normal(name) for module in others for name in known.get(module, [module])}


@cache
def of_package() -> set[str]:
    """Read once, and not where tests are only collected: that is 450 files."""
    return distributions(texts(ROOT / "wdsprep"), own=("wdsprep",))


def texts(folder: Path) -> Iterator[str]:
    return (path.read_text() for path in folder.rglob("*.py"))


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
    assert given.name in distributions(recipes, own=("wdsprep",))


def test_tests_import_what_is_named() -> None:
    """But for the readers that a test is skipped without."""
    dev = {each.name for group in named("dev") for each in group}
    both = {each.name for each in (*IMPORTED, *GIVEN)} | dev | EXTRAS
    own = ("wdsprep", "tests", "tools", "train_example", "megatron", "streaming", "webshart")
    assert distributions(texts(ROOT / "tests"), own=own) <= both
