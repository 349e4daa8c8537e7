"""Every option of every command and function: what cannot be meant is one line, with its code."""

import pickle
import re
from collections.abc import Iterator
from dataclasses import fields
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdsprep
from tests.house.test_public import CALLED
from wdsprep.changes.options import SelectOptions
from wdsprep.cli import cli, main
from wdsprep.cli.base_command import import_function
from wdsprep.cli.declared_options import DeclaredCommand
from wdsprep.errors import UsageError
from wdsprep.options import Option, options_of

IN_PYTHON = {
    "load": "wdsprep.loading.options:LoadOptions",
    "stream": "wdsprep.loading.options:StreamOptions",
    "Encode": "wdsprep.encoding.recipe_options:Encode",
    "Stream": "wdsprep.loading.open_datasets:Stream",
}
NEEDED: dict[str, dict[str, Any]] = {
    "load": {"global_batch": 8},
    "stream": {"global_batch": 8, "encode": wdsprep.Encode(resolution=64)},
    "Encode": {"resolution": 64},
    "export": {"to": "mds"},
}
PLACES = {"pack": 2, "encode": 2, "inspect": 2, "repair": 1, "select": 2, "import_": 2, "export": 2}


def command_of(name: str) -> DeclaredCommand:
    command = cli.commands[name.rstrip("_")]
    assert isinstance(command, DeclaredCommand)
    return command


def declared(name: str) -> tuple[Option, ...]:
    if name in IN_PYTHON:
        return options_of(import_function(IN_PYTHON[name]))
    return command_of(name).declared


ALL = [
    pytest.param(name, option, id=f"{name}-{option.name}")
    for name in (*CALLED, *IN_PYTHON)
    for option in declared(name)
    if not option.is_argument
]


def in_python(name: str, **options: Any) -> str:
    places = ["here", "there"][: PLACES.get(name, 0 if name == "Encode" else 1)]
    with pytest.raises(UsageError) as refused:
        getattr(wdsprep, name)(*places, **{**NEEDED.get(name, {}), **options})
    return str(refused.value)


def on_the_line(name: str, *words: str) -> str:
    needed = NEEDED.get(name, {})
    given = [word for n, value in needed.items() for word in (f"--{n}", str(value))]
    given = given if not words[0].startswith(tuple(given[:1])) or not given else []
    places = ["here", "there"][: PLACES.get(name, 1)]
    with pytest.raises(UsageError) as refused:
        cli.main([name.rstrip("_"), *places, *given, *words], standalone_mode=False)
    return str(refused.value)


def wrong_values(option: Option) -> Iterator[tuple[str, Any]]:
    """As they are typed, and as they are in Python."""
    about = option.about
    if option.is_flag:
        yield "=perhaps", "perhaps"
    elif about.choices:
        yield "=no-such-word", "no-such-word"
    elif option.is_number:
        yield "=many", "many"
        if about.least is not None:
            less = about.least - 1
            yield f"={less:g}", float(less) if "float" in option.annotation else int(less)
        if about.most is not None:
            yield f"={about.most + 1:g}", about.most + 1


@pytest.mark.parametrize(("name", "option"), ALL)
def test_a_value_of_a_wrong_kind_or_out_of_range_is_one_line(name: str, option: Option) -> None:
    for typed, value in wrong_values(option):
        said = in_python(name, **{option.name: value})
        assert said.startswith(f"{option.spelled} ")
        assert "\n" not in said
        if name not in IN_PYTHON and not option.is_flag:
            line = on_the_line(name, f"{option.spelled}{typed}")
            assert line.removesuffix(", or put the option last, without one") == said


ODD: tuple[Any, ...] = (
    *(None, True, 1.5, -1, float("nan"), float("inf"), 10**400, 10**5000, 1j, Decimal(1)),
    *(b"ab", bytearray(b"a"), "two\nlines", "a\0b", "half \udcff", "long" * 10_000, " ", "\u0663"),
    *([], (), {}, [None], [[1]], {1: "a"}, {"a"}, range(3), Path("somewhere"), int, len),
    *(np.bool_(1), np.int64(3), np.float32(0.5), np.arange(3), np.array(3), np.array([]), date.min),
)


@pytest.mark.parametrize("name", [*CALLED, *IN_PYTHON])
def test_whatever_an_option_is_given_is_taken_or_refused_in_one_short_line(name: str) -> None:
    place = IN_PYTHON.get(name) or command_of(name)._place
    options = import_function(place)
    needed = {each.name: "there" for each in declared(name) if each.is_required}
    needed = {**needed, **NEEDED.get(name, {})}
    for option in declared(name):
        for value in ODD:
            try:
                made = options(**{**needed, option.name: value})
            except UsageError as error:
                said = str(error)
                assert "\n" not in said, (option.name, value)
                assert len(said) < 600, (option.name, value)
            else:
                assert pickle.loads(pickle.dumps(made)) == made
                kept = getattr(made, option.name)
                assert not isinstance(kept, np.generic | np.ndarray), (option.name, value)


@pytest.mark.parametrize(("name", "option"), ALL)
def test_a_name_that_is_misspelt_is_one_line_with_what_may_be_meant(
    name: str, option: Option
) -> None:
    wrong = option.name + option.name[-1]
    assert in_python(name, **{wrong: 1}) == (
        f"{name}() has no option {wrong}: did you mean {option.name}?"
    )
    if name not in IN_PYTHON and not option.about.spelling:
        dashed = f"--{wrong.replace('_', '-')}"
        assert on_the_line(name, dashed) == (
            f"{name.rstrip('_')} has no option {dashed}: did you mean {option.spelled}?"
        )


@pytest.mark.parametrize("name", PLACES)
def test_a_place_that_is_given_twice_is_one_line(name: str) -> None:
    first = next(option for option in declared(name) if option.is_argument)
    assert in_python(name, **{first.name: "again"}) == (
        f"{first.spelled} is given twice: give it once"
    )


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("pack", {"append": True, "overwrite": True}, "--append keeps what is packed, --overwrite"),
        ("pack", {"retry_rejected": True, "overwrite": True}, "--overwrite removes the rejects"),
        ("pack", {"min_caption": 9, "max_caption": 5}, "--max-caption is below --min-caption"),
        ("pack", {"max_side": 64}, "--max-side needs --reencode"),
        ("pack", {"workers": "2:4"}, "2:4 workers are for a Ray cluster"),
        ("encode", {"captions": "a", "caption_field": "b"}, "--captions and --caption-field both"),
        (
            "encode",
            {"caption_name": "a", "caption_fields": "b,c"},
            "--empty and --caption-fields name their",
        ),
        ("encode", {"latents": "none", "text": "none"}, "--latents none and --text none leave"),
        ("encode", {"latents": "none", "flip": True}, "--flip is for images"),
        ("encode", {"latents": "none", "text_out": "c"}, "--text-out is for text beside latents"),
        ("encode", {"captions_by": "key", "resolution": 64}, "--captions-by and --caption-column"),
        ("import_", {"shapes": "sdxl"}, "--shapes is a list for one resolution"),
    ],
)
def test_two_that_exclude_each_other_are_the_same_line(
    name: str, options: dict[str, Any], said: str
) -> None:
    words = []
    for option, value in options.items():
        words += [f"--{option.replace('_', '-')}", *([] if value is True else [str(value)])]
    assert in_python(name, **options).startswith(said)
    assert on_the_line(name, *words) == in_python(name, **options)


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
@pytest.mark.parametrize("wrong", [["--no-such-option"], ["--quiet=7"], ["--json=no"]])
def test_words_that_cannot_be_meant_exit_with_2(
    command: str, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *READING.get(command, ()), *wrong]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_what_is_not_given_has_its_default_and_an_option_of_many_has_all_its_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = command_of("select")
    monkeypatch.setattr(command, "callback", lambda **options: options)
    defaults = {field.name: field.default for field in fields(SelectOptions) if field.kw_only}
    del defaults["listener"], defaults["progress"]
    places = {"datasets": ("a", "b"), "out": "c", "as_json": False}
    for words, join in ([], ()), (["--join", "d", "--join", "e"], ("d", "e")):
        values = command.main(["a", "b", "c", *words], prog_name="x", standalone_mode=False)
        assert values == {**defaults, **places, "join": join}


def test_a_number_that_no_file_could_hold_is_refused() -> None:
    for number in (1 << 63, 1 << 70, 10**5000):
        said = in_python("select", count=number)
        assert re.fullmatch("--count .*: give 9223372036854775807 or less", said)
    assert SelectOptions("a", "b", count=(1 << 63) - 1).count == (1 << 63) - 1


def test_help_has_the_headings_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["select", "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Usage: wdsprep select [OPTIONS] DATASET... OUT\n")
    headings = [line for line in said.splitlines() if re.fullmatch(r"\w+:", line)]
    assert headings == ["Examples:", "Samples:", "Workers:", "Output:", "General:"]
    assert "--max-shard-size SIZE " in said
    assert "[default: 2GB]" in said
    assert "--runner [auto|local|ray] " in said
    assert "--seed N " in said
