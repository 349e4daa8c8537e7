"""What every store is: its calls, its entries, and how names and places are written."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from wdsprep.errors import UsageError
from wdsprep.store.schemes import SCHEMES

READERS = 32
LOCAL_READERS = 8  # a folder of this machine may be a mounted network folder, where reads wait
CONTENT_TYPES = {  # what a browser shows; all else is bytes
    "html": "text/html; charset=utf-8",
    "json": "application/json",
    "jsonl": "application/x-ndjson",
    "tar": "application/x-tar",
}
WINDOWS_PATH = re.compile(r"[A-Za-z]:\\|\\\\(?=[^\\]+\\)")
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
    if WINDOWS_PATH.match(url):
        raise UsageError(
            f"{url} is a path of Windows, which is not known here: in WSL give that below /mnt, as "
            "/mnt/c/FOLDER; mount the folder of another machine"
        )
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
    paths = ((place, local_path(place)) for place in (url, other))
    real = (place if path is None else os.path.realpath(path) for place, path in paths)
    inner, outer = (f"{place.rstrip('/')}/" for place in real)
    return inner.startswith(outer)


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


def is_hidden(name: str) -> bool:
    """Return whether the name of a file or of a folder above it begins with a dot."""
    return name.startswith(".") or "/." in name
