"""Arrays as `.npy` bytes, against numpy's own, and the layout of a sample, against a real tar."""

import io
import random

import numpy as np
import pytest

from tests.kit.packs import write_tar
from wdsprep.dataset.npy_arrays import Field, field_of, fields_of, layout, values_of
from wdsprep.errors import FormatError

SHAPES = [(4, 32, 32), (77, 1024), (77,), (8, 64, 64), (16, 128, 128), (1,), (1000, 10, 7, 3)]


def saved(array: "np.ndarray[tuple[int, ...], np.dtype[np.float16]]") -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<i4", "|u1"])
def test_bytes_are_those_of_numpy(shape: tuple[int, ...], dtype: str) -> None:
    array = (np.arange(np.prod(shape)) % 1000).astype(dtype).reshape(shape)
    field = Field(name="x.npy", dtype=dtype, shape=shape)
    assert field.header + array.tobytes() == saved(array)
    assert field.nbytes == len(saved(array))
    assert field_of("x.npy", saved(array)) == field


def test_layout_finds_the_arrays_in_a_tar() -> None:
    fields = [
        Field(name="latent.npy", dtype="<f2", shape=(4, 3, 5)),
        Field(name="emb.npy", dtype="<f2", shape=(7, 11)),
        Field(name="tokens.npy", dtype="<i4", shape=(77,)),
    ]
    arrays = [
        np.random.default_rng(n).random(f.shape).astype(f.dtype) for n, f in enumerate(fields)
    ]
    members = [(f.name, f.header + a.tobytes()) for f, a in zip(fields, arrays, strict=True)]
    data, tar = write_tar(
        (key, [*members, ("txt", b"x" * random.Random(key).randrange(3000))]) for key in "ab"
    )
    for start in np.frombuffer(tar.index, "<u8")[:-1]:
        for line, array in zip(layout(fields), arrays, strict=True):
            found = np.frombuffer(data, line["dtype"], array.size, int(start) + line["offset"])
            assert (found.reshape(line["shape"]) == array).all()


def test_layout_record_is_read_back_or_refused() -> None:
    fields = (Field(name="latent.npy", dtype="<f2", shape=(4, 32, 32)),)
    assert fields_of(layout(fields)) == fields
    shifted = [{**line, "offset": line["offset"] + 512} for line in layout(fields)]
    with pytest.raises(FormatError, match="layout"):
        fields_of(shifted)


def test_a_variable_array_begins_at_one_place_whatever_its_length() -> None:
    emb = Field(name="emb.npy", dtype="bfloat16", shape=(512, 2560), is_variable=True)
    for length in (1, 9, 10, 99, 100, 512):
        array = np.ones((length, 2560), "<u2")
        assert saved(array) == emb.header_of(len(saved(array))) + array.tobytes()
        assert len(emb.header_for(length)) == 128
    for nbytes in (0, 128, 127 + 5120, 128 + 5120 + 2, 128 + 513 * 5120):
        assert emb.header_of(nbytes) == b""
    latent = Field(name="latent.npy", dtype="<f2", shape=(4, 8, 8))
    record = layout((latent, emb))
    assert record[1]["variable"] is True
    assert "variable" not in record[0]
    assert fields_of(record) == (latent, emb)
    with pytest.raises(FormatError, match="whose length varies"):
        layout((emb, latent))
    mask = Field(name="emb_mask.npy", dtype="|u1", shape=(512,))
    with pytest.raises(FormatError, match="layout"):
        fields_of(layout((mask, emb)))
    for shape in ((512,), (1, 2, 3, 4), (0, 7), (10**60, 8)):
        with pytest.raises(FormatError, match="cannot be of variable length"):
            Field(name="emb.npy", dtype="<f2", shape=shape, is_variable=True)


def test_bfloat16_is_kept_as_its_bits() -> None:
    values = np.array([[1.0, -2.5, 0.0], [3e38, 1e-38, -1.0]], "<f4")
    bits = (values.view("<u4") >> 16).astype("<u2")
    field = Field(name="x.npy", dtype="bfloat16", shape=(2, 3))
    assert field.header + bits.tobytes() == saved(bits)
    assert field_of("x.npy", saved(bits)) == field
    assert np.array_equal(values_of(field, saved(bits)).view("<u4") >> 16, bits)
    assert np.allclose(values_of(field, saved(bits)), values, rtol=0.01)


def test_a_pickled_or_cut_array_is_refused() -> None:
    pickled = io.BytesIO()
    np.save(pickled, np.array([{}], dtype=object), allow_pickle=True)
    whole = saved(np.zeros((4, 4), "<f2"))
    for data in (pickled.getvalue(), whole[:-1], b"", b"\x93NUMPY", saved(np.zeros((2, 2)))):
        with pytest.raises(FormatError):
            field_of("x.npy", data)
