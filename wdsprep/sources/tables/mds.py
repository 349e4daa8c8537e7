"""MDS shards, as MosaicML streaming writes them: what their `index.json` says, and their samples.

A shard is at most 4 GB, as its offsets have 32 bits, and usually 64 MB: it is read whole, which its
digests ask for anyway. Nothing in it is ever unpickled.
"""

import bz2
import gzip
import hashlib
import json
import math
import posixpath
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import pyarrow as pa
import xxhash

from wdsprep.dataset.samples import parse_json
from wdsprep.errors import SourceError
from wdsprep.sources.patterns import MDS_ENDINGS
from wdsprep.sources.tables import RawArray
from wdsprep.store import opened
from wdsprep.store.base import Entry, Store, is_hidden

INDEX = "index.json"
VERSION = 2
DIGESTS: dict[str, Any] = {
    **{name: getattr(hashlib, name) for name in sorted(hashlib.algorithms_guaranteed)},
    **{name: getattr(xxhash, name) for name in sorted(xxhash.algorithms_available)},
}
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


class MdsColumn(NamedTuple):
    """`nbytes` is 0 where that differs from sample to sample."""

    name: str
    encoding: str
    nbytes: int


class MdsFile(NamedTuple):
    """One of the forms of a shard: as it is, or compressed."""

    name: str
    nbytes: int
    digests: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class MdsShard:
    """What an index says of a shard."""

    index: str
    samples: int
    columns: tuple[MdsColumn, ...]
    raw: MdsFile
    zipped: MdsFile | None
    compression: str

    @property
    def encodings(self) -> dict[str, str]:
        return {column.name: column.encoding for column in self.columns}

    def file(self, there: Mapping[str, Entry]) -> MdsFile | None:
        """The form of it that is there, if any."""
        forms = (self.raw, self.zipped) if self.zipped else (self.raw,)
        return next((form for form in forms if form.name in there), None)


def indexes_of(url: str) -> Iterator[tuple[str, dict[str, Entry]]]:
    """Each index below a place, with the files beside and below it by their names. A merged index
    speaks for the folders below it."""
    there = {e.name: e for e in opened(url).list() if not is_hidden(e.name)}
    found = [name for name in there if posixpath.basename(name) == INDEX]
    above = [posixpath.dirname(name) for name in found]
    for name, folder in zip(found, above, strict=True):
        if not any(_is_below(folder, other) for other in above):
            yield name, there
    shards = (name for name in there if name.endswith(MDS_ENDINGS))
    alone = next((s for s in shards if not any(_is_below(s, folder) for folder in above)), "")
    if alone:
        raise SourceError(
            f"{url} has MDS shards ({alone}) without their {INDEX}: bring it back, as it alone "
            "says what is in them"
        )


def _is_below(name: str, folder: str) -> bool:
    return name != folder and (not folder or name.startswith(f"{folder}/"))


def shards_there(url: str) -> Iterator[tuple[MdsShard, Entry]]:
    """Each shard that an index names, with its file; an error where it is not there, or has not the
    size that the index says."""
    found = False
    for index, there in indexes_of(url):
        for shard in read_index(url, index).values():
            file = shard.file(there)
            if file is None:
                name = (shard.zipped or shard.raw).name
                raise SourceError(
                    f"{url}/{index} names {name}, which is not there: bring it back, or make the "
                    "index of those that are there"
                )
            entry = there[file.name]
            if entry.nbytes != file.nbytes:
                what = f"{entry.nbytes:,} bytes, and {index} says {file.nbytes:,}"
                raise _damaged(url, file.name, what)
            found = True
            yield shard, entry
    if not found:
        raise SourceError(f"no MDS shard is in {url}: name another source")


@lru_cache(maxsize=4)
def read_index(url: str, index: str) -> dict[str, MdsShard]:
    """The shards that an index names, by the names of their files as they are uncompressed."""
    data = opened(url).read(index)
    try:
        said = parse_json(data)
        if said["version"] != VERSION:
            raise SourceError(f"{url}/{index} is of version {said['version']}, not {VERSION}")
        folder = posixpath.dirname(index)
        shards = [_shard(index, folder, each, f"{url}/{index}") for each in said["shards"]]
    except (ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise SourceError(
            f"{url}/{index} is no index of MDS shards ({why}): bring back the one that was written"
        ) from None
    return {shard.raw.name: shard for shard in shards}


def _shard(index: str, folder: str, said: Mapping[str, Any], what: str) -> MdsShard:
    if said["format"] != "mds":
        raise SourceError(f"{what} is of {said['format']} shards: only those of MDS are read")
    columns = zip(said["column_names"], said["column_encodings"], said["column_sizes"], strict=True)
    return MdsShard(
        index=index,
        samples=said["samples"],
        columns=tuple(MdsColumn(name, encoding, size or 0) for name, encoding, size in columns),
        raw=_file(folder, said["raw_data"]),
        zipped=_file(folder, said["zip_data"]) if said.get("zip_data") else None,
        compression=(said.get("compression") or "").partition(":")[0],
    )


def _file(folder: str, said: Mapping[str, Any]) -> MdsFile:
    name = posixpath.normpath(posixpath.join(folder, said["basename"]))
    if name.startswith(("..", "/")):
        raise ValueError(f"{said['basename']} leads out of the folder")
    return MdsFile(name, said["bytes"], said.get("hashes") or {})


def read_samples(
    url: str, shard: MdsShard, name: str, wanted: Sequence[str] = ()
) -> Iterator[dict[str, bytes]]:
    """The samples of a shard in their order, of which only the columns that are wanted (all where
    none is named), as they are encoded."""
    data = _read(opened(url), shard, name)
    try:
        (count,) = struct.unpack_from("<I", data)
        offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
        if count != shard.samples:
            raise _damaged(
                url, name, f"{count:,} samples, and {shard.index} says {shard.samples:,}"
            )
        for begin, end in pairwise(offsets):
            if not begin <= end <= len(data):
                raise _damaged(url, name, "its offsets lead out of it")
            yield dict(_fields(shard.columns, data[begin:end], wanted))
    except (struct.error, ValueError) as error:
        raise _damaged(url, name, str(error)) from None


def _fields(
    columns: Sequence[MdsColumn], data: bytes, wanted: Sequence[str]
) -> Iterator[tuple[str, bytes]]:
    varying = sum(not column.nbytes for column in columns)
    sizes = iter(struct.unpack_from(f"<{varying}I", data))
    start = 4 * varying
    for column in columns:
        end = start + (column.nbytes or next(sizes))
        if end > len(data):
            raise ValueError(f"column {column.name} leads out of its sample")
        if not wanted or column.name in wanted:
            yield column.name, data[start:end]
        start = end


def _read(store: Store, shard: MdsShard, name: str) -> bytes:
    """A shard as it was before it was compressed, held against all its digests."""
    data = store.read(name)
    zipped = shard.zipped
    if zipped and name == zipped.name:
        _check(store.url, zipped, data)
        try:
            data = _unzipped(shard, data)
        except (ValueError, OSError, EOFError) as error:
            raise _damaged(store.url, name, str(error)) from None
    _check(store.url, MdsFile(name, shard.raw.nbytes, shard.raw.digests), data)
    return data


def _unzipped(shard: MdsShard, data: bytes) -> bytes:
    kind = shard.compression
    if kind == "bz2":
        return bz2.decompress(data)
    if kind == "gz":
        return gzip.decompress(data)
    codec = {"br": "brotli", "zstd": "zstd", "snappy": "snappy"}.get(kind)
    if codec is None:
        raise ValueError(f"compressed by {kind}, which cannot be read here")
    found: bytes = pa.decompress(data, shard.raw.nbytes, codec=codec, asbytes=True)
    return found


def _check(url: str, file: MdsFile, data: bytes) -> None:
    if len(data) != file.nbytes:
        raise _damaged(url, file.name, f"{len(data):,} bytes, and the index says {file.nbytes:,}")
    for kind, wanted in file.digests.items():
        if kind not in DIGESTS:
            raise SourceError(f"{url}/{file.name} has a digest of an unknown kind: {kind}")
        if DIGESTS[kind](data).hexdigest() != wanted:
            raise _damaged(url, file.name, f"its {kind} is not what the index says")


def _damaged(url: str, name: str, why: str) -> SourceError:
    return SourceError(f"{url}/{name} is damaged ({why}): fetch it again, or make it again")


def value_of(encoding: str, data: bytes) -> Any:
    """A text, a number or what JSON holds; a `RawArray`; the bytes of an image or of what has no
    kind; None for all else, pickles among them."""
    if encoding in TEXTS:
        return TEXTS[encoding](data.decode())
    if encoding in SCALARS:
        return struct.unpack(SCALARS[encoding], data)[0]
    if encoding == "json":
        return json.loads(data)
    if encoding in IMAGES:
        return data
    if encoding.partition(":")[0] == "ndarray":
        return _array(encoding, data)
    return None


def _array(encoding: str, data: bytes) -> RawArray:
    """Its dtype and its shape stand in the encoding, or before its values."""
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
    if len(data) - start != math.prod(shape) * _WIDTHS[dtype]:
        raise ValueError(f"{len(data) - start} bytes do not make {dtype} {shape}")
    return RawArray(dtype=dtype, shape=shape, data=data[start:])
