"""The demo: drawn downloads of every kind, through all commands, as its printed commands say."""

import hashlib
import shlex
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from tests.kit.packs import outcome
from wdsprep.cli import cli, main
from wdsprep.cli.demo import steps
from wdsprep.cli.demo.pictures import CORNERS, KINDS, draw, write_pictures

LOCAL = ["--runner", "local", "--device", "cpu"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a demo runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "demo"


def test_a_drawing_follows_from_its_seed_and_size() -> None:
    first, again, other = draw("a", (80, 60)), draw("a", (80, 60)), draw("b", (80, 60))
    assert first.image.tobytes() == again.image.tobytes() != other.image.tobytes()
    assert (first.caption, first.image.size) == (again.caption, (80, 60))


def test_captions_name_what_was_drawn_and_are_many() -> None:
    captions = [draw(number, (64, 64)).caption for number in range(300)]
    assert len(set(captions)) > 250
    assert all(name in " ".join(captions) for name in CORNERS)


def test_every_kind_of_picture_is_packed_and_every_broken_one_is_a_reject(home: Path) -> None:
    home.mkdir()
    good, broken = write_pictures(home, 2 * len(KINDS), (256, 300, 520))
    assert main(["pack", "demo", "images", "--workers", "1"]) == 0
    found = outcome(Path("images"))
    packed = [source for source, code in found.items() if code == "packed"]
    assert len(packed) == good == 2 * len(KINDS)
    assert {source.partition("-")[2].partition(".")[0] for source in packed} == set(KINDS)
    assert len(found) - len(packed) == broken
    codes = {"truncated", "not_an_image", "empty", "too_small", "bad_caption"}
    assert {code for code in found.values() if code != "packed"} == codes


def test_a_16_bit_picture_keeps_its_shades(tmp_path: Path) -> None:
    drawing = draw("shades", (300, 260)).image
    (tmp_path / "a.png").write_bytes(KINDS["deep"](drawing))
    with Image.open(tmp_path / "a.png") as found:
        assert found.mode == "I;16"
        assert found.tobytes()[1::2] == drawing.convert("L").tobytes()


def digest(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.system
def test_the_demo_runs_what_it_shows_and_a_second_time_changes_nothing(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With few pictures, and one worker for them."""
    few = partial(write_pictures, count=12, sides=(256, 256, 256, 512))
    ran: list[list[str]] = []

    def run(arguments: list[str]) -> int:
        ran.append(arguments)
        more = {"encode": LOCAL, "report": ["--model", "none"]}.get(arguments[0], [])
        return int(cli.main([*arguments, *more], "wdsprep", standalone_mode=False) or 0)

    said: list[str] = []
    assert steps.demo("demo", run=run, say=said.append, draw=few) == 0
    shown = [line for text in said for line in text.splitlines() if line.startswith("$ wdsprep ")]
    assert shown == ["$ wdsprep " + shlex.join(arguments) for arguments in ran]
    assert {arguments[0] for arguments in ran} >= {"pack", "encode", "verify"}
    out = capfd.readouterr().out
    assert "wdsprep.load torch.Size([4, 4, 32, 32])" in out
    assert "webdataset (4, 32, 32)" in out
    assert (home / "report.html").stat().st_size > 10_000
    before = digest(home)
    assert steps.demo("demo", run=run, say=said.append, draw=few) == 0
    assert "drawn before" in said[-len(shown) - 3]
    assert capfd.readouterr().out.count("nothing left to do") == 2
    assert digest(home) == before


def test_a_folder_with_other_things_is_left_alone(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home.mkdir()
    (home / "thesis.txt").write_text("mine")
    assert main(["demo"]) == 2
    assert "demo holds other files: give a new folder for the demo" in capfd.readouterr().err
    assert [path.name for path in home.iterdir()] == ["thesis.txt"]


def test_overwrite_makes_all_of_a_demo_again_and_keeps_what_is_not_its_own(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    few = partial(write_pictures, count=12)
    ran: list[list[str]] = []

    def run(arguments: list[str]) -> int:
        ran.append(arguments)
        return 1 if arguments[0] == "encode" else main(arguments)

    assert steps.demo("demo", run=run, say=lambda _text: None, draw=few) == 1
    drawn = digest(home / "downloads")
    picture = home / "downloads/web/0002-jpg.jpg"
    picture.write_bytes(b"spoilt")
    (home / "downloads/mine.txt").write_text("a photo without its picture")
    assert steps.demo("demo", overwrite=True, run=run, say=lambda _text: None, draw=few) == 1
    assert digest(home / "downloads").items() > drawn.items()
    assert ["--overwrite" in words for words in ran] == [False, False, True, True]
    assert outcome(home / "images")["mine.txt"] == "no_image"
    (home / "load.py").write_text("mine")
    assert main(["demo", "--overwrite"]) == 2
    assert "demo holds other files" in capfd.readouterr().err
    assert (home / "load.py").read_text() == "mine"
