"""What the `index.json` of MDS shards says, checked before any of it is believed."""

import hashlib
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import xxhash

from wdsprep.dataset.samples import parse_json
from wdsprep.errors import SourceError
from wdsprep.sources.parsing import check_columns, parsing_file
from wdsprep.sources.patterns import MDS_ENDINGS
from wdsprep.store import shared_store
from wdsprep.store.base import Entry, is_hidden
from wdsprep.text import human_bytes, shown

INDEX = "index.json"
VERSION = 2
DIGESTS: dict[str, Any] = {
    **{
        name: getattr(hashlib, name)
        for name in sorted(hashlib.algorithms_guaranteed)
        if not name.startswith("shake")  # whose digests are as long as one asks for
    },
    **{name: getattr(xxhash, name) for name in sorted(xxhash.algorithms_available)},
}
MOST_NBYTES = 1 << 32
"""The most bytes of a shard: its offsets have 32 bits."""
OFFSET_NBYTES = 4
UNPACKED_NBYTES, UNPACKED_RATIO = 256 << 20, 16
"""A shard is usually 64 MB, and arrays and images hardly compress. One that unpacks to more than
both of these is not unpacked in memory."""
LONGEST = 1000
"""Characters of a name or another text."""
KINDS = {int: "a whole number", str: "a text", list: "a list", dict: "an object"}
T = TypeVar("T", int, str, "list[Any]", "dict[str, Any]")


class MdsColumn(NamedTuple):
    """A column of an MDS shard: `nbytes` is the length of each value, or 0 if lengths differ."""

    name: str
    encoding: str
    nbytes: int


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
        return {column.name: column.encoding for column in self.columns}

    def file(self, there: Mapping[str, Entry]) -> MdsFile | None:
        """Return the file of the shard that is among those `there`, or None if none is.

        The raw file is preferred to the compressed one.
        """
        forms = (self.raw, self.zipped) if self.zipped else (self.raw,)
        return next((form for form in forms if form.name in there), None)

    def check_unpacked(self, url: str, nbytes: int) -> None:
        """Raise SourceError if a file of `nbytes` bytes would unpack to a far larger shard."""
        if self.raw.nbytes > max(UNPACKED_NBYTES, UNPACKED_RATIO * nbytes):
            name = self.zipped.name if self.zipped else self.raw.name
            raise SourceError(
                f"{url}/{name} has {human_bytes(nbytes)} and would unpack to "
                f"{human_bytes(self.raw.nbytes)}: if you trust it, unpack it beside itself as "
                f"{posixpath.basename(self.raw.name)}"
            )


def indexes_of(url: str) -> Iterator[tuple[str, dict[str, Entry]]]:
    """Yield the name of each index below a place, with all files below that place by their names.

    An index in a folder below another index is left out, as a merged index stands for those below
    it. At the end, raise SourceError if an MDS shard has no index in its folder or one above.
    """
    there = {e.name: e for e in shared_store(url).list() if not is_hidden(e.name)}
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
    """Yield each shard that an index names, with its file, raw or compressed.

    Raise SourceError if there are no shards, or if a file is missing, has another size than the
    index says, or would unpack to far more.
    """
    found = False
    for index, there in indexes_of(url):
        for shard in read_index(url, index).values():
            file = shard.file(there)
            if file is None:
                name = (shard.zipped or shard.raw).name
                raise SourceError(
                    f"{url}/{index} lists {name}, which does not exist: bring it back, or make the "
                    "index of those that are there"
                )
            entry = there[file.name]
            if entry.nbytes != file.nbytes:
                what = f"{entry.nbytes:,} bytes, and {index} says {file.nbytes:,}"
                raise damaged_shard(url, file.name, what)
            if file is shard.zipped:
                shard.check_unpacked(url, entry.nbytes)
            found = True
            yield shard, entry
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
        folder = posixpath.dirname(index)
        shards = [_shard(index, folder, each, what) for each in _get(said, "shards", list)]
        found = {shard.raw.name: shard for shard in shards}
        if len(found) != len(shards):
            raise ValueError("it names a shard twice")
    return found


def _get(said: Mapping[str, Any], name: str, kind: type[T]) -> T:
    value = said[name]
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r:.40}, not {KINDS[kind]}")
    return value


def _whole(said: Mapping[str, Any], name: str, most: int) -> int:
    value = _get(said, name, int)
    if not 0 <= value <= most:
        raise ValueError(f"{name} is {value!r:.40}, not 0 to {most:,}")
    return value


def _text(said: Mapping[str, Any], name: str) -> str:
    value = _get(said, name, str)
    if len(value) > LONGEST:
        raise ValueError(f"{name} is {len(value):,} characters long")
    return value


def _texts(said: Mapping[str, Any], name: str) -> list[str]:
    return [_text({name: each}, name) for each in _get(said, name, list)]


def _shard(index: str, folder: str, said: Mapping[str, Any], what: str) -> MdsShard:
    if (form := _text(said, "format")) != "mds":
        raise SourceError(f"{what} is of {form[:20]} shards: only those of MDS are read")
    names = _texts(said, "column_names")
    check_columns(what, names)
    sizes = [
        0 if nbytes is None else _whole({"column_sizes": nbytes}, "column_sizes", MOST_NBYTES)
        for nbytes in _get(said, "column_sizes", list)
    ]
    columns = zip(names, _texts(said, "column_encodings"), sizes, strict=True)
    raw = _file(folder, _get(said, "raw_data", dict))
    least = OFFSET_NBYTES + sum(nbytes or OFFSET_NBYTES for nbytes in sizes)
    return MdsShard(
        index=index,
        samples=_whole(said, "samples", raw.nbytes // least),
        columns=tuple(MdsColumn(*column) for column in columns),
        raw=raw,
        zipped=_file(folder, _get(said, "zip_data", dict)) if said.get("zip_data") else None,
        compression=(_text(said, "compression") if said.get("compression") else "").partition(":")[
            0
        ],
    )


def _file(folder: str, said: Mapping[str, Any]) -> MdsFile:
    base = _text(said, "basename")
    name = posixpath.normpath(posixpath.join(folder, base))
    if name.startswith(("..", "/")):
        raise ValueError(f"{shown(base)} leads out of the folder")
    digests = _get(said, "hashes", dict) if said.get("hashes") else {}
    for kind in digests:
        if kind not in DIGESTS:
            raise ValueError(f"a digest of an unknown kind: {kind:.20}")
        _text(digests, kind)
    return MdsFile(name, _whole(said, "bytes", MOST_NBYTES), digests)
