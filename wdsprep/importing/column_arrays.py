"""Read arrays from the columns of a cache.

A value may be an `.npy` file, a file of torch.save, a list of numbers, or bare bytes. Nothing is
unpickled except by torch's reader of weights, which makes nothing but tensors.

Arrays are those of NumPy, which has no bfloat16: unsigned integers of 16 bits are its bits, as in
other caches. No array of latents or text has whole numbers up to 65,535.
"""

import io
import pickle
import re
import zipfile
from math import prod
from typing import Any

import numpy as np

from wdsprep.dataset.npy_arrays import BFLOAT16, Field, from_bfloat16, is_finite, to_bfloat16
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.importing.column_names import SAFETENSORS, CachedColumn
from wdsprep.sources.parsing import parsing_sample
from wdsprep.sources.tables import RawArray

Array = np.ndarray[Any, np.dtype[Any]]
BITS = np.dtype("<u2")
STORED = {
    **{name: np.dtype(name) for name in ("float16", "float32", "int32", "uint8", "uint16")},
    "float64": np.dtype("<f4"),
    "bool": np.dtype("|u1"),
    **dict.fromkeys(("int8", "int16", "int64"), np.dtype("<i4")),
}
"""The dtype in which wdsprep stores an array of each dtype that is taken."""
NPY_HEADER = re.compile(
    rb"\x93NUMPY[\1\2]\0.{2,4}?\{'descr': '([<>|]\w+)', 'fortran_order': (True|False), "
    rb"'shape': \(([\d, ]*)\), \} *\n",
    re.DOTALL,
)
MOST_EXPANDED = 16 << 20
"""The most bytes of a tensor that is larger than its file, since it repeats its values."""
LATENT_SIDES = 3  # channels of rows of cells
LEAST_STD = 1e-10  # its logarithm stands for no variance
NOT_PLAIN = "it is not a plain tensor, and no other object is loaded, as it could run code"


def array_of(column: CachedColumn, value: Any) -> Array:
    """Return the array that a row has in a column, whatever the form of the value.

    Raise RejectedError if the value holds no array, or has too few or too many bytes for one.
    """
    with parsing_sample(f"{column.name} holds no array: it"):
        if isinstance(value, np.ndarray):
            return value
        if isinstance(value, RawArray):
            return array_in_bytes(value.dtype, value.shape, value.data)
        if not isinstance(value, bytes):
            raise ValueError(f"it is {type(value).__name__}")
        if value.startswith(b"\x93NUMPY"):
            return _parse_npy(value)
        if column.name.endswith((".pth", ".pt")):
            return tensor_array(load_saved(value), max(len(value), MOST_EXPANDED))
        if not column.dtype:
            raise ValueError(f"{len(value):,} bare bytes: give their dtype and shape by --columns")
        return array_in_bytes(column.dtype, column.shape, value)


def array_in_bytes(dtype: str, shape: tuple[int, ...], data: bytes) -> Array:
    """Return the array in little-endian bytes. Raise ValueError if they are not as many as it has.

    A side of -1 follows from their number.
    """
    check_dtype(dtype)
    values: Array = np.frombuffer(data, BITS if dtype == BFLOAT16 else dtype)
    return values.reshape(shape)


def _parse_npy(data: bytes) -> Array:
    """Return the array in an `.npy` file. Raise ValueError if the file is too short for the array.

    NumPy's own reader allocates the shape that a header claims before it reads the values.
    """
    if (header := NPY_HEADER.match(data)) is None:
        raise ValueError("its header is none of a plain array")
    dtype, shape = np.dtype(header[1].decode()), tuple(map(int, re.findall(rb"\d+", header[3])))
    check_dtype(dtype.name)
    values = np.frombuffer(data, dtype, prod(shape), header.end())
    array: Array = values.reshape(shape, order="F" if header[2] == b"True" else "C")
    return array.astype(dtype.newbyteorder("<"), copy=False)


def check_dtype(name: str) -> None:
    if name not in SAFETENSORS:
        raise RejectedError(Code.OTHER_SHAPE, f"{name} is no dtype of latents or text")


def load_saved(data: bytes) -> Any:
    """Return what torch.save has written: tensors, plain values, or lists and dicts of these.

    Raise ValueError if it has anything else, or if torch could make something larger than the bytes
    it reads. Its archives are never compressed, and of all that it makes only a bytearray takes its
    length from a number in the file.
    """
    import torch

    if b"bytearray" in data:
        raise ValueError(NOT_PLAIN)
    if zipfile.is_zipfile(io.BytesIO(data)):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            claimed = sum(member.file_size for member in archive.infolist())
        if claimed > len(data):
            raise ValueError(f"{len(data):,} bytes unpack to {claimed:,}")
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(NOT_PLAIN) from None


def tensor_array(tensor: Any, most: int) -> Array:
    """Return the array of a plain tensor. Raise ValueError if it has more than `most` bytes."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"it is {type(tensor).__name__}, not a tensor")
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise ValueError(f"it is a tensor of {tensor.layout} on {tensor.device}, not a plain one")
    check_dtype(str(tensor.dtype).removeprefix("torch."))
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes > most:
        raise ValueError(f"it has {nbytes:,} bytes, of which the file holds {most:,} at most")
    tensor = tensor.detach().contiguous()
    is_bits = tensor.dtype == torch.bfloat16
    array: Array = (tensor.view(torch.uint16) if is_bits else tensor).numpy()
    return array


def to_stored(array: Array, sides: int) -> Array:
    """Convert an array to the dtype in which wdsprep stores it.

    Leading dimensions of 1, which batches have left, are dropped until `sides` dimensions are left;
    so is that of the one frame after the channels of latents. Raise RejectedError if the array is
    empty or has no dimensions, or for a dtype that is not in `STORED`.
    """
    check_dtype(array.dtype.name)
    shape = array.shape
    if not shape or 0 in shape:
        raise RejectedError(Code.OTHER_SHAPE, f"an array of shape {shape} holds nothing")
    while len(shape) > sides and shape[0] == 1:
        shape = shape[1:]
    if len(shape) == sides + 1 and sides == LATENT_SIDES and shape[1] == 1:
        shape = (shape[0], *shape[2:])
    with np.errstate(over="ignore"):  # too large values become infinite: refused
        stored: Array = array.reshape(shape).astype(STORED[array.dtype.name], copy=False)
    return stored


def keep_tokens(emb: Array, mask: Array) -> Array:
    """Return the rows of an embedding that its mask counts, which are its first ones.

    Raise RejectedError if the mask counts others, or more than there are.
    """
    count = np.count_nonzero(mask)
    if not mask[:count].all() or count > len(emb):
        raise RejectedError(
            Code.OTHER_SHAPE, f"its mask counts other tokens than the first {count:,} of emb"
        )
    return emb[:count]


def std_to_logvar(array: Array) -> Array:
    """Convert a mean and a standard deviation to moments: a mean and a log-variance.

    The mean is the first half of the array. Raise RejectedError if the array cannot be halved.
    """
    if len(array) % 2:
        raise RejectedError(Code.OTHER_SHAPE, f"{array.shape} is no mean and standard deviation")
    mean, std = np.split(array, 2)
    logvar = 2 * np.log(np.maximum(as_float32(std), LEAST_STD))
    stored: Array = to_bfloat16(logvar) if array.dtype == BITS else logvar.astype(array.dtype)
    moments: Array = np.concatenate([mean, stored])
    return moments


def as_float32(array: Array) -> Array:
    floats: Array = from_bfloat16(array) if array.dtype == BITS else array.astype("<f4")
    return floats


def field_dtype(array: Array) -> str:
    """Return the dtype of a stored array as fields have it."""
    return BFLOAT16 if array.dtype == BITS else array.dtype.str


def npy_of(field: Field, array: Array) -> bytes:
    """Return an array as an `.npy` member.

    Raise RejectedError if it does not fit the field, or is not finite.
    """
    fitting = field.of_length(len(array)) if field.is_variable else field
    dtype, shape, data = field_dtype(array), array.shape, array.tobytes()
    if (dtype, shape) != (fitting.dtype, fitting.shape):
        raise RejectedError(
            Code.OTHER_SHAPE, f"{field.name} is {dtype} {shape}, and elsewhere {field}"
        )
    if field.is_variable and not 0 < len(array) <= field.shape[0]:
        raise RejectedError(Code.OTHER_SHAPE, f"{field.name} has {len(array)} of {field}")
    if not is_finite(field.dtype, data):
        raise RejectedError(Code.NOT_FINITE, f"{field.name} has values that are not finite")
    return fitting.header + data


def nested_array(column: Any, number: int) -> Array | None:
    """Return a row of an Arrow column of nested lists as an array.

    A row that is null, or has lists of different lengths, becomes None.
    """
    scalar = column[number]
    if not scalar.is_valid:
        return None
    values = scalar.values
    shape = [len(values)]
    while hasattr(values.type, "value_type"):
        lengths = {len(values[at]) for at in range(len(values))}
        if len(lengths) != 1 or values.null_count:
            return None
        shape += lengths
        values = values.flatten()
    if values.null_count:
        return None
    array: Array = values.to_numpy(zero_copy_only=False).reshape(shape)
    return array
