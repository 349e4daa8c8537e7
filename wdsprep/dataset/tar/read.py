"""Read any tar, and say precisely what is wrong with it.

It yields samples for those who want the data, and offsets for those who want the index.
"""

import contextlib
import functools
import gzip
import os
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from wdsprep.dataset.chunks import Chunks, OnBytes
from wdsprep.dataset.tar import padded
from wdsprep.dataset.tar.members import (
    GZIP,
    BadSampleError,
    Tape,
    encode_index,
    members,
    split_member,
    truncated,
)
from wdsprep.store.base import Store

CHUNK_NBYTES = 16 << 20  # read at once: a header may claim more bytes than there are
UNPACKED_NBYTES = 1 << 20
WINDOW_NBYTES = 1 << 13
MAX_VIEW_NBYTES = 1 << 28  # a damaged header may state any size


# wants(field, nbytes, the fields that were read before it): whether to read a member of a sample
Wants = Callable[[str, int, Mapping[str, bytes]], bool]


@dataclass(kw_only=True, slots=True)
class TarSample:
    """Adjacent members that share a key.

    Field names are in lower case, as webdataset has them. `unread` are those that nobody
    wanted, with their sizes, and links, with their targets. `fault` is the first thing that is
    wrong with the sample.
    """

    key: str
    start: int
    fields: dict[str, bytes] = field(default_factory=dict)
    unread: dict[str, int | str] | None = None  # made only where it is needed
    fault: BadSampleError | None = None

    def check(self, name: str, before: Iterable[str] | None) -> None:
        """Check the name of one more field, and note what is wrong if nothing was before.

        `before` are the fields of an earlier sample with the same key, or None without one.
        """
        if name in self.fields or (self.unread and name in self.unread):
            self.fail(f"{self.key} has the field {name} twice", "repeated_field")
        elif before is not None and name in before:
            self.fail(f"{self.key} is the key of an earlier sample too", "repeated_key")
        elif before is not None:
            self.fail(f"{self.key} goes on after another sample's member", "scattered")

    def fail(self, message: str, code: str) -> None:
        self.fault = self.fault or BadSampleError(message, code=code, key=self.key)

    def pass_over(self, name: str, what: int | str) -> None:
        if self.unread is None:
            self.unread = {}
        self.unread[name] = what

    @property
    def names(self) -> tuple[str, ...]:
        names = (*self.fields, *self.unread) if self.unread else self.fields
        return tuple(map(sys.intern, names))


class ChunkTape:
    """A tape, which reads a tar by offsets, over the chunks of a file.

    The tape reads forward, and back no further than a chunk. `next_chunk` returns the next chunk,
    which is empty at the end of the file.
    """

    def __init__(self, next_chunk: Callable[[], bytes]) -> None:
        self._next_chunk = next_chunk
        self._before = self._chunk = b""
        self._start = 0  # the begin of the chunk

    @property
    def nbytes(self) -> int:
        """Return how many bytes have been read so far."""
        return self._start + len(self._chunk)

    def at(self, offset: int, nbytes: int) -> bytes:
        """Return so many bytes of the file from an offset, or fewer if the file ends."""
        inside = offset - self._start
        if 0 <= inside <= len(self._chunk) - nbytes:
            return self._chunk[inside : inside + nbytes]
        return self._across(offset, nbytes)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return bytes of the file from an offset, without a copy if one chunk has them all."""
        while offset >= self.nbytes and self._advance():
            pass
        inside = offset - self._start
        if 0 <= inside <= len(self._chunk) - nbytes:
            return memoryview(self._chunk)[inside : inside + nbytes]
        return memoryview(self._across(offset, min(nbytes, MAX_VIEW_NBYTES)))

    def _across(self, offset: int, nbytes: int) -> bytes:
        """Return bytes of the file that lie in more than one chunk, or not in the one at hand."""
        while offset >= self.nbytes and self._advance():
            pass
        inside = offset - self._start
        parts = [self._before[len(self._before) + inside :]] if inside < 0 else []
        parts.append(self._chunk[max(0, inside) : max(0, inside + nbytes)])
        there = sum(map(len, parts))
        while there < nbytes and self._advance():
            parts.append(self._chunk[: nbytes - there])
            there += len(parts[-1])
        return b"".join(parts)[:nbytes]

    def _advance(self) -> bool:
        """Go on to the next chunk; False at the end of the file."""
        chunk = self._next_chunk()
        if not chunk:
            return False
        self._start = self.nbytes
        self._before, self._chunk = self._chunk, chunk
        return True

    def rest(self) -> Iterator[int]:
        """Read the rest of the file, and yield after each chunk how many bytes are read in all."""
        while self._advance():
            yield self.nbytes


@contextlib.contextmanager
def open_unpacked_tape(
    store: Store, name: str, *, watch: OnBytes | None = None, expected: int | None = None
) -> Iterator[Tape]:
    """Open a tar of a store, gzipped or not, as a tape that reads forward.

    When it is closed, `watch` has seen each chunk that was read, in order. Whether a tar is
    gzipped is told by its first bytes, whatever its name says.
    """
    with contextlib.closing(Chunks(store, name, watch=watch, expected=expected)) as chunks:
        if not chunks.peek().startswith(GZIP):
            yield ChunkTape(chunks.next).at
            return
        stream = gzip.GzipFile(fileobj=chunks.as_stream())

        def next_chunk() -> bytes:
            try:
                return stream.read(UNPACKED_NBYTES)
            except EOFError:
                raise truncated(stream.tell(), "more of the gzipped tar") from None
            except (gzip.BadGzipFile, zlib.error) as error:
                message = f"its gzip data is damaged: {error}"
                raise BadSampleError(message, code="bad_header") from error

        yield ChunkTape(next_chunk).at


@contextlib.contextmanager
def file_tape(path: str | Path) -> Iterator[Tape]:
    """Open a local tar, and return a function that reads at an offset.

    It uses positioned reads, of a few headers at once if members are small. A file that is cut
    meanwhile reads as truncated, where a memory map would end in SIGBUS.
    """
    with Path(path).open("rb", buffering=0) as file:
        read = functools.partial(os.pread, file.fileno())
        end = file.seek(0, 2)
        window, window_start = b"", 0

        def at(offset: int, nbytes: int) -> bytes:
            nonlocal window, window_start
            inside = offset - window_start
            if 0 <= inside <= len(window) - nbytes:
                return window[inside : inside + nbytes]
            if offset >= end:
                return b""
            if nbytes < WINDOW_NBYTES:
                window, window_start = read(WINDOW_NBYTES, offset), offset
                if len(window) >= nbytes:
                    return window[:nbytes]
            parts, left = [], min(nbytes, end - offset)
            while left and (part := read(min(left, CHUNK_NBYTES), offset)):
                parts.append(part)
                left, offset = left - len(part), offset + len(part)
            return b"".join(parts)

        yield at


@contextlib.contextmanager
def open_tape(store: Store, name: str, *, expected: int | None = None) -> Iterator[Tape]:
    """Open a tar of a store, and return a function that reads at an offset.

    Over a network the offsets must rise. `expected` is the length of the tar, if that is known.
    """
    if store.root is None:
        with contextlib.closing(Chunks(store, name, expected=expected)) as chunks:
            yield ChunkTape(chunks.next).at
        return
    store.read(name, nbytes=0)  # says in words of ours why a file cannot be read
    with file_tape(store.root / name) as tape:
        yield tape


def scan(
    at: Tape,
    *,
    wants: Wants | None = None,
    stray: Callable[[str], object] = lambda _path: None,
    links: bool = False,
) -> Iterator[TarSample | BadSampleError]:
    """Yield every sample of a tar in order, or the error in its place.

    After a truncation or a bad header nothing follows: that error has the key of the sample that it
    cut. Members that `wants` refuses are not read. `stray` is called with the path of each file
    that belongs to no sample. Links are skipped, as webdataset does, unless they are asked for.
    """
    seen: dict[str, tuple[str, ...]] = {}
    sample: TarSample | None = None
    try:
        for path, start, data_start, nbytes, target in members(at):
            split = split_member(path)
            if split is None or (target and not links):
                if path and not target:
                    stray(path)
                continue
            key, name = split
            if sample is None or key != sample.key:
                if sample is not None:
                    yield sample.fault or sample
                    seen.setdefault(sample.key, sample.names)
                sample = TarSample(key=key, start=start)
            sample.check(name, seen.get(key))
            if target:
                sample.pass_over(name, target)
            elif wants is None or wants(name, nbytes, sample.fields):
                data = sample.fields[name] = at(data_start, nbytes)
                if len(data) < nbytes:
                    raise truncated(data_start, path)
            else:
                sample.pass_over(name, nbytes)
    except BadSampleError as error:
        key = sample.key if sample else ""
        yield BadSampleError(str(error), code=error.code, key=key)
        return
    if sample is not None:
        yield sample.fault or sample


def read_samples(at: Tape, what: str) -> Iterator[TarSample]:
    """Yield the samples of a tar that must be sound. Raise anything that is wrong with it."""
    for sample in scan(at):
        if isinstance(sample, BadSampleError):
            raise BadSampleError(f"{what}: {sample}", code=sample.code, key=sample.key) from sample
        yield sample


def index_tar(at: Tape, what: str) -> bytes:
    """Make the index of any tar from its headers alone.

    Links are skipped: they have no bytes that could be read at a place.
    """
    offsets = array("Q")
    keys: set[str] = set()
    last = ""
    end = 0
    try:
        for name, start, data_start, nbytes, target in members(at):
            split = split_member(name)
            if split is None or target:
                continue
            if split[0] != last:
                last = split[0]
                if last in keys:
                    raise BadSampleError(f"{last} stands in two places", code="scattered", key=last)
                keys.add(last)
                offsets.append(start)
            end = data_start + padded(nbytes)
    except BadSampleError as error:
        raise BadSampleError(f"{what}: {error}", code=error.code, key=error.key) from error
    offsets.append(end)
    return encode_index(offsets)
