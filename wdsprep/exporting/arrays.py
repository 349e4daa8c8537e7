"""Arrays of samples in the types and shapes that readers ask for."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wdsprep.dataset.arrays import BFLOAT16, Field, field_of, to_bits, values_of
from wdsprep.dataset.tar.write import Buffer

if TYPE_CHECKING:
    from numpy.typing import NDArray


def bfloat16_bits(field: Field, data: Buffer) -> "NDArray[Any]":
    """As unsigned integers."""
    import numpy as np

    if field.dtype == BFLOAT16:
        return np.frombuffer(data, "<u2", offset=len(field.header)).reshape(field.shape)
    bits: NDArray[Any] = to_bits(values_of(field, data))
    return bits


def padded_to(array: "NDArray[Any]", length: int) -> "NDArray[Any]":
    """With zeros behind it."""
    import numpy as np

    short = length - len(array)
    if not short:
        return array
    return np.concatenate([array, np.zeros((short, *array.shape[1:]), array.dtype)])


def npy_parts(name: str, data: Buffer, count: int) -> list[Buffer]:
    """The file of an array as the files of so many parts of it, along its first side."""
    if count == 1:
        return [data]
    field = field_of(name, data)
    part = replace(field, shape=(field.shape[0] // count, *field.shape[1:]))
    starts = range(len(field.header), len(data), part.array_nbytes)
    return [part.header + data[start : start + part.array_nbytes] for start in starts]


def npy(array: "NDArray[Any]") -> bytes:
    """The file that holds it."""
    import io

    import numpy as np

    out = io.BytesIO()
    np.save(out, np.ascontiguousarray(array))
    return out.getvalue()
