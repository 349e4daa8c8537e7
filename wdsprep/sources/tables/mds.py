"""The samples of MDS shards, as MosaicML streaming writes them.

A shard is at most 4 GB, as its offsets have 32 bits, and usually 64 MB: it is read whole, which its
digests ask for anyway. Nothing in it is ever unpickled.
"""

import bz2
import gzip
import io
import json
import math
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import pyarrow as pa

from wdsprep.dataset.reject_codes import Code
from wdsprep.sources.parsing import parsing_file, parsing_sample
from wdsprep.sources.tables import RawArray
from wdsprep.sources.tables.mds_index import (
    DIGESTS,
    OFFSET_NBYTES,
    MdsColumn,
    MdsFile,
    MdsShard,
    damaged_shard,
)
from wdsprep.store import shared_store
from wdsprep.store.base import Store
from wdsprep.text import shown

STREAMS: dict[str, Callable[[bytes], Any]] = {
    "br": lambda data: pa.CompressedInputStream(pa.BufferReader(data), "brotli"),
    "bz2": lambda data: bz2.BZ2File(io.BytesIO(data)),
    "gz": lambda data: gzip.GzipFile(fileobj=io.BytesIO(data)),
    "zstd": lambda data: pa.CompressedInputStream(pa.BufferReader(data), "zstd"),
}
"""Readers of compressed data that stop where they are told to."""
SCALARS = {
    "int": "<q",
    "int8": "<b",
    "int16": "<h",
    "int32": "<i",
    "int64": "<q",
    "uint8": "<B",
    "uint16": "<H",
    "uint32": "<I",
    "uint64": "<Q",
    "float16": "<e",
    "float32": "<f",
    "float64": "<d",
}
"""Encodings of one number, as `struct` reads them."""
TEXTS = {"str": str, "str_int": int, "str_float": float, "str_decimal": str}
IMAGES = ("jpeg", "png", "pil", "bytes")
"""Encodings that may hold an image."""
_WIDTHS = {
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
}
_DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}


def read_samples(url: str, shard: MdsShard, name: str) -> Iterator[bytes]:
    """Yield the samples of a shard in their order, as bytes.

    `name` is the shard's raw or compressed file. Raise SourceError if it is not what the index
    says.
    """
    data = _read(shared_store(url), shard, name)
    with _parsing(url, name):
        (count,) = struct.unpack_from("<I", data)
        offsets = struct.unpack_from(f"<{count + 1}I", data, OFFSET_NBYTES)
    if count != shard.samples:
        raise damaged_shard(
            url, name, f"{count:,} samples, and {shard.index} says {shard.samples:,}"
        )
    if offsets[-1] > len(data) or any(begin > end for begin, end in pairwise(offsets)):
        raise damaged_shard(url, name, "its offsets lead out of it")
    for begin, end in pairwise(offsets):
        yield data[begin:end]


def fields_in(shard: MdsShard, data: bytes, wanted: Collection[str] = ()) -> dict[str, bytes]:
    """Return the encoded values of a sample by column.

    If `wanted` names columns, return no others. Raise RejectedError if a sample is shorter than
    its columns.
    """
    with parsing_sample("the sample"):
        return dict(_fields(shard.columns, data, wanted))


def _fields(
    columns: Sequence[MdsColumn], data: bytes, wanted: Collection[str]
) -> Iterator[tuple[str, bytes]]:
    varying = sum(not column.nbytes for column in columns)
    sizes = iter(struct.unpack_from(f"<{varying}I", data))
    start = 4 * varying
    for column in columns:
        end = start + (column.nbytes or next(sizes))
        if end > len(data):
            raise ValueError(f"column {column.name} has more bytes than its sample")
        if not wanted or column.name in wanted:
            yield column.name, data[start:end]
        start = end


def _read(store: Store, shard: MdsShard, name: str) -> bytes:
    """Return the uncompressed bytes of a shard, from its raw or its compressed file `name`.

    Raise SourceError if the sizes or digests are not those in the index.
    """
    data = store.read(name)
    zipped = shard.zipped
    if zipped and name == zipped.name:
        _check(store.url, zipped, data)
        shard.check_unpacked(store.url, len(data))
        with _parsing(store.url, name):
            data = _unpack(shard.compression, data, shard.raw.nbytes)
    _check(store.url, MdsFile(name, shard.raw.nbytes, shard.raw.digests), data)
    return data


def _parsing(url: str, name: str) -> AbstractContextManager[None]:
    advice = "fetch it again, or make it again"
    return parsing_file(f"{url}/{name}", "is not a valid MDS shard", advice)


def _unpack(kind: str, data: bytes, nbytes: int) -> bytes:
    """Unpack the data of a shard, but at most one byte more than `nbytes`.

    `nbytes` is the length in the index. Raise ValueError if `kind` is a compression that cannot be
    read here.
    """
    if kind == "snappy":  # which makes 21 bytes of one at most
        found: bytes = pa.decompress(data, nbytes, codec=kind, asbytes=True)
        return found
    if kind not in STREAMS:
        raise ValueError(f"compressed by {kind!r:.20}, which cannot be read here")
    with STREAMS[kind](data) as stream:
        return bytes(stream.read(nbytes + 1))


def _check(url: str, file: MdsFile, data: bytes) -> None:
    if len(data) != file.nbytes:
        more = "more than " if len(data) > file.nbytes else ""
        said = f"{more}{min(len(data), file.nbytes):,} bytes, and the index says {file.nbytes:,}"
        raise damaged_shard(url, file.name, said)
    for kind, wanted in file.digests.items():
        if DIGESTS[kind](data).hexdigest() != wanted:
            raise damaged_shard(url, file.name, f"its {kind} is not what the index says")


def value_of(encoding: str, data: bytes, column: str = "a column") -> Any:
    """Decode a value: a text, a number, JSON, a `RawArray`, or the bytes of an image.

    Values of the encoding `bytes` stay bytes. Those of other encodings, such as pickles, become
    None. Raise RejectedError, which names the column, for a value that does not fit its encoding.
    """
    kind = encoding.partition(":")[0]
    with parsing_sample(shown(column), Code.BAD_JSON if kind == "json" else Code.UNREADABLE):
        if encoding in TEXTS:
            return TEXTS[encoding](data.decode())
        if encoding in SCALARS:
            return struct.unpack(SCALARS[encoding], data)[0]
        if encoding == "json":
            return json.loads(data)
        if encoding in IMAGES:
            return data
        if kind == "ndarray":
            return _array(encoding, data)
    return None


def _array(encoding: str, data: bytes) -> RawArray:
    """Decode an array, whose dtype and shape stand in its encoding or before its values."""
    _, dtype, shown = (*encoding.split(":"), "", "")[:3]
    start = 0
    if not dtype:
        dtype, start = _DTYPES[data[0]], 1
    shape = tuple(int(side) for side in shown.split(",")) if shown else ()
    if not shape:
        sides, width = divmod(data[start], 4)
        code = "BHIQ"[width]
        shape = struct.unpack_from(f"<{sides}{code}", data, start + 1)
        start += 1 + sides * 2**width
    if min(shape, default=0) < 0 or len(data) - start != math.prod(shape) * _WIDTHS[dtype]:
        raise ValueError(f"{len(data) - start} bytes do not make {dtype} {shape}")
    return RawArray(dtype=dtype, shape=shape, data=data[start:])
