"""The format is as frozen; files that say another one, or that somebody changed, are one line."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import wdsprep
from tests.kit.damaged import check
from tests.kit.encodes import in_this_process
from tests.kit.fuzz.datasets import make_datasets
from tests.kit.fuzz.judge import at_most
from tests.kit.packs import manifest_of, packing_here
from tests.kit.sealed_files import resealed
from tests.kit.small_sets import ENCODE, FIXTURE, LOAD, PACK, date, run_in
from wdsprep.cli import main
from wdsprep.errors import FingerprintError, FormatError
from wdsprep.store import open_store


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_datasets(tmp_path_factory.mktemp("sound"), ("latents",))


@pytest.fixture
def own(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copytree(sound, tmp_path / "own"))


# --- what a receipt claims is held against what is there


def _claim(images: Path, inputs: int, rejects: dict[str, int], **settings: Any) -> None:
    def change(body: dict[str, Any]) -> None:
        body["settings"] |= settings
        for said in body.get("units", [body]):
            if said["unit"] == "000000":
                said |= {"inputs": inputs, "rejects": rejects}

    for path in (images / "wdsprep.json", *images.glob("receipts/*.json")):
        path.write_bytes(resealed(path.read_bytes(), change))


@pytest.mark.parametrize("inputs", [10**18, (1 << 31) - 1])
def test_inputs_that_are_not_there_cost_no_time(own: Path, inputs: int) -> None:
    _claim(own / "images", inputs, {"vanished": inputs - 4})
    with at_most(20):
        found = check(own / "images").findings
        assert any(finding.unit == "000000" for finding in found)
        assert not wdsprep.repair(own / "images", yes=True, workers=1).beyond


def test_rejects_of_so_many_inputs_are_not_made_again_one_by_one(own: Path) -> None:
    _claim(own / "images", (1 << 31) - 1, {"vanished": (1 << 31) - 5}, source="urls")
    (own / "images/rejects/000000.jsonl").unlink()
    with at_most(20):
        repair = wdsprep.repair(own / "images", yes=True, workers=1)
    assert (list(repair.units), list(repair.mended)) == (["000000"], [])


# --- states


@pytest.mark.parametrize(
    "state",
    [
        *(b"\x1b" * 1_000_000, "x" * 1_000_000, None, 5, [], object(), {b"step": 1}, {1: 2}),
        *({"step": 1}, {"version": 1}, {"version": 10**5000, "step": 0}),
    ],
    ids=lambda state: f"{type(state).__name__}",
)
def test_what_is_no_state_is_refused_in_a_line(sound: Path, state: Any) -> None:
    loader = wdsprep.load(sound / "latents", global_batch=2)
    with pytest.raises(FormatError) as refused:
        loader.load_state_dict(state)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "changed",
    [
        *({"row": value} for value in (5, "x", [1], [1, 2, 3], ["a", 1], [-1, 1], [10**30, 1])),
        *({"worker": value} for value in (5, "abc", [1], [0, 1, "x"], [0, 0, 5], b"abc")),
        *({"version": value} for value in (True, "2", 99)),
        *({"step": value} for value in (True, -1, "5", 1.0, 10**30)),
        *({"seed": value} for value in ("x" * 10**6, b"x" * 10**6, object(), 10**5000, [[]] * 99)),
        {f"other {number}": "\x1b" * 1000 for number in range(1_000)},
        {"x" * 1_000_000: 1},
    ],
    ids=lambda changed: next(iter(changed))[:10],
)
def test_a_state_of_another_kind_is_refused_in_few_words(
    sound: Path, changed: dict[str, Any]
) -> None:
    loader = wdsprep.load(sound / "latents", global_batch=2)
    with pytest.raises((FormatError, FingerprintError)) as refused:
        loader.load_state_dict(loader.state_dict() | changed)
    assert len(str(refused.value)) < 12_000
    assert loader.step == 0


# --- next steps


def test_each_command_says_what_mends_a_missing_shard(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images, out = own / "images", str(own / "out")
    (images / manifest_of(images).shards[0].name).unlink()
    for words in (
        ("remove", str(images), "--keys", "000000000000", "--yes"),
        ("select", str(images), out, "--count", "8", "--workers", "1"),
        ("export", str(images), out, "--to", "wids", "--workers", "1"),
        ("duplicates", str(images), "--workers", "1"),
    ):
        with packing_here(), in_this_process():
            main([*words])
        told = capsys.readouterr().err
        assert "a bug" not in told
        assert f'run "wdsprep repair {images}", then the same command again' in told, words
        shutil.rmtree(out, ignore_errors=True)


def test_samples_go_out_of_a_folder_whose_name_is_no_utf8(sound: Path, tmp_path: Path) -> None:
    root = tmp_path / os.fsdecode(b"\xff")
    for name in ("images", "latents"):
        shutil.copytree(sound / name, root / name)
    removal = wdsprep.remove(root / "images", root / "latents", keys=["000000000000"], yes=True)
    assert [place.samples for place in removal.places] == [1, 1]
    assert not wdsprep.verify(root / "images", root / "latents", workers=1).findings
    assert open_store(str(root / "latents")).read("removed")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A copy of the fixture in which all files have their date, which git does not keep."""
    date(shutil.copytree(FIXTURE, tmp_path / "home"))
    return tmp_path / "home"


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
