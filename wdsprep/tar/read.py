"""Reads any tar and says precisely what is wrong with it.

Reading goes over a *tape*: a function `at(offset, nbytes)` that gives bytes further and further
on. A stream and a memory map both make one, so samples and bare headers share one walk.
"""

import contextlib
import mmap
import re
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from wdsprep.errors import TarError
from wdsprep.tar import BLOCK, padded
from wdsprep.tar.index import encode_index

ZEROS = bytes(BLOCK)
MAX_EXTENSION_NBYTES = 1 << 20  # of a PAX header or GNU long name: more is an attack

Tape = Callable[[int, int], bytes]


class Member(NamedTuple):
    """One file in a tar; `start` is where its first header begins, extension headers included."""

    name: str
    start: int
    data_start: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TarSample:
    """Adjacent members that share a key. Field names are in lower case, as webdataset has them."""

    key: str
    start: int
    fields: dict[str, bytes]


class BadSampleError(TarError):
    """Why a sample, or all that follows it, cannot be taken from a tar. `code` is one of
    truncated, bad_header, repeated_key, scattered, repeated_field."""

    def __init__(self, message: str, *, code: str, key: str = "") -> None:
        super().__init__(message)
        self.code, self.key = code, key


def stream_tape(stream: BinaryIO) -> Tape:
    """A tape over a stream, which can only go forward."""
    position = 0

    def at(offset: int, nbytes: int) -> bytes:
        nonlocal position
        while position < offset:
            skipped = len(stream.read(min(offset - position, 1 << 20)))
            if not skipped:
                return b""
            position += skipped
        data = stream.read(nbytes)
        position += len(data)
        return data

    return at


@contextlib.contextmanager
def file_tape(path: str | Path) -> Iterator[Tape]:
    """A tape over a local file, mapped: headers are read with no system call."""
    with Path(path).open("rb") as file:
        if not file.seek(0, 2):
            yield lambda _offset, _nbytes: b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            yield lambda offset, nbytes: mapped[offset : offset + nbytes]


def members(at: Tape) -> Iterator[Member]:
    """The regular files of a tar in order, at last an unnamed Member where the end marker is."""
    offset = start = 0
    long_name = ""
    long_size = -1
    while True:
        head = at(offset, BLOCK)
        if len(head) < BLOCK:
            raise _truncated(offset, "a header")
        if not head[0] and head == ZEROS:
            yield Member("", offset, offset, 0)
            return
        kind, nbytes = _check_header(head, offset)
        data_start = offset + BLOCK
        if kind in b"xL":
            name, size = _extension(kind, _extension_data(at, data_start, nbytes), offset)
            long_name, long_size = name or long_name, max(size, long_size)
        else:
            nbytes = long_size if long_size >= 0 else nbytes
            if kind in b"0\x007":
                yield Member(long_name or _name(head), start, data_start, nbytes)
            if kind not in b"gK":
                long_name, long_size = "", -1
        offset = data_start + padded(nbytes)
        if kind not in b"xLgK":
            start = offset


def _check_header(head: bytes, offset: int) -> tuple[int, int]:
    """Type and size of the member behind `head`."""
    # The low half of Adler-32 is one more than the sum of the bytes, modulo 65,521: the header's
    # own checksum at the speed of C. The checksum field itself counts as eight spaces.
    total = (zlib.adler32(head) - 1 - sum(head[148:156]) + 256) & 0xFFFF
    try:
        stated = int(head[148:156].strip(b"\0 "), 8)
        size = head[124:136]
        nbytes = int.from_bytes(size[1:], "big") if size[0] == 0x80 else int(size.strip(b"\0 "), 8)
    except ValueError:
        stated = -1
        nbytes = 0
    if total != stated % 65_521:
        message = f"at byte {offset:,} stands no tar header, or a damaged one"
        raise BadSampleError(message, code="bad_header")
    return head[156], nbytes


def _name(head: bytes) -> str:
    name = head[: head.find(b"\0", 0, 100) if b"\0" in head[:100] else 100]
    if head[345] and head[257:263] == b"ustar\0":
        name = head[345:500].rstrip(b"\0") + b"/" + name
    return name.decode("utf-8", "surrogateescape")


def _truncated(offset: int, what: str) -> BadSampleError:
    message = f"it is truncated: {what} should stand at byte {offset:,}"
    return BadSampleError(message, code="truncated")


def _extension_data(at: Tape, start: int, nbytes: int) -> bytes:
    if nbytes > MAX_EXTENSION_NBYTES:
        raise BadSampleError(f"an extension header of {nbytes:,} bytes", code="bad_header")
    data = at(start, nbytes)
    if len(data) < nbytes:
        raise _truncated(start, "an extension header")
    return data


_PAX_RECORD = re.compile(rb"(\d{1,7}) ([^=]+)=")


def _extension(kind: int, data: bytes, offset: int) -> tuple[str, int]:
    """The name and size that an extension header gives the next member ("" and -1 for none)."""
    if kind == ord("L"):
        return data.rstrip(b"\0").decode("utf-8", "surrogateescape"), -1
    name, size, position = "", -1, 0
    while match := _PAX_RECORD.match(data, position):
        end = position + int(match[1])
        value = data[match.end() : end - 1]
        if match[2] == b"path":
            name = value.decode("utf-8", "surrogateescape")
        elif match[2] == b"size" and value.isdigit():
            size = int(value)
        if end <= match.end():
            raise BadSampleError(f"at byte {offset:,}: a damaged PAX header", code="bad_header")
        position = end
    return name, size


SAMPLE_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)


def split_member(name: str) -> tuple[str, str] | None:
    """Key and field of a member, split at its first dot as webdataset does; None if it has none."""
    match = SAMPLE_NAME.fullmatch(name)
    return (match[1], match[2].lower()) if match else None


@dataclass(slots=True)
class _Group:
    """A sample in the making."""

    key: str
    start: int
    fields: dict[str, bytes] = field(default_factory=dict)
    fault: BadSampleError | None = None

    def add(self, name: str, data: bytes, before: Iterable[str] | None) -> None:
        if name in self.fields:
            self.fail(f"{self.key} has the field {name} twice", "repeated_field")
        elif before is not None and name in before:
            self.fail(f"{self.key} is the key of an earlier sample too", "repeated_key")
        elif before is not None:
            self.fail(f"{self.key} goes on after another sample's member", "scattered")
        self.fields[name] = data

    def fail(self, message: str, code: str) -> None:
        self.fault = self.fault or BadSampleError(message, code=code, key=self.key)

    def result(self) -> TarSample | BadSampleError:
        return self.fault or TarSample(key=self.key, start=self.start, fields=self.fields)


def scan(at: Tape) -> Iterator[TarSample | BadSampleError]:
    """Every sample of a tar in order, or what is wrong with it. After a truncation or a bad
    header nothing follows: that error carries the key of the sample it cut."""
    seen: dict[str, tuple[str, ...]] = {}
    group: _Group | None = None
    try:
        for member in members(at):
            split = split_member(member.name)
            if split is None:  # the end, or a file that belongs to no sample
                continue
            key, name = split
            if group is None or key != group.key:
                if group is not None:
                    yield group.result()
                    seen.setdefault(group.key, tuple(map(sys.intern, group.fields)))
                group = _Group(key, member.start)
            data = at(member.data_start, member.nbytes)
            if len(data) < member.nbytes:
                raise _truncated(member.data_start, member.name)
            group.add(name, data, seen.get(key))
    except BadSampleError as error:
        key = group.key if group else ""
        yield BadSampleError(str(error), code=error.code, key=key)
        return
    if group is not None:
        yield group.result()


def read_samples(at: Tape, what: str) -> Iterator[TarSample]:
    """The samples of a tar that must be sound; anything wrong with it is raised."""
    for found in scan(at):
        if isinstance(found, BadSampleError):
            raise BadSampleError(f"{what}: {found}", code=found.code, key=found.key) from found
        yield found


def index_tar(at: Tape, what: str) -> bytes:
    """The index of any tar, from its headers alone."""
    offsets = array("Q")
    keys: set[str] = set()
    key = ""
    end = 0
    match = SAMPLE_NAME.fullmatch
    try:
        for name, start, data_start, nbytes in members(at):
            found = match(name)
            if found is None:
                continue
            if found[1] != key:
                key = found[1]
                offsets.append(start)
                if key in keys:
                    raise BadSampleError(f"{key} stands in two places", code="scattered", key=key)
                keys.add(key)
            end = data_start + padded(nbytes)
    except BadSampleError as error:
        raise BadSampleError(f"{what}: {error}", code=error.code, key=error.key) from error
    offsets.append(end)
    return encode_index(offsets)
