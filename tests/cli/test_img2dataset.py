"""The page says what each option of img2dataset is here, and its code takes samples along."""

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tests.kit.packs import jpeg
from tests.kit.paths import ROOT
from wdsprep.cli import cli, main

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
