"""Convert arrays of samples into the types and shapes that readers expect."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wdsprep.dataset.npy_arrays import BFLOAT16, Field, field_of, to_bfloat16, values_of
from wdsprep.dataset.tar.write import Buffer

if TYPE_CHECKING:
    from numpy.typing import NDArray


def bfloat16_bits(field: Field, data: Buffer) -> "NDArray[Any]":
    """Return an array as bfloat16, whose bits are in unsigned integers."""
    import numpy as np

    if field.dtype == BFLOAT16:
        return np.frombuffer(data, "<u2", offset=len(field.header)).reshape(field.shape)
    bits: NDArray[Any] = to_bfloat16(values_of(field, data))
    return bits


def pad_to(array: "NDArray[Any]", length: int) -> "NDArray[Any]":
    """Pad an array with zeros at its end, up to `length` rows."""
    import numpy as np

    short = length - len(array)
    if not short:
        return array
    return np.concatenate([array, np.zeros((short, *array.shape[1:]), array.dtype)])


def split_npy(name: str, data: Buffer, count: int) -> list[Buffer]:
    """Split an `.npy` file along the first axis of its array into `count` files."""
    if count == 1:
        return [data]
    field = field_of(name, data)
    part = replace(field, shape=(field.shape[0] // count, *field.shape[1:]))
    starts = range(len(field.header), len(data), part.array_nbytes)
    return [part.header + data[start : start + part.array_nbytes] for start in starts]


def npy_bytes(array: "NDArray[Any]") -> bytes:
    """Return the `.npy` file of an array."""
    import io

    import numpy as np

    out = io.BytesIO()
    np.save(out, np.ascontiguousarray(array))
    return out.getvalue()
