"""The samples of MDS shards, as MosaicML streaming writes them.

A shard is at most 4 GB, as its offsets have 32 bits, and usually 64 MB: it is read whole, which its
digests ask for anyway. Nothing in it is ever unpickled.
What the `index.json` of MDS shards says is checked before any of it is believed.
"""

import hashlib
import json
import math
import posixpath
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import pyarrow as pa
import xxhash

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.samples import parse_json
from wdsprep.dataset.sealed_json import Fields, between, check_values, value_rule
from wdsprep.errors import SourceError
from wdsprep.sources.parsing import check_columns, check_unpacked, parsing_file, parsing_sample
from wdsprep.sources.patterns import MDS_ENDINGS
from wdsprep.sources.tables import RawArray
from wdsprep.store import shared_store
from wdsprep.store.base import Entry, is_hidden
from wdsprep.text import shown

STREAMS = {"br": "brotli", "bz2": "bz2", "gz": "gzip", "zstd": "zstd"}
"""Arrow's names of compressions of which it reads no more than it is told to."""
SCALARS = {
    "int": "<q",
    **{f"int{8 << place}": f"<{code}" for place, code in enumerate("bhiq")},
    **{f"uint{8 << place}": f"<{code}" for place, code in enumerate("BHIQ")},
    **{f"float{16 << place}": f"<{code}" for place, code in enumerate("efd")},
}
"""Encodings of one number, as `struct` reads them."""
TEXTS = {"str": str, "str_int": int, "str_float": float, "str_decimal": str}
IMAGES = ("jpeg", "png", "pil", "bytes")
"""Encodings that may hold an image."""
_DTYPES = {
    bits + place: name
    for bits in (8, 16, 32, 64)
    for place, kind in enumerate(("uint", "int", "float"))
    if (name := f"{kind}{bits}") in SCALARS
}
"""The dtypes of arrays by the byte that stands for them."""
INDEX, VERSION = "index.json", 2
DIGESTS: dict[str, Any] = {
    **{
        name: getattr(hashlib, name)
        for name in sorted(hashlib.algorithms_guaranteed)
        if not name.startswith("shake")  # whose digests are as long as one asks for
    },
    **{name: getattr(xxhash, name) for name in sorted(xxhash.algorithms_available)},
}
OFFSET_NBYTES = 4
UNPACKED_RATIO = 16
"""A shard is usually 64 MB, and arrays and images hardly compress."""

Size = Annotated[int, between(0, (1 << 32) + 1, "0 to 4,294,967,296")]
"""A number of bytes or samples of a shard: its offsets have 32 bits."""
ShortText = Annotated[
    str,
    value_rule(
        "a text of 1,000 characters", lambda texts: all(len(text) <= 1_000 for text in texts)
    ),
]
DigestName = Annotated[
    str, value_rule("a digest that is known here", lambda names: DIGESTS.keys() >= {*names})
]
_FILE = Fields(
    {"basename": ShortText, "bytes": Size}, {"hashes": Mapping[DigestName, ShortText] | None}
)
_SHARD = Fields(
    {
        "column_names": list[ShortText],
        "column_encodings": list[ShortText],
        "column_sizes": list[Size | None],
        "samples": Size,
    },
    {"compression": ShortText | None},
)
"""A shard in an index; `raw_data` and `zip_data` of it are files."""

MdsColumn = tuple[str, str, int]
"""The name and the encoding of a column, and the length of each value, or 0 if lengths differ."""


class MdsFile(NamedTuple):
    """A file of a shard: the shard as it is, or compressed."""

    name: str
    nbytes: int
    digests: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class MdsShard:
    """A shard as an index describes it."""

    index: str
    samples: int
    columns: tuple[MdsColumn, ...]
    raw: MdsFile
    zipped: MdsFile | None
    compression: str

    @property
    def encodings(self) -> dict[str, str]:
        return {name: encoding for name, encoding, _ in self.columns}

    def check_unpacked(self, url: str) -> None:
        """Raise SourceError if the compressed file would unpack to a far larger shard."""
        if self.zipped:
            zipped, most = self.zipped, UNPACKED_RATIO
            check_unpacked(f"{url}/{zipped.name}", self.raw.nbytes, zipped.nbytes, ratio=most)


def _is_below(name: str, folder: str) -> bool:
    return name != folder and (not folder or name.startswith(f"{folder}/"))


def shards_there(url: str) -> Iterator[tuple[MdsShard, Entry]]:
    """Yield each shard that an index names, with its file, raw or compressed.

    An index in a folder below another index is left out, as a merged index stands for those below
    it. Raise SourceError if there are no shards, or if a file is missing, has another size than the
    index says, or would unpack to far more; at the end also if a shard has no index in its folder
    or one above.
    """
    store, found = shared_store(url), False
    there = {entry.name: entry for entry in store.list() if not is_hidden(entry.name)}
    indexes = [name for name in there if posixpath.basename(name) == INDEX]
    folders = [posixpath.dirname(name) for name in indexes]
    for index, folder in zip(indexes, folders, strict=True):
        if any(_is_below(folder, other) for other in folders):
            continue
        for shard in read_index(url, index).values():
            forms = [form for form in (shard.raw, shard.zipped) if form]
            file = next((form for form in forms if form.name in there), None)
            if file is None:
                name = forms[-1].name
                raise SourceError(
                    f"{url}/{index} lists {name}, which does not exist: bring it back, or make the "
                    "index of those that are there"
                )
            entry = there[file.name]
            if entry.nbytes != file.nbytes:
                what = f"{entry.nbytes:,} bytes, and {index} says {file.nbytes:,}"
                raise damaged_shard(url, file.name, what)
            if file is shard.zipped:
                shard.check_unpacked(url)
            found = True
            yield shard, entry
    shards = (name for name in there if name.endswith(MDS_ENDINGS))
    alone = next((s for s in shards if not any(_is_below(s, folder) for folder in folders)), "")
    if alone:
        raise SourceError(
            f"{url} has MDS shards ({alone}) without their {INDEX}: bring it back, as it alone "
            "says what is in them"
        )
    if not found:
        raise SourceError(f"no MDS shard is in {url}: give another source")


def damaged_shard(url: str, name: str, why: str) -> SourceError:
    return SourceError(f"{url}/{name} is damaged ({why}): fetch it again, or make it again")


@lru_cache(maxsize=4)
def read_index(url: str, index: str) -> dict[str, MdsShard]:
    """Return the shards that an index lists, by the names of their uncompressed files.

    `index` is the path of its file within `url`. Raise SourceError if the file is not a valid index
    of MDS shards.
    """
    data = shared_store(url).read(index)
    what = f"{url}/{index}"
    with parsing_file(what, "is not an index of MDS shards", "bring back the one that was written"):
        said = parse_json(data)
        if said["version"] != VERSION:
            raise SourceError(f"{what} is of version {said['version']!r:.20}, not {VERSION}")
        for shard in said["shards"]:
            if (form := shard["format"]) != "mds":
                raise SourceError(f"{what} is of {form!s:.20} shards: only those of MDS are read")
        check_values(_SHARD, said["shards"])
        folder, shards = posixpath.dirname(index), dict[str, MdsShard]()
        for shard in said["shards"]:
            names, sizes = shard["column_names"], [n or 0 for n in shard["column_sizes"]]
            check_columns(what, names)
            raw, samples, zipped = shard["raw_data"], shard["samples"], shard.get("zip_data")
            file, least = _file(folder, raw), sum(n or OFFSET_NBYTES for n in sizes)
            if samples > file.nbytes // (OFFSET_NBYTES + least):
                raise ValueError(f"{samples:,} samples do not fit into {file.nbytes:,} bytes")
            if file.name in shards:
                raise ValueError("it names a shard twice")
            shards[file.name] = MdsShard(
                index=index,
                samples=samples,
                columns=tuple(zip(names, shard["column_encodings"], sizes, strict=True)),
                raw=file,
                zipped=_file(folder, zipped) if zipped else None,
                compression=(shard.get("compression") or "").partition(":")[0],
            )
    return shards


def _file(folder: str, said: Mapping[str, Any]) -> MdsFile:
    check_values(_FILE, [said])
    name = posixpath.normpath(posixpath.join(folder, said["basename"]))
    if name.startswith(("..", "/")):
        raise ValueError(f"{shown(said['basename'])} leads out of the folder")
    return MdsFile(name, said["bytes"], said.get("hashes") or {})


def read_samples(url: str, shard: MdsShard, name: str) -> Iterator[bytes]:
    """Yield the samples of a shard in their order, as bytes.

    `name` is the shard's raw or compressed file. Raise SourceError if its size, its digests or its
    number of samples are not those in the index.
    """
    data, zipped = shared_store(url).read(name), shard.zipped
    fault, advice = "is not a valid MDS shard", "fetch it again, or make it again"
    if zipped and name == zipped.name:
        _check(url, name, zipped, data)
        shard.check_unpacked(url)
        with parsing_file(f"{url}/{name}", fault, advice):
            kind = shard.compression
            if kind == "snappy":  # which makes 21 bytes of one at most
                data = pa.decompress(data, shard.raw.nbytes, codec=kind, asbytes=True)
            elif kind in STREAMS:
                with pa.CompressedInputStream(pa.BufferReader(data), STREAMS[kind]) as stream:
                    data = stream.read(shard.raw.nbytes + 1)  # one more is too many
            else:
                raise ValueError(f"compressed by {kind!r:.20}, which cannot be read here")
    _check(url, name, shard.raw, data)
    with parsing_file(f"{url}/{name}", fault, advice):
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
    fields: dict[str, bytes] = {}
    with parsing_sample("the sample"):
        varying = sum(not nbytes for _, _, nbytes in shard.columns)
        sizes = iter(struct.unpack_from(f"<{varying}I", data))
        start = 4 * varying
        for name, _, nbytes in shard.columns:
            end = start + (nbytes or next(sizes))
            if end > len(data):
                raise ValueError(f"column {name} has more bytes than its sample")
            if not wanted or name in wanted:
                fields[name] = data[start:end]
            start = end
    return fields


def _check(url: str, name: str, file: MdsFile, data: bytes) -> None:
    if len(data) != file.nbytes:
        more = "more than " if len(data) > file.nbytes else ""
        said = f"{more}{min(len(data), file.nbytes):,} bytes, and the index says {file.nbytes:,}"
        raise damaged_shard(url, name, said)
    for kind, wanted in file.digests.items():
        if DIGESTS[kind](data).hexdigest() != wanted:
            raise damaged_shard(url, name, f"its {kind} is not what the index says")


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
    if min(shape, default=0) < 0 or len(data) - start != math.prod(shape) * struct.calcsize(
        SCALARS[dtype]
    ):
        raise ValueError(f"{len(data) - start} bytes do not make {dtype} {shape}")
    return RawArray(dtype=dtype, shape=shape, data=data[start:])
