"""What every store is: its calls, its entries, and how names and places are written."""

import io
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from wdsprep.errors import UsageError
from wdsprep.store.schemes import SCHEMES

CHUNK_NBYTES = 8 << 20
LOCAL_CHUNK_NBYTES = 1 << 20  # what the processor's cache holds until it is hashed
READERS = 32
LOCAL_READERS = 8  # a folder of this machine may be a mounted network folder, where reads wait
AHEAD = 4  # chunks of a stream on their way at once
WATCHED_BEHIND = 2  # chunks that wait to be watched, at most
OnBytes = Callable[[bytes], object]
CONTENT_TYPES = {  # what a browser shows; all else is bytes
    "html": "text/html; charset=utf-8",
    "json": "application/json",
    "jsonl": "application/x-ndjson",
    "tar": "application/x-tar",
}
WINDOWS_PATH = re.compile(r"(?P<drive>[A-Za-z]):\\|\\\\(?=[^\\]+\\)")
"""Matches the beginning of a path of Windows: of a drive, or of a server."""
HELD = ".hold"  # the end of the names of locks
Ours = Callable[[str], object]
"""Tells whether only wdsprep would write to a name."""
OUTSIDE = frozenset(("", ".", ".."))  # parts no name has; an empty one begins a path at the root


def none_of_ours(_name: str) -> bool:
    return False


class Entry(NamedTuple):
    """One file in a store.

    `stamp` changes when the file does: it is an mtime in ns, or an ETag. `written_s` is the
    time of writing, in seconds since 1970, or 0 if nobody knows it.
    """

    name: str
    nbytes: int
    stamp: str
    written_s: float = 0.0

    def below(self, prefix: str) -> "Entry":
        """Return the entry under its name without this prefix, which it begins with."""
        return self._replace(name=self.name[len(prefix) :])


class Sink(Protocol):
    """A file that takes bytes in order."""

    def write(self, data: bytes | memoryview, /) -> object: ...

    def writelines(self, pieces: Sequence[bytes | memoryview], /) -> object:
        """Write pieces of bytes, one after the other."""


class SinkFile:
    """A sink with the interface of a file, as pyarrow wants it. Its bytes are counted."""

    closed = False

    def __init__(self, sink: Sink) -> None:
        self._sink, self.nbytes = sink, 0

    def write(self, data: bytes | memoryview, /) -> None:
        self.writelines([data if isinstance(data, memoryview) else bytes(data)])

    def writelines(self, pieces: Sequence[bytes | memoryview], /) -> None:
        self.nbytes += sum(map(len, pieces))
        self._sink.writelines(pieces)

    def tell(self) -> int:
        return self.nbytes

    def flush(self) -> None:
        """Do nothing, since the store has the bytes already."""

    def close(self) -> None:
        """Do nothing, since the store closes its own file."""


class FileSink(Sink, Protocol):
    """A file of a store that is being written.

    `waiting` is the path where its bytes wait for their name, if they do.
    """

    @property
    def waiting(self) -> str: ...

    def end(self, *, waits: bool = False) -> None:
        """Take no more bytes, and do all that can be done before the file gets its name.

        With `waits`, the name comes later, so bytes that would stay in memory until then are
        sent too.
        """


class Store(Protocol):
    """A place that holds files by name, such as a local folder or a prefix in a bucket."""

    @property
    def url(self) -> str:
        """Return the URL that opens the store again. Messages show it."""

    @property
    def root(self) -> Path | None:
        """Return the local folder that holds the files, or None if bytes come over a network."""

    @property
    def readers(self) -> int:
        """Return how many threads are worth their cost to read many small files."""

    def list(self, prefix: str = "", /) -> Iterator[Entry]:
        """List the files whose names start with `prefix`, ordered by their names' UTF-8 bytes."""

    def read(self, name: str, /, *, start: int = 0, nbytes: int | None = None) -> bytes:
        """Return the bytes of a file from `start` on: `nbytes`, or fewer if the file ends."""

    def write(self, name: str, /, *, exclusive: bool = False) -> AbstractContextManager[FileSink]:
        """Write a file that appears when the block ends well, and never if it does not.

        With `exclusive`, a name that is taken raises ExistsError and stays as it was.
        """

    def delete(self, name: str, /) -> None:
        """Remove a file. A file that is not there is no error."""

    def sweep(self, ours: Ours = none_of_ours) -> tuple[int, int]:
        """Remove what killed writers left behind unseen.

        Return the number of unseen files that were removed, and of those that others seem to write
        now; none if the store does not tell of them. Files that do not show by themselves that
        they are wdsprep's are removed only if `ours` says so of their name.
        """

    def hold(
        self, name: str, /, *, giving: Sequence[FileSink] = ()
    ) -> AbstractContextManager[None]:
        """Lock a name on all machines while the block lasts.

        No two blocks that hold the same name run at a time. Raise BusyError after waiting too
        long for another block. If the lock is lost, this process can change nothing more in the
        store: that raises BusyError too. A process that dies gives up its locks.

        `giving` is for a block that does nothing but give these files their names, and names the
        last one at its end. Another process that has waited too long for such a block may delete
        the files, and take the lock.

        While the name is held, the store lists it as a file.
        """

    def let_go(self, name: str, /) -> None:
        """Remove the lock on a name if its process has died. The lock of one that lives stays."""


@runtime_checkable
class RemoteStore(Store, Protocol):
    """A store that a loader reads from over a network."""

    def read_into(self, name: str, buffer: memoryview, /, *, start: int) -> int:
        """Fill a buffer with the bytes of a file from `start` on, and return how many came.

        Fewer come only if the file ends before.
        """

    def stamp(self, name: str, /) -> str:
        """Return a text that changes whenever the file is written."""


def is_web(url: str) -> bool:
    return bool(re.match(r"https?://", url, re.IGNORECASE))


def local_path(url: str) -> str | None:
    """Return the local path that a path or a `file:` URL means; None for any other URL.

    A path may have a colon in it, as `a:b`. What begins like `scheme://`, or with a known scheme
    such as `s3:` or `pipe:`, is a URL. Raise UsageError for a path with a NUL, and for one of
    Windows, which would be the name of one file here.
    """
    if "\0" in url:
        raise UsageError(f"{url!r} is not a path or URL, as it has a NUL in it: leave that out")
    if windows := WINDOWS_PATH.match(url):
        drive, rest = windows["drive"], url[windows.end() :].replace("\\", "/")
        here = (
            f"in WSL give /mnt/{drive.lower()}/{rest}"
            if drive
            else "mount it, and give that folder"
        )
        raise UsageError(f"{url} is a path of Windows, which is not known here: {here}")
    scheme = re.match(rf"({SCHEMES}):(//)?|[a-z][a-z0-9+.-]*://", url, re.IGNORECASE)
    if scheme is None:
        return url
    return url[scheme.end() :] if url.lower().startswith("file:") else None


def absolute(url: "str | os.PathLike[str]") -> str:
    """Make a local path absolute, so that any process can open it.

    Other URLs stay as they are, but for slashes at their end.
    """
    url = os.fspath(url)
    path = local_path(url)
    if path is None:
        return url.rstrip("/")
    return os.path.abspath(expand_home(path))  # noqa: PTH100


def absolute_places(urls: "Sequence[str | os.PathLike[str]]") -> list[str]:
    """Make the places of datasets absolute. Raise UsageError if one of them is given twice."""
    places: list[str] = []
    for place in map(absolute, urls):
        if place in places:
            raise UsageError(f"{place} is given twice: give each dataset once")
        places.append(place)
    return places


def expand_home(path: str | os.PathLike[str]) -> Path:
    """Return a path with the folder of a user in place of `~` or `~NAME`, if there is one."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  pathlib raises where there is none


def check_apart(source: str, output: str) -> None:
    """Check that source and output do not lie in each other. Raise UsageError if they do.

    The next run would take such an output for a part of its source, and --overwrite would remove
    such a source with the output.
    """
    if lies_in(output, source):
        raise UsageError(f"{output} lies in the source {source}: write the shards somewhere else")
    if lies_in(source, output):
        raise UsageError(f"{source} lies in the output {output}: write the shards somewhere else")


def lies_in(url: str, other: str) -> bool:
    """Return whether a place is within another, or the same."""
    inner, outer = (_real(place).rstrip("/") + "/" for place in (url, other))
    return inner.startswith(outer)


def _real(url: str) -> str:
    path = local_path(url)
    return url if path is None else os.path.realpath(path)


def check_name(name: str) -> str:
    """Check that a name leads to a file inside a store, and not up or out of it. Return the name.

    Raise UsageError if it does not.
    """
    if "\0" in name or not OUTSIDE.isdisjoint(name.split("/")):
        raise UsageError(f"{name!r} is not a name inside a store")
    return name


def check_prefix(prefix: str) -> str:
    """Check that the prefix of a listing stays inside the store. Return it, or raise UsageError.

    The part after its last slash is not checked, as it may be half a name.
    """
    if "/" in prefix:
        check_name(prefix.rpartition("/")[0])
    return prefix


def write_bytes(store: Store, name: str, data: bytes, /, *, exclusive: bool = False) -> None:
    with store.write(name, exclusive=exclusive) as sink:
        sink.write(data)


class Chunks(io.RawIOBase):
    """A file of a store that is read chunk after chunk, or as a stream over these.

    Each chunk is one ranged read, checked and retried alone. Who asks for a second one will want
    them all, so from then on `ahead` of them are on their way at once: one after the other, they
    would wait for each other's first byte. What `watch` makes of a chunk, a hash as a rule, is made
    in a thread of its own meanwhile.

    A disk of this machine has read ahead itself, and to hand 1 MB to another thread takes as long
    as BLAKE3 of it. So there, all is done in the caller's thread: with all cores, `verify` takes
    0.8 of the time.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        start: int = 0,
        chunk_nbytes: int = 0,
        watch: OnBytes | None = None,
        ahead: int | None = None,
        expected: int | None = None,
    ) -> None:
        """Prepare to read a file in chunks, from `start` on.

        If `chunk_nbytes` is 0, chunks have the size that suits the store. `expected` is the
        length of the file, if it is known: no chunk is read ahead beyond it.
        """
        super().__init__()
        is_local = store.root is not None
        self._store, self._name = store, name
        self._chunk_nbytes = chunk_nbytes or (LOCAL_CHUNK_NBYTES if is_local else CHUNK_NBYTES)
        self._expected = math.inf if expected is None else expected
        self._watch = watch
        self._start = self._next = start  # the begin of the file, and of the next chunk
        self._ended = False
        self._peeked = b""
        self._ahead = (0 if is_local else AHEAD) if ahead is None else ahead
        self._coming: deque[Future[bytes]] = deque()
        self._watched: deque[Future[object]] = deque()
        self._readers: ThreadPoolExecutor | None = None
        self._watcher: ThreadPoolExecutor | None = None
        self._left = memoryview(b"")  # of a chunk, where it is read as a stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object, /) -> int:
        target = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        self._left = self._left or memoryview(self.next())
        count = min(len(target), len(self._left))
        target[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def peek(self) -> bytes:
        """Return the next chunk without taking it: `next` returns it again."""
        self._peeked = self._peeked or self.next()
        return self._peeked

    def next(self) -> bytes:
        """Return the next chunk. It is shorter, or empty, only if the file ends."""
        if self._peeked:
            chunk, self._peeked = self._peeked, b""
            return chunk
        if self._ended:
            return b""
        is_alone = self._next == self._start or not self._ahead
        data = self._read(self._next) if is_alone else self._next_ahead()
        self._ended = len(data) < self._chunk_nbytes
        self._show(data)
        self._next += len(data)
        return data

    def _read(self, start: int) -> bytes:
        return self._store.read(self._name, start=start, nbytes=self._chunk_nbytes)

    def _next_ahead(self) -> bytes:
        """Wait for the next chunk and return it, while those after it are being read in threads.

        If reading it fails, the chunks ahead are given up, and the next call asks for all of them
        again.
        """
        if self._readers is None:
            self._readers = ThreadPoolExecutor(self._ahead, "read-ahead")
        for n in range(len(self._coming), self._ahead):
            start = self._next + n * self._chunk_nbytes
            if n and start >= self._expected:
                break
            self._coming.append(self._readers.submit(self._read, start))
        try:
            return self._coming.popleft().result()
        except BaseException:
            for later in self._coming:
                later.cancel()
            self._coming.clear()
            raise

    def _show(self, data: bytes) -> None:
        """Pass a chunk to `watch`, in another thread if chunks are read ahead.

        A file of one chunk needs no thread. Wait while WATCHED_BEHIND chunks have not been
        watched. An error of `watch` in its thread is raised by a later call, or by `close`.
        """
        if self._watch is None or not data:
            return
        if not self._ahead or (self._ended and self._next == self._start):
            self._watch(data)
            return
        if self._watcher is None:
            self._watcher = ThreadPoolExecutor(1, "watch")
        while len(self._watched) >= WATCHED_BEHIND:
            self._watched.popleft().result()
        self._watched.append(self._watcher.submit(self._watch, data))

    def as_stream(self) -> io.BufferedReader:
        """Return the file as a stream, which takes bounded memory.

        When the stream is closed, `watch` has seen each chunk that was read, in order.
        """
        return io.BufferedReader(self, 1 << 16)

    def close(self) -> None:
        """Stop reading ahead, and wait until `watch` has been given each chunk that was read."""
        try:
            if self._readers is not None:
                self._readers.shutdown(cancel_futures=True)
            while self._watched:
                self._watched.popleft().result()
            if self._watcher is not None:
                self._watcher.shutdown()
        finally:
            super().close()


def is_hidden(name: str) -> bool:
    """Return whether the name of a file or of a folder above it begins with a dot."""
    return name.startswith(".") or "/." in name
