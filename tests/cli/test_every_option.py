"""Every option of every command and function, by the declarations: what cannot be meant is refused
in the same line on the command line and in Python."""

import pickle
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdsprep
from tests.house.test_public import CALLED
from wdsprep.cli import cli
from wdsprep.cli.base_command import import_function
from wdsprep.cli.declared_options import DeclaredCommand
from wdsprep.errors import UsageError
from wdsprep.options import Option, options_of

IN_PYTHON = {
    "load": "wdsprep.loading.options:LoadOptions",
    "stream": "wdsprep.loading.options:StreamOptions",
    "Encode": "wdsprep.encoding.options:Encode",
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
        if name not in IN_PYTHON:
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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pack", {"min_size": True}),
        ("pack", {"limit": 1 << 64}),
        ("pack", {"max_aspect_ratio": float("inf")}),
        ("pack", {"save_additional_columns": [1]}),
        ("pack", {"buckets": b"ab"}),
        ("pack", {"caption_col": []}),
        ("pack", {"append": 1.0}),
        ("pack", {"workers": ()}),
        ("encode", {"max_bytes": 10**400}),
        ("encode", {"captions_by": np.array(["key"])}),
        ("import_", {"shapes": None}),
        ("remove", {"keys": [1]}),
        ("remove", {"keys": b"ab"}),
        ("select", {"split": ["train"]}),
        ("load", {"fields": 5}),
        ("load", {"device": 10**400}),
        ("export", {"to": "mds", "out": "a\0b"}),
    ],
)
def test_what_was_once_taken_for_something_else_is_refused(
    name: str, options: dict[str, Any]
) -> None:
    (wrong,) = options.keys() - {"to"}
    spelled = {option.name: option.spelled for option in declared(name)}[wrong]
    place = IN_PYTHON.get(name) or command_of(name)._place
    needed = {each.name: "there" for each in declared(name) if each.is_required}
    with pytest.raises(UsageError, match=f"^{spelled} "):
        import_function(place)(**{**needed, **NEEDED.get(name, {}), **options})


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
            "--caption-fields names the captions after",
        ),
        ("encode", {"latents": "none", "text": "none"}, "--latents none and --text none leave"),
        ("encode", {"latents": "none", "flip": True}, "--flip is for images"),
        ("encode", {"latents": "none", "text_out": "c"}, "--text-out is for text beside latents"),
        ("encode", {"captions_by": "key", "resolution": 64}, "--captions-by is for a table"),
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
