"""Errors of one kind have one exit code in all commands, which cli/README.md lists."""

from pathlib import Path

import pytest

from wdsprep.cli import cli, main

PLACE = "PLACE"
READING: dict[str, tuple[str, ...]] = {
    "pack": (PLACE, "out"),
    "encode": (PLACE, "out", "--model", "tiny", "--resolution", "32"),
    "score": (PLACE, "out", "--language"),
    "inspect": (PLACE,),
    "verify": (PLACE,),
    "report": (PLACE, "-o", "report.html"),
    "repair": (PLACE,),
    "remove": (PLACE, "--keys", "000000000001"),
    "select": (PLACE, "out", "--count", "3"),
    "duplicates": (PLACE,),
    "import": (PLACE, "out"),
    "export": (PLACE, "out", "--to", "mds"),
    "card": (PLACE,),
    "index": (PLACE,),
    "rebuild": (PLACE,),
}
"""Each command that reads a place that the user names."""
OTHERS = {"plan", "models", "demo"}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.bin").write_text("notes")


def test_every_command_is_here() -> None:
    assert {*READING} | OTHERS == {*cli.commands}


@pytest.mark.parametrize("place", ["nowhere", "empty", "notes.bin", "000000000001"])
@pytest.mark.parametrize("command", READING)
def test_a_place_where_nothing_of_use_is_exits_with_1(
    command: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [place if word == PLACE else word for word in READING[command]]
    assert main([command, *words]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert place in line
    assert "a bug" not in line


@pytest.mark.parametrize("command", sorted(cli.commands))
@pytest.mark.parametrize("wrong", [["--no-such-option"], ["--quiet=7"]])
def test_words_that_cannot_be_meant_exit_with_2(
    command: str, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *READING.get(command, ()), *wrong]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
