"""Options that are declared once: the call, its check and its signature."""

import inspect
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pytest

from wdsprep.errors import UsageError, WdsprepError
from wdsprep.options import (
    OptionError,
    Options,
    about,
    options_of,
    refuse_unknown_options,
    takes_datasets,
    takes_options,
)
from wdsprep.text import parse_size


@dataclass(frozen=True, kw_only=True)
class Sides(Options):
    least_side: int = field(default=0, metadata=about("The shorter side.", "Images", least=0))
    share: float = field(default=0.5, metadata=about("A share.", "Images", least=0, most=1))


@dataclass(frozen=True, kw_only=True)
class Rules(Sides):
    """Those of a small command."""

    source: str = field(default="downloads", kw_only=False, metadata=about("What is packed."))
    check: str = field(default="full", metadata=about("How.", "Images", choices=("full", "header")))
    max_size: int | str = field(default="2GB", metadata=about("Bytes.", "Output", read=parse_size))
    append: bool = field(default=False, metadata=about("Keep.", "Output"))
    overwrite: bool = field(default=False, metadata=about("Remove.", "Output"))
    heard: object = None

    def check_together(self) -> None:
        super().check_together()
        if self.append and self.overwrite:
            raise UsageError("--append and --overwrite: one keeps, one removes")

    @cached_property
    def nbytes(self) -> int:
        return int(self.max_size)


@takes_options(Rules)
def pack(options: Rules) -> int:
    """Return a number of bytes."""
    return options.nbytes


@takes_datasets(Sides)
def verify(datasets: Sequence[Any], options: Sides) -> tuple[list[Any], int]:
    return list(datasets), options.least_side


@refuse_unknown_options
@dataclass(frozen=True, kw_only=True)
class Taught(Options):
    batch: int = field(
        default=1, metadata=about("The samples of a step.", also=("batch_size",), least=1)
    )


def test_a_function_has_the_signature_of_its_options() -> None:
    found = inspect.signature(pack)
    assert list(found.parameters) == [*inspect.signature(Rules).parameters]
    assert found.return_annotation is int
    assert (pack.__name__, pack.__doc__) == ("pack", "Return a number of bytes.")
    assert str(inspect.signature(verify)).startswith("(*datasets: ")


def test_what_is_given_is_read_once_and_the_same_again() -> None:
    assert pack("there", max_size="1kB") == 1000
    assert verify("a", "b", least_side=3) == (["a", "b"], 3)
    rules = Rules(max_size="1kB")
    assert rules.max_size == 1000
    assert replace(rules, least_side=1).nbytes == 1000
    assert pickle.loads(pickle.dumps(rules)) == rules


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: pack(least_side=-1), "--least-side -1: give 0 or more"),
        (lambda: pack(least_side="many"), "--least-side 'many': give a whole number"),
        (lambda: pack(least_side=None), "--least-side None: give a whole number"),
        (lambda: pack(share=float("nan")), "--share nan: give 0 or more"),
        (lambda: pack(share=2), "--share 2: give 1 or less"),
        (lambda: pack(check="twice"), "--check 'twice': give one of full, header"),
        (
            lambda: pack(max_size="2XB"),
            "--max-size '2XB' is not a size: write 2GB, 500MB or a number",
        ),
        (lambda: pack(source=5), "SOURCE 5: give a string"),
        (lambda: pack("a", source="b"), "SOURCE is given twice: give it once"),
        (lambda: pack("a", 3), r"pack() takes 1 argument without a name (source): give 3 a name"),
        (lambda: pack(append="yes"), "--append 'yes': give True or False; on the command line it"),
        (lambda: pack(append=True, overwrite=True), "--append and --overwrite: one keeps, one"),
        (lambda: pack(least_sides=1), "pack() has no option least_sides: did you mean least_side?"),
        (lambda: verify("a", shares=1), "verify() has no option shares: did you mean share?"),
        (lambda: pack(zzz=1), "pack() has no option zzz: help(wdsprep.pack) lists them"),
        (lambda: pack(least=1), "pack() has no option least: did you mean least_side?"),
        (
            lambda: verify(datasets="a"),
            "verify() has no option datasets: it takes",
        ),
        (
            lambda: verify(dataset="a"),
            "verify() has no option dataset: it takes datasets",
        ),
        (lambda: Taught(1), "Taught() takes no argument without a name: give 1 a name"),
        (lambda: Taught(batch_size=1), "Taught() has no option batch_size: it is batch, the"),
        (lambda: Taught(btch=1), "Taught() has no option btch: did you mean batch?"),
    ],
)
def test_what_cannot_be_meant_is_one_line_that_names_the_option(call: Any, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        call()
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


def test_an_unknown_option_is_a_type_error_as_python_has_it_and_ours() -> None:
    assert issubclass(OptionError, TypeError)
    assert issubclass(OptionError, WdsprepError)


def test_a_field_that_nothing_is_said_about_is_no_option() -> None:
    assert "heard" not in {option.name for option in options_of(Rules)}
    assert "heard" in inspect.signature(pack).parameters
