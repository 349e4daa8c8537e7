"""Arrays as `.npy` bytes, and where they lie in a sample.

A `.npy` file is a short header and then the array's own bytes. In a latent sample all arrays of
one field have one shape, so all their headers are the same bytes and each array begins at the
same distance from the start of its sample: the *layout*, which stands in the manifest once.

The last array may be *variable*: as long as its caption is, up to the length in the layout. All
headers that it may have are equally long, so it begins where it would if its length were fixed.

Where samples have images in roles, the layout has the array of each role once, marked as such, and
behind it that of its mirror image if there is one. Shapes there are those of a square image. How
large the images of a sample are, and how many it has in each role, decides its arrays
(`wdsprep.dataset.shapes.fields_in_shape`).

An array of latents holds the output of a VAE as a denoiser takes it: cells folded into channels,
shifted and scaled. The settings of a dataset say how: `patch` cells a side (1 where they do not
say) become channels, then `shift` and `scale` are one number each, or one for every channel. A
latent that `encode` stores and one that the loader samples from moments go the same way, here.
Nothing is imported for that: these are methods that tensors of torch have, and where it says so
arrays of NumPy.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from wdsprep.dataset.samples import MIRRORED
from wdsprep.dataset.tar import BLOCK, padded
from wdsprep.errors import FormatError
from wdsprep.text import plural

MAGIC = b"\x93NUMPY\x01\x00"
ALIGNMENT = 64
LATENT, EMB, POOLED, TOKENS = "latent.npy", "emb.npy", "pooled.npy", "tokens.npy"
"""Arrays of a latent sample: of its image, and of its caption."""
FLIPPED = f"latent{MIRRORED}.npy"
"""The latents of the mirrored image, where that was asked for."""
OF_SIZES = ("time_ids.npy", "original_size.npy", "target_size.npy", "crop_coords.npy")
"""Arrays that are made of an image's sizes; all others but latents are made of its caption."""
NUMBERS = "numbers.npy"
"""The numbers that models give an image, which become columns of scores."""
OF_IMAGES = frozenset((LATENT, FLIPPED, NUMBERS, *OF_SIZES))
IMAGE_EMB = "image_emb.npy"
"""An image's embedding, among scores; the name of its model may stand before it."""
MASK = "emb_mask.npy"
"""The loader tells lengths by this name, so no array beside a variable one may be called so."""
BFLOAT16 = "bfloat16"
"""NumPy lacks it: `.npy` files hold its bits, as unsigned integers."""
DTYPES = {"<f2": 2, "<f4": 4, "<i4": 4, "|u1": 1, BFLOAT16: 2}
_BITS = "<u2"


@dataclass(frozen=True, kw_only=True)
class Field:
    """A member of every sample, such as `latent.npy`, with one dtype and shape.

    In a field of variable length, the first number of the shape is the greatest length. A field
    of a role is of images beside the target.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_variable: bool = False
    is_of_role: bool = False

    def __post_init__(self) -> None:
        if not self.is_variable:
            return
        has_rows = len(self.shape) in (2, 3) and min(self.shape) > 0
        if not has_rows or len(self.header_for(1)) != len(self.header):
            raise FormatError(f"{self.name} of shape {self.shape} cannot be of variable length")

    @property
    def role(self) -> str:
        """Return the role of the images that the array is of, or "" if it has none."""
        return self.name.partition(".")[0].partition("_")[0] if self.is_of_role else ""

    @property
    def holds_latents(self) -> bool:
        """Return whether the array is what a VAE makes of an image."""
        return self.name in (LATENT, FLIPPED) or (self.is_of_role and self.dtype != "|u1")

    @property
    def mirrors(self) -> str:
        """Return the name of the array whose mirror image this one is of, or "" if it is of none.

        Batches have it in the place of that array for some samples.
        """
        stem = self.name.removesuffix(f"{MIRRORED}.npy")
        return f"{stem}.npy" if self.holds_latents and stem != self.name else ""

    @cached_property
    def header(self) -> bytes:
        """Return the bytes that numpy.save writes before such an array.

        They state the greatest length for a variable one.
        """
        return _header(self.dtype, self.shape)

    def of_length(self, length: int) -> "Field":
        """Return the field of one sample whose variable array has this length."""
        return Field(name=self.name, dtype=self.dtype, shape=(length, *self.shape[1:]))

    def header_for(self, length: int) -> bytes:
        """Return the bytes before a variable array of this length."""
        return _header(self.dtype, (length, *self.shape[1:]))

    def header_of(self, nbytes: int) -> bytes:
        """Return the header of a member with so many bytes, or b"" if none can have these."""
        if not self.is_variable:
            return self.header if nbytes == self.nbytes else b""
        length, rest = divmod(nbytes - len(self.header), self.row_nbytes)
        return self.header_for(length) if not rest and 0 < length <= self.shape[0] else b""

    @property
    def row_nbytes(self) -> int:
        """Return how many bytes one row along the first axis takes, such as a token."""
        return prod(self.shape[1:]) * DTYPES[self.dtype]

    @property
    def array_nbytes(self) -> int:
        """Return how many bytes the array takes; of a variable one, the longest."""
        return prod(self.shape) * DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return len(self.header) + self.array_nbytes

    def __str__(self) -> str:
        shape = str(self.shape)
        return f"{self.dtype} {shape.replace('(', '(1 to ', 1) if self.is_variable else shape}"


@lru_cache(1 << 12)
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    stored = _BITS if dtype == BFLOAT16 else dtype
    shown = f"({shape[0]},)" if len(shape) == 1 else str(shape)
    text = f"{{'descr': '{stored}', 'fortran_order': False, 'shape': {shown}, }}"
    nbytes = len(MAGIC) + 2 + len(text) + 1
    text += " " * (-nbytes % ALIGNMENT) + "\n"
    return MAGIC + len(text).to_bytes(2, "little") + text.encode("latin-1")


def mirrored_name(name: str) -> str:
    """Return the name of the array that has the mirror images of what this one has."""
    return f"{name.removesuffix('.npy')}{MIRRORED}.npy"


def text_fields(fields: Iterable[Field]) -> tuple[Field, ...]:
    """Return the fields that are made of the caption, and change if that is empty."""
    return tuple(field for field in fields if not _is_of_image(field))


def empty_fields(settings: Mapping[str, Any]) -> tuple[Field, ...]:
    """Return the fields for which the dataset keeps the arrays of the empty caption.

    There are none in an imported dataset, where these arrays are unknown, unless the user has given
    them. There are none either if text depends on images too.
    """
    is_known = "empty" in settings or not (is_imported(settings) or "text_roles" in settings)
    return text_fields(fields_of(settings["layout"])) if is_known else ()


GIVEN = "given"
"""How latents were made, or references cut, in settings of an imported dataset: nobody knows."""


def is_imported(settings: Mapping[str, Any]) -> bool:
    """Return whether latents were imported from a cache, as their `source` says."""
    return "layout" in settings and "source" in settings


def is_of_text(fields: Iterable[Field]) -> bool:
    """Return whether no field is made of images: it is a text dataset."""
    return not any(map(_is_of_image, fields))


def _is_of_image(field: Field) -> bool:
    return field.is_of_role or field.name in OF_IMAGES or field.name.endswith(IMAGE_EMB)


def layout(fields: Iterable[Field]) -> list[dict[str, Any]]:
    """Return the record of where each field's array begins in a sample.

    The fields are the first members of the sample. Offsets count bytes from the sample's first
    header. Raise FormatError if a field stands behind one of variable length.
    """
    record: list[dict[str, Any]] = []
    start = 0
    for field in fields:
        if record and record[-1].get("variable"):
            raise FormatError(f"{field.name} comes after {record[-1]['name']}, whose length varies")
        offset = start + BLOCK + len(field.header)
        shape = list(field.shape)
        line = {"dtype": field.dtype, "name": field.name, "offset": offset, "shape": shape}
        marks = {"role": field.is_of_role, "variable": field.is_variable}
        record.append(line | {name: True for name, is_set in marks.items() if is_set})
        start += BLOCK + padded(field.nbytes)
    return record


def fields_of(record: Iterable[Mapping[str, Any]]) -> tuple[Field, ...]:
    """Return the fields of a layout record. Raise FormatError if this version cannot read it."""
    record = list(record)
    fields = tuple(
        Field(
            name=line["name"],
            dtype=line["dtype"],
            shape=tuple(line["shape"]),
            is_variable=line.get("variable", False),
            is_of_role=line.get("role", False),
        )
        for line in record
    )
    is_known = all(field.dtype in DTYPES for field in fields) and layout(fields) == record
    has_two_masks = fields and fields[-1].is_variable and MASK in {field.name for field in fields}
    if not is_known or has_two_masks:
        raise FormatError(f"a layout that this version cannot read: {record}")
    return fields


_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<|][fiu]\d)', 'fortran_order': False, "
    rb"'shape': \(([\d, ]*)\), \} *\n",
    re.DOTALL,
)


def field_of(name: str, data: "bytes | memoryview") -> Field:
    """Return the field that the `.npy` bytes of a member show. Nothing is ever unpickled.

    Raise FormatError if the bytes are no plain array of a known dtype, or not as many as the shape
    needs.
    """
    match = _HEADER.match(data)
    if match is None:
        raise FormatError(f"{name} is no plain array")
    shape = tuple(int(part) for part in match[2].split(b",") if part.strip())
    dtype = match[1].decode()
    field = Field(name=name, dtype=BFLOAT16 if dtype == _BITS else dtype, shape=shape)
    if field.dtype not in DTYPES or len(data) != field.nbytes:
        raise FormatError(f"{name} has {plural(len(data), 'byte')}, which do not make it {shape}")
    return field


# The bits that are all set in what is not finite: infinities and not-a-numbers.
_EXPONENTS = {"<f2": ("<u2", 0x7C00), "<f4": ("<u4", 0x7F80_0000), BFLOAT16: ("<u2", 0x7F80)}


def is_finite(dtype: str, data: "bytes | memoryview") -> bool:
    """Return whether all values of an array are finite."""
    if dtype not in _EXPONENTS:
        return True
    import numpy as np

    unsigned, exponent = _EXPONENTS[dtype]
    bits = np.frombuffer(data, unsigned)
    return not bits.size or int((bits & exponent).max()) != exponent


def stored_array(field: Field, data: "bytes | memoryview") -> Any:
    """Return the array in a member's bytes as it is stored: bfloat16 as integers of 16 bits."""
    import numpy as np

    dtype = _BITS if field.dtype == BFLOAT16 else field.dtype
    return np.frombuffer(data, dtype, offset=len(field.header)).reshape(field.shape)


def values_of(field: Field, data: "bytes | memoryview") -> Any:
    """Return the array in a member's bytes, with float32 in place of bfloat16."""
    stored = stored_array(field, data)
    return from_bfloat16(stored) if field.dtype == BFLOAT16 else stored


def from_bfloat16(bits: Any) -> Any:
    """Return values of bfloat16, given by their bits, as floats of 32 bits."""
    return (bits.astype("<u4") << 16).view("<f4")


def to_bfloat16(values: Any) -> Any:
    """Return values as the bits of bfloat16, rounded to the nearest, and to even half way."""
    bits = values.astype("<f4").view("<u4")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(_BITS)


# --- latents as a denoiser takes them
def patchify(latents: Any, patch: int) -> Any:
    """Fold patches into channels: (..., C, h, w) to (..., C p p, h/p, w/p), of tensors or arrays.

    In the number of a channel, a cell's place within its patch (row by row) changes faster than
    the old channel.
    """
    if patch == 1:
        return latents
    *leading, channels, height, width = latents.shape
    cells = latents.reshape(*leading, channels, height // patch, patch, width // patch, patch)
    folded = cells.swapaxes(-4, -3).swapaxes(-2, -1).swapaxes(-3, -2)
    return folded.reshape(*leading, channels * patch**2, height // patch, width // patch)


def patched_shape(shape: tuple[int, int, int], patch: int) -> tuple[int, int, int]:
    """Return the shape that `patchify` makes of (C, h, w)."""
    channels, height, width = shape
    return channels * patch**2, height // patch, width // patch


def normalise(latents: Any, settings: Mapping[str, Any]) -> Any:
    """Return latents of a VAE, of shape (..., C, h, w), shifted and scaled as `settings` say.

    Where they say so, patches of neighbours are first folded into channels.
    """
    folded = patchify(latents, settings.get("patch", 1))
    shift, scale = (_by_channel(folded, settings[name]) for name in ("shift", "scale"))
    return (folded - shift) * scale


def _by_channel(latents: Any, value: Any) -> Any:
    """Shape a shift or a scale so that it applies to the channels of latents.

    A single number stays one: a tensor of one number would give other bits.
    """
    if isinstance(value, int | float):
        return value
    return (value if hasattr(value, "device") else latents.new_tensor(value))[:, None, None]


def denormalise(latents: Any, settings: Mapping[str, Any]) -> Any:
    """Return the output of the VAE from arrays (C, h, w) stored with these settings."""
    raw = (latents.T / settings["scale"] + settings["shift"]).T  # channels last, as lists have them
    return unpatchify(raw, settings.get("patch", 1))


def unpatchify(latents: Any, patch: int) -> Any:
    """Unfold patches of cells from the channels of arrays (C, h, w): the reverse of `patchify`."""
    if patch == 1:
        return latents
    channels, height, width = latents.shape
    cells = latents.reshape(channels // patch**2, patch, patch, height, width)
    spread = cells.transpose(0, 3, 1, 4, 2)
    return spread.reshape(channels // patch**2, height * patch, width * patch)
