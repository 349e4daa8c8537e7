"""Fixed-shape arrays as `.npy` bytes, and where they lie in a sample.

A `.npy` file is a short header and then the array's own bytes. In a latent sample all arrays of
one field have one shape, so all their headers are the same bytes and each array begins at the
same distance from the start of its sample: the *layout*, which stands in the manifest once.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from wdsprep.dataset.tar import BLOCK, padded
from wdsprep.errors import FormatError
from wdsprep.text import plural

MAGIC = b"\x93NUMPY\x01\x00"
ALIGNMENT = 64
LATENT, EMB, TOKENS = "latent.npy", "emb.npy", "tokens.npy"
"""The arrays of a latent sample: of its image, and of its caption one of the two or none."""
DTYPES = {"<f2": 2, "<f4": 4, "<i4": 4, "|u1": 1}


@dataclass(frozen=True, kw_only=True)
class Field:
    """A member of every sample, such as `latent.npy`, with one dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def header(self) -> bytes:
        """What numpy.save writes before such an array."""
        shape = f"({self.shape[0]},)" if len(self.shape) == 1 else str(self.shape)
        text = f"{{'descr': '{self.dtype}', 'fortran_order': False, 'shape': {shape}, }}"
        nbytes = len(MAGIC) + 2 + len(text) + 1
        text += " " * (-nbytes % ALIGNMENT) + "\n"
        return MAGIC + len(text).to_bytes(2, "little") + text.encode("latin-1")

    @property
    def array_nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return len(self.header) + self.array_nbytes


def layout(fields: Iterable[Field]) -> list[dict[str, Any]]:
    """The record of where the array of each field begins in a sample whose first members they are,
    counted in bytes from the sample's first header."""
    record = []
    start = 0
    for field in fields:
        offset = start + BLOCK + len(field.header)
        shape = list(field.shape)
        record.append({"dtype": field.dtype, "name": field.name, "offset": offset, "shape": shape})
        start += BLOCK + padded(field.nbytes)
    return record


def fields_of(record: Iterable[Mapping[str, Any]]) -> tuple[Field, ...]:
    """The fields of a layout record; an error where it is not one that we could have written."""
    record = list(record)
    fields = tuple(
        Field(name=line["name"], dtype=line["dtype"], shape=tuple(line["shape"])) for line in record
    )
    if any(field.dtype not in DTYPES for field in fields) or layout(fields) != record:
        raise FormatError(f"a layout that this version cannot read: {record}")
    return fields


_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<|][fiu]\d)', 'fortran_order': False, "
    rb"'shape': \(([\d, ]*)\), \} *\n",
    re.DOTALL,
)


def field_of(name: str, data: bytes) -> Field:
    """The field that the `.npy` bytes of one member show. Nothing is ever unpickled."""
    match = _HEADER.match(data)
    if match is None:
        raise FormatError(f"{name} is no plain array")
    shape = tuple(int(part) for part in match[2].split(b",") if part.strip())
    field = Field(name=name, dtype=match[1].decode(), shape=shape)
    if field.dtype not in DTYPES or len(data) != field.nbytes:
        raise FormatError(f"{name} has {plural(len(data), 'byte')}, which do not make it {shape}")
    return field
