"""The public functions and their options: few names, one spelling, one check."""

import importlib
import inspect
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import wdsprep
from tests.kit.packs import jpeg, packing_here, write_files
from wdsprep.cli import cli
from wdsprep.cli.declared_options import DeclaredCommand
from wdsprep.errors import UsageError, WdsprepError
from wdsprep.options import OptionError

CALLED = (
    "pack",
    "encode",
    "inspect",
    "verify",
    "repair",
    "remove",
    "report",
    "select",
    "duplicates",
    "card",
    "import_",
    "export",
)
PRINTING = {"as_json", "list_urls"}  # what of a result is printed, and how
HEARING = {"listener", "heard", "progress"}


def parameters(name: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(getattr(wdsprep, name)).parameters)


def test_at_most_seventeen_names_which_dir_lists() -> None:
    assert dir(wdsprep) == sorted(wdsprep.__all__)
    assert len(wdsprep.__all__) <= 18
    for name in wdsprep.__all__:
        thing = getattr(wdsprep, name)
        assert thing.__name__ == name
        assert f"wdsprep.{name}(" in (inspect.getdoc(thing) or ""), f"{name} shows no use of it"


@pytest.mark.parametrize("name", CALLED)
def test_a_command_has_the_options_and_defaults_of_its_function(name: str) -> None:
    command = cli.commands[name.rstrip("_")]  # Python keeps the word import for itself
    assert isinstance(command, DeclaredCommand)
    assert getattr(wdsprep, name).__module__ == wdsprep.PLACES[name]
    options = {str(option.name): option for option in command.params}
    assert options.keys() - PRINTING == parameters(name).keys() - HEARING


def test_defaults_are_written_once() -> None:
    """In the declarations: `DeclaredCommand` has them from there."""
    source = Path(inspect.getfile(DeclaredCommand)).read_text()
    assert not re.findall(r"(?<!show_)\bdefault=", source)


@pytest.mark.parametrize("name", [n for n in wdsprep.__all__ if n.islower()])
def test_results_are_typed_and_nothing_has_to_listen(name: str) -> None:
    result = inspect.signature(getattr(wdsprep, name)).return_annotation
    assert result not in (inspect.Signature.empty, None, Any)
    found = parameters(name)
    required = [n for n, p in found.items() if p.default is p.empty and p.kind is p.KEYWORD_ONLY]
    assert set(required) <= {"resolution", "global_batch", "encode", "to"}
    assert all(found[n].default is not found[n].empty for n in HEARING & found.keys())
    positional = [p for p in found.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert len(positional) <= 2
    several = [p.name for p in found.values() if p.kind is p.VAR_POSITIONAL]
    assert several in ([], ["datasets"])


def test_a_repair_is_told_before_it_is_done(tmp_path: Path) -> None:
    write_files(tmp_path / "in", {f"{n}.jpg": jpeg(n) for n in range(6)})
    out = str(tmp_path / "out")
    with packing_here():
        wdsprep.pack(str(tmp_path / "in"), out, buckets="32")
    (tar,) = Path(out).rglob("*.tar")
    tar.write_bytes(tar.read_bytes()[:-1024])
    told = wdsprep.repair(out)
    assert repr(told) == f"<Repair {out!r}: 1 unit to make again, the manifest to write>"
    assert (told.done, told.is_whole, tar.exists()) == (False, False, True)
    done = wdsprep.repair(out, yes=True)
    assert (done.done, done.is_whole, tar.exists()) == (True, True, False)
    assert repr(wdsprep.repair(out, yes=True)) == f"<Repair {out!r}: nothing to do>"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": "9:2"}, "MIN:MAX"),
        ({"contact": "two\nlines"}, "is not a contact"),
        ({"buckets": 2.5}, "rising sizes"),
        ({"save_additional_columns": 5}, "not a list of names"),
        ({"workers": (4, 2)}, "MIN:MAX"),
        ({"samples_per_shard": 1 << 60}, "--samples-per-shard 1152921504606846976: give a number"),
        ({"max_area": 1 << 60}, "--max-area 1152921504606846976: give a number of pixels"),
        ({"max_aspect_ratio": 1e300}, "--max-aspect-ratio 1e\\+300: give a number"),
        ({"caption_col": "half \udcff"}, "--caption-col 'half .*: give a text in UTF-8"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_removed(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    write_files(tmp_path / "in", {"a.jpg": jpeg(1)})
    write_files(tmp_path / "out", {"receipts/000000.json": b"precious"})
    with pytest.raises(UsageError, match=said):
        wdsprep.pack(tmp_path / "in", tmp_path / "out", **{"overwrite": True, **options})
    assert (tmp_path / "out/receipts/000000.json").read_bytes() == b"precious"


def test_one_recipe_is_spelled_as_encode_spells_it() -> None:
    how = wdsprep.Encode(resolution=64, max_bytes="1kB", batch_size="auto")
    assert (how.max_bytes, how.batch_size) == (1000, 0)
    assert replace(how, resolution=32).max_bytes == 1000  # what is read is the same again
    assert pickle.loads(pickle.dumps(how)) == how


def test_the_walk_through_the_package_leads_to_what_is_there() -> None:
    stops = re.findall(r"`([a-z_.]+):(\w+)`", wdsprep.__doc__ or "")
    assert len(stops) >= 20
    for module, name in stops:
        assert hasattr(importlib.import_module(f"wdsprep.{module}"), name), f"{module}:{name}"


def test_an_unknown_option_is_a_type_error_as_python_has_it_and_ours() -> None:
    assert issubclass(OptionError, TypeError)
    assert issubclass(OptionError, WdsprepError)
