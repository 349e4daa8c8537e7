"""What is said of a damaged file: where, why, and one next step, which is the caller's."""

import pickle
from collections.abc import Iterator

import pytest

from wdsprep.dataset.damage import naming_next_step, naming_repair, readable, repair_step
from wdsprep.dataset.tar.members import BadSampleError
from wdsprep.errors import (
    DamageError,
    FormatError,
    NewerFormatError,
    NotFoundError,
    TarError,
    UsageError,
    WdsprepError,
)
from wdsprep.store import open_store


def damage() -> DamageError:
    return DamageError("s3://b/images/256/000001.tar", "its json is no object", "0000010002")


def test_damage_says_where_and_why() -> None:
    error = damage()
    assert str(error) == (
        "s3://b/images/256/000001.tar is damaged at sample 0000010002: its json is no object"
    )
    assert (error.place, error.cause, error.key) == (
        "s3://b/images/256/000001.tar",
        "its json is no object",
        "0000010002",
    )
    assert isinstance(error, FormatError)
    assert isinstance(error, TarError)
    assert str(DamageError("a.idx", "it is empty")) == "a.idx is damaged: it is empty"


def test_the_innermost_caller_names_the_next_step() -> None:
    with (
        pytest.raises(DamageError, match=r"no object: run the first$"),
        naming_next_step("run the second"),
        naming_next_step("run the first"),
    ):
        raise damage()


@pytest.mark.parametrize(
    "error",
    [damage(), NotFoundError("a is not there"), BadSampleError("b", code="truncated", key="k")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_keeps_its_class_and_fields_where_a_step_is_added(error: WdsprepError) -> None:
    before, fields = str(error), dict(vars(error))
    with pytest.raises(type(error)) as raised, naming_repair(open_store("/data/images")):
        raise error
    assert raised.value is error
    assert fields.items() <= vars(error).items()
    again = 'run "wdsprep repair /data/images", then the same command again'
    assert str(error) == f"{before}: {again}"


@pytest.mark.parametrize("error", [NewerFormatError("of format 9: upgrade"), UsageError("no")])
def test_what_is_no_damage_gets_no_step(error: WdsprepError) -> None:
    before = str(error)
    with pytest.raises(type(error)), naming_next_step("run something"):
        raise error
    assert str(error) == before


def test_damage_comes_whole_out_of_a_worker() -> None:
    error = damage().with_next_step(repair_step("s3://b/images"))
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is DamageError
    assert (str(there), vars(there)) == (str(error), vars(error))


def test_no_part_of_it_tells_a_secret() -> None:
    error = DamageError("https://h/a.tar?sig=S", "not what https://h/a.idx?sig=S says")
    error.with_next_step(repair_step("https://h/images?sig=S"))
    assert "sig" not in f"{error}{vars(error)}"


def test_steps_paste_into_a_shell() -> None:
    assert repair_step("my images", 'the same "wdsprep encode"') == (
        'run "wdsprep repair \'my images\'", then the same "wdsprep encode" again'
    )


def test_what_was_read_before_the_damage_is_given_out() -> None:
    def rows() -> Iterator[int]:
        yield 1
        raise DamageError("/data/a.tar", "it ends early")

    found = readable(open_store("/data"), rows())
    assert next(found) == 1
    with pytest.raises(DamageError, match=r'ends early: run "wdsprep repair /data"'):
        next(found)
