"""What version 0.2.0 wrote is read today, and its half-done work is ended: see `make_0_2_0`.

Of what `made_by_0_1_0` lacks: rows, conditions, joins, selections, exports, imports, shapes, mirror
images, tables of captions, text alone, several resolutions, removals.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import wdsprep
from tests.kit.made_before import (
    copied,
    made_by,
    manifest,
    noted,
    run,
    run_here,
    same,
    shards,
    tree,
    untouched,
)
from tests.kit.make_0_2_0 import (
    COMMANDS,
    GONE,
    KILLED,
    LESS,
    LOADERS,
    LOST,
    MODEL,
    TOLD,
    kept_in,
    loader,
)
from tests.kit.packs import packing_here
from wdsprep.errors import UsageError

OLD = made_by("0.2.0")
STATES = json.loads((OLD / "states.json").read_bytes())
MADE_WITH = {
    "latents-64": ("latents-128", "text"),
    "text-long": ("text-short",),
    "selected": (),
    "images-chosen": ("latents-64-chosen",),
}
"""What else a command writes."""
ENCODED = ("latents-64", "shaped", "text-long", "text-given")
EXACT = ("images", "selected", "few", "mds", "wids", "webshart", "energon", "imported")
"""Commands that make the same bytes on every machine."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return copied(OLD, tmp_path / "old")


def command(home: Path, *words: str) -> None:
    with packing_here():
        run_here(home, *words)


def places(name: str) -> tuple[str, ...]:
    return (name, *MADE_WITH.get(name, ()))


def unread(home: Path) -> dict[str, bytes]:
    """Its files, but for those by which runs take turns."""
    return {name: data for name, data in tree(home).items() if not name.endswith(".hold")}


# --- what is finished


def test_what_programs_read_is_told_as_before(old: Path) -> None:
    told = json.loads((OLD / "told.json").read_bytes())
    as_before = {"plan": ("--decode", "full")}  # 0.2.0 decoded no image at a reduced scale
    asked = {name: (*words, *as_before.get(name, ())) for name, words in TOLD.items()}
    assert told == {name: run(old, *words).stdout for name, words in asked.items()}


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("less",)])
def test_what_is_done_is_not_done_again(old: Path, name: str) -> None:
    before = unread(old)
    command(old, *COMMANDS[name])
    assert unread(old) == before
    for place in places(name):
        assert untouched(old / place) >= shards(OLD / place)


@pytest.mark.parametrize("name", EXACT)
def test_what_is_done_anew_has_the_same_bytes(old: Path, name: str) -> None:
    for place in places(name):
        shutil.rmtree(old / place)
    command(old, *COMMANDS[name])
    for place in places(name):
        assert tree(old / place) == tree(OLD / place)


@pytest.mark.system
@pytest.mark.parametrize("name", ENCODED)
def test_what_is_encoded_anew_is_the_same(old: Path, name: str) -> None:
    for place in places(name):
        shutil.rmtree(old / place)
    command(old, *COMMANDS[name])
    for place in places(name):
        alike(old / place, OLD / place)


def alike(found: Path, wanted: Path) -> None:
    """To the last bits that a processor of another kind may give."""
    assert unread(found).keys() == unread(wanted).keys()
    assert rows(found) == rows(wanted)
    for mine, theirs in zip(*(batches(root) for root in (found, wanted)), strict=True):
        assert mine.keys() == theirs.keys()
        assert mine["key"] == theirs["key"]
        for name, value in mine.items():
            if isinstance(value, torch.Tensor):
                assert torch.allclose(value.float(), theirs[name].float(), atol=1e-2)


def rows(root: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree(root).items() if name.endswith(".rows")}


def batches(root: Path) -> list[dict[str, Any]]:
    made = wdsprep.load(str(root), global_batch=1)
    return [{**batch} for batch in made]


def test_a_removal_makes_the_same_bytes(old: Path) -> None:
    shutil.rmtree(old / "less")
    for name in LESS:
        shutil.copytree(OLD / name, old / "less" / name)
    run(old, *COMMANDS["less"])
    run(old, *COMMANDS["less/latents-64"])
    for name in LESS:
        assert tree(old / "less" / name) == tree(OLD / "less" / name)


@pytest.mark.parametrize("name", ["less/mds", "less/images-chosen"])
def test_what_is_made_of_fewer_samples_has_the_same_bytes(old: Path, name: str) -> None:
    for place in (name, "less/latents-64-chosen"):
        shutil.rmtree(old / place)
    command(old, *COMMANDS[name])
    for place in (name, *(("less/latents-64-chosen",) if name != "less/mds" else ())):
        assert tree(old / place) == tree(OLD / place)


# --- what is half done


@pytest.mark.parametrize("name", sorted(KILLED.keys() - {"removing"}))
def test_a_killed_command_goes_on_to_what_one_makes_that_was_not(old: Path, name: str) -> None:
    words, *_ = KILLED[name]
    whole = name.removeprefix("begun/")
    begun = [Path("begun") / place for place in places(whole)]
    kept = {place: receipts(old / place) for place in begun}
    assert any(kept.values())
    command(old, *words)
    for place in begun:
        assert kept[place] <= untouched(old / place)
        wanted = OLD / place.relative_to("begun")
        if words[0] == "encode":
            alike(old / place, wanted)
        else:
            assert unread(old / place) == unread(wanted)
    if words[0] != "export":
        datasets = [file.parent for place in begun for file in (old / place).rglob("wdsprep.json")]
        run(old, "verify", *map(str, datasets))


def receipts(root: Path) -> set[str]:
    """Of shards that are done; an export calls them marks."""
    parts = ("receipts/", ".wdsprep/64", ".wdsprep/128")
    return {name for name in tree(root) if name.endswith(".json") and any(p in name for p in parts)}


def test_a_killed_removal_is_told_and_ended_wherever_its_images_are_now(old: Path) -> None:
    named = [f"removing/{name}" for name in LESS]
    told = run(old, "verify", *named, code=3)
    assert "wdsprep remove" in told.stdout + told.stderr
    run(old, "remove", *named, "--yes")
    run(old, "verify", *named)
    run(old, "remove", "removing/latents-64", *LOST)
    for name in LESS:
        found, wanted = unread(old / "removing" / name), unread(OLD / "less" / name)
        found.pop("removed"), wanted.pop("removed")  # which counts its changes
        assert found == wanted
    run(old, "remove", *named, *GONE)


@pytest.mark.system
def test_what_a_loader_kept_is_finished_by_encode(old: Path) -> None:
    assert not manifest(old / "teed")["complete"]
    before = shards(OLD / "teed")
    run_here(old, "encode", "images", "teed", "--resolution", "64", "--text", "none", *MODEL)
    assert manifest(old / "teed")["complete"]
    assert untouched(old / "teed") >= before
    run(old, "verify", "images", "teed")


# --- states


@pytest.mark.filterwarnings("ignore:.*is not complete:UserWarning")
@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_goes_on_from_its_state(old: Path, name: str) -> None:
    state, wanted = STATES[name]["state"], STATES[name]["next"]
    with kept_in(old / "kept"):
        made = loader(old, name)
        made.load_state_dict(state)
        assert made.state_dict() == state
        assert made.step == 2
        assert same(as_json(made, len(wanted)), wanted)


def as_json(batches: Any, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(json.dumps(noted(batches, count)))
    return found


@pytest.mark.parametrize("name", [name for name in LOADERS if "rows" in name])
def test_rows_that_are_missing_are_asked_for_and_made_the_same(old: Path, name: str) -> None:
    """As in datasets that were made before there were rows."""
    dataset, _ = LOADERS[name]
    before = rows(old / dataset)
    assert before
    for file in before:
        (old / dataset / file).unlink()
    with kept_in(old / "kept"), pytest.raises(UsageError, match=r"rows is missing: run .*index"):
        loader(old, name)
    run(old, "index", dataset)
    assert rows(old / dataset) == before


def test_what_was_kept_of_shapes_is_used(old: Path) -> None:
    before = tree(old / "kept")
    with kept_in(old / "kept"):
        loader(old, "shapes on the way")
    assert tree(old / "kept") == before
