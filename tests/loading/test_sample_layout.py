"""Headers of latent samples, many at once: which of them are sound, and whose they are."""

import tarfile
from collections.abc import Callable

import numpy as np
import pytest

from tests.kit.latent_sets import field
from wdsprep.dataset.npy_arrays import Field
from wdsprep.dataset.tar import BLOCK, padded
from wdsprep.dataset.tar.write import header
from wdsprep.loading.sample_layout import SampleLayout, layout_for

FIELDS = (field("mask", (3, 5), "|u1"), field("latent", (4, 8, 8)), field("emb", (7, 16)))
VARIABLE = (*FIELDS[:2], field("emb", (7, 16), "bfloat16", is_variable=True))
Make = Callable[[str, int], bytes]


def others(name: str, nbytes: int) -> bytes:
    """What Python's tarfile writes of a member that has an owner and a time."""
    made = tarfile.TarInfo(name)
    made.size, made.mtime, made.uid, made.uname, made.mode = (
        nbytes,
        1_700_000_000,
        1000,
        "me",
        0o600,
    )
    return made.tobuf(tarfile.USTAR_FORMAT)


def heads_of(key: str, make: Make, fields: tuple[Field, ...] = FIELDS) -> bytes:
    """What lies between the arrays of a sample."""
    heads, padding = b"", 0
    for item in fields:
        heads += bytes(padding) + make(f"{key}.{item.name}", item.nbytes) + item.header
        padding = padded(item.nbytes) - item.nbytes
    return heads


def rows_of(*rows: bytes) -> np.ndarray:
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1)


def grid(fields: tuple[Field, ...] = FIELDS) -> SampleLayout:
    return layout_for(fields, ("latent", "emb"))


@pytest.mark.parametrize("fields", [FIELDS, VARIABLE])
@pytest.mark.parametrize("make", [header, others])
@pytest.mark.parametrize("key", ["a", "folder/0012", "f" * 60 + "/" + "g" * 80, "ünïcode"])
def test_keys_are_those_of_the_members(make: Make, key: str, fields: tuple[Field, ...]) -> None:
    heads = rows_of(heads_of("first", header, fields), heads_of(key, make, fields))
    assert grid(fields).keys(heads) == ["first", key]


@pytest.mark.parametrize("make", [header, others])
def test_lengths_are_those_of_the_members(make: Make) -> None:
    samples = [(*VARIABLE[:2], VARIABLE[2].of_length(length)) for length in range(1, 8)]
    heads = rows_of(*(heads_of(f"k{n}", make, fields) for n, fields in enumerate(samples)))
    assert grid(VARIABLE).lengths(heads).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert grid(VARIABLE).keys(heads) == [f"k{n}" for n in range(7)]
    longer = rows_of(heads_of("a", make, (*VARIABLE[:2], VARIABLE[2].of_length(8))))
    assert grid(VARIABLE).lengths(longer).tolist() == [0]
    assert grid(VARIABLE).keys(longer) == [None]


@pytest.mark.parametrize("fields", [FIELDS, VARIABLE])
@pytest.mark.parametrize("make", [header, others])
def test_no_byte_of_a_header_can_change_unseen(make: Make, fields: tuple[Field, ...]) -> None:
    """Two that stand after the digits of the checksum mean nothing."""
    whole = heads_of("some-key", make, fields)
    rows = np.repeat(rows_of(whole), len(whole), axis=0)
    np.fill_diagonal(rows, rows.diagonal() ^ 1)
    unseen = {n for n, key in enumerate(grid(fields).keys(rows)) if key is not None}
    between = set(range(len(whole)))
    after_sums = set()
    for item, place in zip(fields, grid(fields).headers, strict=True):
        top = place.stop - BLOCK - len(item.header)
        between -= set(range(top, place.stop))
        after_sums |= {top + 154, top + 155}
    assert between <= unseen <= between | after_sums


def test_members_of_two_samples_make_none() -> None:
    one, other = heads_of("one", header), heads_of("two", header)
    half = grid().headers[0].stop
    assert grid().keys(rows_of(one, one[:half] + other[half:], other)) == ["one", None, "two"]


def test_a_field_of_another_shape_is_none_of_the_dataset() -> None:
    wide = (*FIELDS[:2], field("emb", (16, 7)))
    assert grid().keys(rows_of(heads_of("a", header, wide), heads_of("b", header))) == [None, "b"]
