"""The demo, and the table of img2dataset's options."""

import ast
import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.kit.command_lines import CommandLine
from tests.kit.packs import jpeg, outcome, tree
from tests.kit.paths import ROOT
from wdsprep.cli import cli, main
from wdsprep.cli import demo as steps
from wdsprep.cli.demo import KINDS, write_pictures

LOCAL = ["--runner", "local", "--device", "cpu"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a demo runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "demo"


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


@pytest.mark.system
def test_the_demo_runs_what_it_shows_and_a_second_time_changes_nothing(
    home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few pictures, and one worker for them."""
    monkeypatch.setattr(write_pictures, "__defaults__", (12, (256, 256, 256, 512)))
    ran: list[list[str]] = []

    def run(arguments: list[str]) -> int:
        ran.append(arguments)
        more = {"encode": LOCAL, "report": ["--model", "none"]}.get(arguments[0], [])
        return int(cli.main([*arguments, *more], "wdsprep", standalone_mode=False) or 0)

    said: list[str] = []
    assert steps.demo("demo", run=run, say=said.append) == 0
    shown = [line for text in said for line in text.splitlines() if line.startswith("$ wdsprep ")]
    assert shown == ["$ wdsprep " + shlex.join(arguments) for arguments in ran]
    assert {arguments[0] for arguments in ran} >= {"pack", "encode", "verify"}
    out = capfd.readouterr().out
    assert "wdsprep.load torch.Size([4, 4, 32, 32])" in out
    assert "webdataset (4, 32, 32)" in out
    assert (home / "report.html").stat().st_size > 10_000
    before = tree(home)
    assert steps.demo("demo", run=run, say=said.append) == 0
    assert "drawn before" in said[-len(shown) - 3]
    assert capfd.readouterr().out.count("nothing left to do") == 2
    assert tree(home) == before


def test_a_folder_with_other_things_is_left_alone(home: Path, command: CommandLine) -> None:
    home.mkdir()
    (home / "thesis.txt").write_text("mine")
    told = "demo holds other files: give a new folder for the demo"
    assert told in command("demo", code=2).err
    assert [path.name for path in home.iterdir()] == ["thesis.txt"]


PAGE = ROOT / "wdsprep/cli/README.md"
PICTURES = {f"/{number}.jpg": jpeg(number, (320, 300)) for number in range(3)}


def translations() -> dict[str, str]:
    """Return what the page says of each option of img2dataset."""
    tables = re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), re.MULTILINE)
    table = next(table for table in tables if table.startswith("| img2dataset | here |"))
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    return {name: here for names, here in rows for name in re.findall(r"--(\w+)", names)}


def test_the_page_has_every_option_of_img2dataset_and_no_other() -> None:
    spec = importlib.util.find_spec("img2dataset")
    if spec is None or spec.origin is None:
        pytest.skip("needs pip install --no-deps img2dataset")
    body = ast.parse(Path(spec.origin).with_name("main.py").read_text()).body
    (download,) = (n for n in body if isinstance(n, ast.FunctionDef) and n.name == "download")
    assert translations().keys() == {argument.arg for argument in download.args.args}


def test_what_stands_in_place_of_an_option_is_an_option_of_ours() -> None:
    commands = (cli.commands["pack"], cli.commands["encode"])
    known = {name for command in commands for option in command.params for name in option.opts}
    named = set(re.findall(r"--[a-z][a-z-]+", " ".join(translations().values())))
    assert {"--workers", "--max-side", "--ray-address", "--resolution"} <= named <= known


def test_the_code_of_the_page_takes_samples_from_elsewhere_to_a_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    train, write = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(write, names)
    names["write_tars"]([{"image": data, "caption": path} for path, data in PICTURES.items()])
    assert main(["pack", "tars", "--workers", "1"]) == 0
    exec(train, {})
    said = capfd.readouterr().out
    assert {path for path in PICTURES if path in said} == set(PICTURES)
