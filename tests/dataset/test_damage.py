"""What is said of a damaged file: where, why, and one next step, which is the caller's."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import wdsprep
from tests.kit.packs import pack, photos
from wdsprep.dataset.damage import naming_next_step, naming_repair, repair_step
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.tar.members import BadSampleError
from wdsprep.errors import (
    DamageError,
    FormatError,
    NotFoundError,
    OtherFormatError,
    TarError,
    UsageError,
    WdsprepError,
)
from wdsprep.store import open_store


def damage() -> DamageError:
    return DamageError("s3://b/images/256/000001.tar", "its json is not an object", "0000010002")


def test_damage_says_where_and_why() -> None:
    error = damage()
    assert str(error) == (
        "s3://b/images/256/000001.tar is damaged at sample 0000010002: its json is not an object"
    )
    assert (error.place, error.cause, error.key) == (
        "s3://b/images/256/000001.tar",
        "its json is not an object",
        "0000010002",
    )
    assert isinstance(error, FormatError)
    assert isinstance(error, TarError)
    assert str(DamageError("a.idx", "it is empty")) == "a.idx is damaged: it is empty"


def test_the_innermost_caller_names_the_next_step() -> None:
    with (
        pytest.raises(DamageError, match=r"not an object: run the first$"),
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


@pytest.mark.parametrize("error", [OtherFormatError("of format 9: upgrade"), UsageError("no")])
def test_what_is_no_damage_gets_no_step(error: WdsprepError) -> None:
    before = str(error)
    with pytest.raises(type(error)), naming_next_step("run something"):
        raise error
    assert str(error) == before


def test_no_part_of_it_tells_a_secret() -> None:
    error = DamageError("https://h/a.tar?sig=S", "not what https://h/a.idx?sig=S says")
    error.with_next_step(repair_step("https://h/images?sig=S"))
    assert "sig" not in f"{error}{vars(error)}"


def test_a_code_that_a_stranger_made_up_is_one_line() -> None:
    with pytest.raises(FormatError, match="'eaten' is the code of no reject: verify the dataset"):
        Code("eaten")


# What commands say.


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("damage")
    return pack(photos(place / "in", 3), place / "images")


def without_objects(data: bytes) -> bytes:
    """The json of each sample is a list, which the headers do not show."""
    return data.replace(b'{"', b'["')


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


COMMANDS: dict[str, Callable[[Path, Path], object]] = {
    "duplicates": lambda images, _out: wdsprep.duplicates(images, workers=1),
    "export": lambda images, out: wdsprep.export(images, out, to="webshart"),
    "remove": lambda images, _out: wdsprep.remove(images, keys=["000000000002"], yes=True),
    "select": lambda images, out: wdsprep.select(images, out, keys=["000000000002"], workers=1),
}


@pytest.mark.parametrize(
    ("command", "change"),
    [
        *((command, cut) for command in COMMANDS),
        *((command, without_objects) for command in sorted(COMMANDS.keys() - {"select"})),
    ],  # select copies the json as it is, and what it says from the table
)
def test_each_command_names_the_shard_and_the_repair(
    images: Path, tmp_path: Path, command: str, change: Callable[[bytes], bytes]
) -> None:
    place = tmp_path / "images"
    shutil.copytree(images, place)
    tar = place / "32/000000.tar"
    tar.write_bytes(change(tar.read_bytes()))
    with pytest.raises(TarError) as refused:
        COMMANDS[command](place, tmp_path / "out")
    said = str(refused.value)
    assert said.startswith(f"{tar}")
    assert said.endswith(f': run "wdsprep repair {place}", then the same command again')
    assert said.count("wdsprep repair") == 1


def test_a_shard_gone_wrong_of_two_is_told_by_its_own_dataset(images: Path, tmp_path: Path) -> None:
    """Several datasets are copied into one: the next step is about the one that is damaged."""
    both = [tmp_path / name for name in "ab"]
    for place in both:
        shutil.copytree(images, place)
    (tmp_path / "a/32/000000.tar.idx").write_bytes(b"")
    with pytest.raises(DamageError, match=f'repair {tmp_path}/a"'):
        wdsprep.select(both, tmp_path / "out", prefix=True, workers=1)
