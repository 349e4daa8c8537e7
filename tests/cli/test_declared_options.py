"""Declared options on the command line: the same check, in the same line, as in Python."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from wdsprep.cli.declared_options import DeclaredCommand
from wdsprep.errors import UsageError
from wdsprep.options import Options, about, takes_options
from wdsprep.text import parse_size


@dataclass(frozen=True, kw_only=True)
class Cut(Options):
    source: str = field(kw_only=False, metadata=about("The folder to cut.", is_place=True))
    min_size: int = field(
        default=0, metadata=about("Reject smaller images.", "Images", least=-9, usual=True)
    )
    mode: str = field(default="full", metadata=about("Do so.", "Images", choices=("full", "fast")))
    max_size: int | str = field(
        default="2GB",
        metadata=about("End there.", "Output", read=parse_size, metavar="SIZE", usual=True),
    )
    join: tuple[str, ...] = field(default=(), metadata=about("Add this.", "Output", is_many=True))
    overwrite: bool = field(default=False, metadata=about("Start over.", "Output"))


@takes_options(Cut)
def cut(options: Cut) -> Cut:
    return options


HEARD: list[Any] = []


def command() -> DeclaredCommand:
    return DeclaredCommand(
        "cut",
        callback=lambda **options: HEARD.append(options),
        declared="tests.cli.test_declared_options:Cut",
        function="tests.cli.test_declared_options:cut",
        headings=("Output", "Images"),
    )


def given(*words: str) -> Any:
    command().main(list(words), prog_name="cut", standalone_mode=False)
    return HEARD.pop()


def test_what_is_not_given_has_the_declared_default() -> None:
    options = {"min_size": 0, "mode": "full", "max_size": "2GB", "join": (), "overwrite": False}
    assert given("a") == {"source": "a", **options}


def test_a_number_that_no_file_could_hold_is_refused() -> None:
    for number in (1 << 63, 1 << 70, 10**5000):
        with pytest.raises(UsageError, match=r"--min-size .*: give 9223372036854775807 or less"):
            cut("a", min_size=number)
    assert cut("a", min_size=(1 << 63) - 1).min_size == (1 << 63) - 1


def test_help_has_the_headings_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    command().main(["--help"], prog_name="cut", standalone_mode=False)
    said = capsys.readouterr().out
    assert said.startswith("Usage: cut [OPTIONS] SOURCE\n")
    assert said.index("Output:") < said.index("Images:")
    assert "--max-size SIZE  End there.  [default: 2GB]" in said
    assert "--mode [full|fast]" in said
    assert "--min-size N" in said


def test_an_option_of_many_may_be_given_again() -> None:
    assert given("a", "--join", "b", "--join", "c")["join"] == ("b", "c")
