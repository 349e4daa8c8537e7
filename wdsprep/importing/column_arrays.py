"""Read arrays from the columns of a cache.

A value may be an `.npy` file, a file of torch.save, a list of numbers, or bare bytes. Nothing is
unpickled except by torch's reader of weights, which makes nothing but tensors.
"""

import io
import pickle
import zipfile
from math import prod
from typing import Any

import numpy as np

from wdsprep.dataset.npy_arrays import BFLOAT16, Field, from_bfloat16, is_finite, to_bfloat16
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.importing.column_names import NBYTES, STORED, CachedColumn
from wdsprep.sources.parsing import parsing_sample
from wdsprep.sources.tables import RawArray

BITS = "uint16"
MOST_EXPANDED = 16 << 20
"""The most bytes of a tensor that is larger than its file, since it repeats its values."""
LATENT_SIDES = 3  # channels of rows of cells
LEAST_STD = 1e-10  # its logarithm stands for no variance
NOT_PLAIN = "it is not a plain tensor, and no other object is loaded, as it could run code"


def array_of(column: CachedColumn, value: Any) -> RawArray:
    """Return the array that a row has in a column, whatever the form of the value.

    Raise RejectedError if the value holds no array, or if the array is of a dtype in `NBYTES` and
    has too few or too many bytes for its shape.
    """
    with parsing_sample(f"{column.name} holds no array: it"):
        if isinstance(value, RawArray):
            raw = value
        elif not isinstance(value, bytes):
            raise ValueError(f"it is {type(value).__name__}")
        elif value.startswith(b"\x93NUMPY"):
            raw = _parse_npy(value)
        elif column.name.endswith((".pth", ".pt")):
            raw = tensor_array(load_saved(value), max(len(value), MOST_EXPANDED))
        elif column.dtype:
            raw = RawArray(dtype=column.dtype, shape=column.sides(len(value)), data=value)
        else:
            raise ValueError(f"{len(value):,} bare bytes: give their dtype and shape by --columns")
        width = NBYTES.get(raw.dtype)
        if width is not None and len(raw.data) != width * prod(raw.shape):
            raise ValueError(f"{len(raw.data):,} bytes are not {raw.dtype} {raw.shape}")
    return raw


def raw_array(array: "np.ndarray[Any, Any]") -> RawArray:
    """Return an array of NumPy as little-endian bytes, with its dtype and shape."""
    little = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    return RawArray(dtype=array.dtype.name, shape=array.shape, data=little.tobytes())


def _parse_npy(data: bytes) -> RawArray:
    """Return the array in an `.npy` file. Raise ValueError if the file is too short for the array.

    NumPy's own reader allocates the shape that a header claims before it reads the values.
    """
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"its format is {version[0]}.{version[1]}, which is for names of fields")
    read = "read_array_header_1_0" if version == (1, 0) else "read_array_header_2_0"
    try:
        shape, is_fortran, dtype = getattr(np.lib.format, read)(file)
    except MemoryError:  # so Python reports that a header of at most 10 kB is nested too deep
        raise ValueError("its header is nested too deep") from None
    _check_dtype(dtype.name)
    nbytes, start = dtype.itemsize * prod(shape), file.tell()
    if min(shape, default=0) < 0 or nbytes > len(data) - start:
        raise ValueError(f"{len(data) - start:,} bytes do not make {dtype} {shape}")
    values = np.frombuffer(data[start : start + nbytes], dtype)
    return raw_array(values.reshape(shape, order="F" if is_fortran else "C"))


def _check_dtype(name: str) -> None:
    if name not in STORED:
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


def tensor_array(tensor: Any, most: int) -> RawArray:
    """Return the array of a plain tensor. Raise ValueError if it has more than `most` bytes."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"it is {type(tensor).__name__}, not a tensor")
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise ValueError(f"it is a tensor of {tensor.layout} on {tensor.device}, not a plain one")
    _check_dtype(str(tensor.dtype).removeprefix("torch."))
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes > most:
        raise ValueError(f"it has {nbytes:,} bytes, of which the file holds {most:,} at most")
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        bits = tensor.view(torch.int16).numpy().tobytes()
        return RawArray(dtype=BFLOAT16, shape=tuple(tensor.shape), data=bits)
    return raw_array(tensor.numpy())


def to_stored(raw: RawArray, sides: int) -> RawArray:
    """Convert an array to the dtype in which wdsprep stores it.

    Leading dimensions of 1, which batches have left, are dropped until `sides` dimensions are left;
    so is that of the one frame after the channels of latents. Raise RejectedError if the array is
    empty or has no dimensions, or for a dtype that is not in `STORED`.
    """
    _check_dtype(raw.dtype)
    shape = raw.shape
    if not shape or 0 in shape:
        raise RejectedError(Code.OTHER_SHAPE, f"an array of shape {shape} holds nothing")
    while len(shape) > sides and shape[0] == 1:
        shape = shape[1:]
    if len(shape) == sides + 1 and sides == LATENT_SIDES and shape[1] == 1:
        shape = (shape[0], *shape[2:])
    dtype, data = STORED[raw.dtype], raw.data
    if raw.dtype in ("float64", "int64", "int16", "int8"):
        with np.errstate(over="ignore"):  # too large values become infinite: refused
            data = np.frombuffer(data, raw.dtype).astype(dtype).tobytes()
    return RawArray(dtype=dtype, shape=shape, data=data)


def keep_tokens(emb: RawArray, mask: RawArray) -> RawArray:
    """Return the rows of an embedding that its mask counts, which are its first ones.

    Raise RejectedError if the mask counts others, or more than there are.
    """
    count = mask.data.count(1)
    if mask.data[:count] != b"\1" * count or count > emb.shape[0]:
        raise RejectedError(
            Code.OTHER_SHAPE, f"its mask counts other tokens than the first {count:,} of emb"
        )
    data = emb.data[: count * (len(emb.data) // emb.shape[0])]
    return RawArray(emb.dtype, (count, *emb.shape[1:]), data)


def std_to_logvar(raw: RawArray) -> RawArray:
    """Convert a mean and a standard deviation to moments: a mean and a log-variance.

    The mean is the first half of the array. Raise RejectedError if the array cannot be halved.
    """
    if not raw.shape or raw.shape[0] % 2:
        raise RejectedError(Code.OTHER_SHAPE, f"{raw.shape} is no mean and standard deviation")
    half = len(raw.data) // 2
    std = as_float32(RawArray(raw.dtype, (), raw.data[half:]))
    logvar = 2 * np.log(np.maximum(std, LEAST_STD))
    stored = to_bfloat16(logvar) if raw.dtype == BFLOAT16 else logvar.astype(raw.dtype)
    data = raw.data[:half] + stored.tobytes()
    return RawArray(dtype=raw.dtype, shape=raw.shape, data=data)


def as_float32(raw: RawArray) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """Return the values of a stored array as float32, in one dimension."""
    if raw.dtype == BFLOAT16:
        floats: np.ndarray[Any, np.dtype[np.float32]]
        floats = from_bfloat16(np.frombuffer(raw.data, "<u2"))
        return floats
    return np.frombuffer(raw.data, raw.dtype).astype(np.float32)


def npy_of(field: Field, raw: RawArray) -> bytes:
    """Return an array as an `.npy` member.

    Raise RejectedError if it does not fit the field, or is not finite.
    """
    is_of_length = field.is_variable and raw.shape
    fitting = field.of_length(raw.shape[0]) if is_of_length else field
    wanted = fitting.dtype, fitting.shape, fitting.array_nbytes
    if (raw.dtype, raw.shape, len(raw.data)) != wanted:
        raise RejectedError(
            Code.OTHER_SHAPE, f"{field.name} is {raw.dtype} {raw.shape}, and elsewhere {field}"
        )
    if field.is_variable and not 0 < raw.shape[0] <= field.shape[0]:
        raise RejectedError(Code.OTHER_SHAPE, f"{field.name} has {raw.shape[0]} of {field}")
    if not is_finite(field.dtype, raw.data):
        raise RejectedError(Code.NOT_FINITE, f"{field.name} has values that are not finite")
    return fitting.header + raw.data


def nested_array(column: Any, number: int) -> RawArray | None:
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
    return raw_array(values.to_numpy(zero_copy_only=False).reshape(shape))
