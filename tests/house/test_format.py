"""What was written before in the format of today is read, continued and served by today's code."""

import json
from pathlib import Path

import pytest

import wdsprep
from tests.kit.small_sets import ENCODE, FIXTURE, LOAD, PACK, copied_fixture, run_in


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return copied_fixture(tmp_path / "home")


def tree(root: Path) -> dict[str, bytes]:
    """The files of a dataset, without those by which runs take turns."""
    paths = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".hold")
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def test_it_is_sound(home: Path) -> None:
    assert not wdsprep.verify(str(home / "images"), str(home / "latents")).findings


def test_what_is_done_is_not_done_again(home: Path) -> None:
    run_in(home, "pack", "downloads", "images", *PACK)
    run_in(home, "encode", "images", "latents", *ENCODE)
    assert tree(home) == tree(FIXTURE)


def test_what_is_packed_anew_has_the_same_bytes(home: Path) -> None:
    (home / "images/receipts/000001.json").unlink()
    (home / "images/128/000001.tar").unlink()
    run_in(home, "rebuild", "images")
    run_in(home, "pack", "downloads", "images", *PACK)
    assert tree(home / "images") == tree(FIXTURE / "images")


def test_a_loader_goes_on_from_its_state(home: Path) -> None:
    said = json.loads((FIXTURE / "loader.json").read_bytes())
    loader = wdsprep.load(str(home / "latents"), **LOAD)
    loader.load_state_dict(said["state"])
    assert [batch["key"] for batch in loader] == said["rest"]
    again = wdsprep.load(str(home / "latents"), **LOAD)
    assert [batch["key"] for batch in again] == said["served"] + said["rest"]
