"""Cached files: what was found in all samples of a dataset, mapped by whoever needs it.

A file is named by the digest of what it depends on, as the contents of the shards, so a dataset
that has changed has another file. It holds arrays one behind the other, what else is known as JSON,
and at its end a digest of all that: one that is cut or broken is made again. Processes of a machine
that want the same file wait for the first, which makes it. It gets its name when it is whole.

Files of datasets that have changed, or are gone, are deleted by whoever makes another file: those
that nobody has opened for 30 days, and of the others the ones that were opened longest ago, until
all take 20 GB or less. Who maps a file has a shared lock on it, which the kernel keeps for as long
as anything of the map is in use, also in a forked child: such a file stays.

    arrays, each from a multiple of 64 bytes on   JSON   length of the JSON   BLAKE3 of all before
"""

import fcntl
import json
import mmap
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from wdsprep.dataset.random_numbers import key_of
from wdsprep.dataset.sealed_json import Fields, Nbytes, matching, read_record
from wdsprep.errors import FormatError, StoreError, UsageError

VERSION = 1
ALIGNED = 64
DIGEST_NBYTES = 32
TAIL_NBYTES = DIGEST_NBYTES + 8
CHUNK_NBYTES = 4 << 20
UNUSED_S = 30 * 24 * 3600
WITH_TEXTS = "-texts"
"""How the names of files end that may have texts of samples, such as captions."""
MOST_NBYTES = 20_000_000_000
"""The most bytes that the files of a folder may take, but for those in use and the newest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptFile:
    """An open cached file. `arrays` are views of it, of which only what is used is in memory."""

    path: Path
    arrays: Mapping[str, NDArray[Any]]
    facts: Mapping[str, Any]
    digest: bytes


class KeptWriter:
    """A cached file that is being written: arrays come one after another.

    One comes in parts, or has room `reserve`d for it.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._at = file, 0
        self._arrays: dict[str, tuple[int, int, str]] = {}
        self.facts: dict[str, Any] = {}
        """Values that are to stand beside the arrays."""

    def _align(self) -> int:
        """Write zeros up to where the next array may begin, and return that place."""
        self._write(bytes(-self._at % ALIGNED))
        return self._at

    def add(self, name: str, dtype: str, parts: Iterable[NDArray[Any]]) -> None:
        start = self._align()
        for part in parts:
            self._write(np.ascontiguousarray(part, dtype).tobytes())
        self._arrays[name] = start, self._at - start, dtype

    def reserve(self, name: str, dtype: str, count: int) -> NDArray[Any]:
        """Return an array of zeros in the file, to be written to."""
        start, nbytes = self._align(), count * np.dtype(dtype).itemsize
        self._arrays[name] = start, nbytes, dtype
        if not count:
            return np.empty(0, dtype)
        self._file.flush()
        os.posix_fallocate(self._file.fileno(), start, nbytes)  # or a full disk kills later
        data = mmap.mmap(self._file.fileno(), start + nbytes)
        self._file.seek(nbytes, os.SEEK_CUR)
        self._at += nbytes
        return np.frombuffer(data, dtype, count, start)

    def finish(self) -> bytes:
        """Write what is left, and return the digest of the file."""
        facts = json.dumps({"arrays": self._arrays, "facts": self.facts}).encode()
        self._write(facts)
        self._write(len(facts).to_bytes(8, "little"))
        digest = blake3()
        self._file.seek(0)
        while data := self._file.read(CHUNK_NBYTES):
            digest.update(data)
        self._file.write(digest.digest())
        self._file.flush()
        os.fsync(self._file.fileno())
        return digest.digest()

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._at += len(data)


def kept_folder(cache: Path | None) -> Path:
    """Return the folder of cached files: below `cache`, or else in the user's cache folder."""
    if cache is not None:
        return cache / "kept"
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise UsageError(
            "there is no home folder to cache what was read of all samples: set XDG_CACHE_HOME, or "
            "give cache="
        ) from None
    return Path(home) / "wdsprep" / "kept"


def open_or_make(
    cache: Path | None,
    what: Iterable[str],
    make: Callable[[KeptWriter, Path], None],
    *,
    has_texts: bool = False,
) -> KeptFile:
    """Return the cached file whose content depends on `what`. Make it if it is missing or damaged.

    `make` gets a writer, and the path at which the file will be. After the file is made, other
    files of the folder are deleted: those unused for `UNUSED_S`, and more, the longest unused
    first, until all take `MOST_NBYTES` at most. Files in use stay. One that `has_texts` has a name
    by which `delete_texts` finds it.
    """
    folder = kept_folder(cache)
    name = f"{key_of(VERSION, 'kept', *what):016x}{WITH_TEXTS if has_texts else ''}"
    path = folder / f"{name}.arrays"
    with _store_errors(path):
        if (file := _open(path)) is not None:
            return file
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{name}.lock"):
            if (file := _open(path)) is not None:
                return file
            begun = path.with_suffix(".begun")  # whoever has the lock is alone with it
            try:
                with begun.open("w+b") as unnamed:
                    writer = KeptWriter(unnamed)
                    make(writer, path)
                    digest = writer.finish()
                begun.replace(path)
            except BaseException:
                with suppress(OSError):
                    begun.unlink()
                raise
            file = _map_again(path, digest)
            _delete_unused(folder, name)
            return file


@contextmanager
def _store_errors(path: Path) -> Iterator[None]:
    """Turn OSErrors of the block into StoreErrors about the cached file.

    An OSError can come from that file alone, as stores raise errors of their own.
    """
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"what is read of all samples cannot be cached in {error.filename or path} "
            f"({error.strerror}): give cache= another folder, or set XDG_CACHE_HOME"
        ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the file at `path` while the block lasts. Make the file if it is missing.

    This waits as long as another process has the lock. If the file is deleted by then, a new
    one is locked.
    """
    has_lock = False
    while not has_lock:
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if has_lock := _is_there(file, path):
                yield


def _is_there(file: IO[bytes], path: Path) -> bool:
    """Return whether a path still leads to this open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _delete_unused(folder: Path, newest: str) -> None:
    """Delete cached files unused for `UNUSED_S`, and others until all take `MOST_NBYTES` at most.

    The longest unused go first. The file named `newest` stays. A file that cannot be deleted, as it
    is in use or belongs to another user, stays without an error.
    """
    oldest = time.time() - UNUSED_S
    files: list[tuple[str, os.stat_result]] = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            if path.suffix != ".lock":
                files.append((path.stem, path.stat()))
    left = sum(status.st_size for _, status in files)
    for name, status in sorted(files, key=lambda file: file[1].st_mtime):
        if name != newest and (status.st_mtime < oldest or left > MOST_NBYTES):
            with suppress(OSError):
                _delete_unless_used(folder, name)
                left -= status.st_size


def delete_texts() -> None:
    """Delete the files in the user's cache folder that may have texts, but those in use."""
    with suppress(UsageError):  # without a home, nothing was cached there
        for path in kept_folder(None).glob(f"*{WITH_TEXTS}.lock"):
            with suppress(OSError):
                _delete_unless_used(path.parent, path.stem)


def _delete_unless_used(folder: Path, name: str) -> None:
    """Delete a cached file and its lock.

    Raise BlockingIOError if a process makes or maps the file.
    """
    path = folder / f"{name}.arrays"
    with (folder / f"{name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(FileNotFoundError), path.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        for rest in (path.with_suffix(".begun"), Path(lock.name)):
            rest.unlink(missing_ok=True)


def _open(path: Path, digest: bytes = b"") -> KeptFile | None:
    """Map a cached file and mark it as in use, or return None if it is missing or not whole.

    If the digest at its end is known, it is compared with that one, and its other bytes are not
    read. A map holds the file open, and with it the lock. On a disk without locks, such as some
    network disks, nothing is deleted either.
    """
    with suppress(FileNotFoundError), path.open("rb") as file:
        if os.fstat(file.fileno()).st_size <= TAIL_NBYTES:
            return None
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_SH)
        with suppress(OSError):  # a disk that may only be read
            os.utime(path)
        if not _is_there(file, path):  # another process has deleted it just before
            return None
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        is_whole = data[-DIGEST_NBYTES:] == digest
        if not digest:
            whole, end = blake3(), len(data) - DIGEST_NBYTES
            with memoryview(data) as view:
                for at in range(0, end, CHUNK_NBYTES):
                    whole.update(view[at : min(at + CHUNK_NBYTES, end)])
                    data.madvise(mmap.MADV_DONTNEED, at, CHUNK_NBYTES)
            is_whole = whole.digest() == data[end:]
        if not is_whole:
            return None
        end = len(data) - TAIL_NBYTES
        start = end - int.from_bytes(data[end : end + 8], "little")
        with suppress(FormatError):
            body = read_record(_BODY, data[max(0, start) : end], str(path))
            arrays = body["arrays"].items()
            if all(at + nbytes <= start for _, (at, nbytes, _) in arrays):
                views = {
                    name: np.frombuffer(data, dtype, nbytes // np.dtype(dtype).itemsize, at)
                    for name, (at, nbytes, dtype) in arrays
                }
                digest = data[-DIGEST_NBYTES:]
                return KeptFile(path=path, arrays=views, facts=body["facts"], digest=digest)
    return None


Dtype = Annotated[str, matching(r"\|b1|\|S[1-9]\d*|[<|][iuf][1248]", "a dtype")]


_BODY = Fields({"arrays": dict[str, tuple[Nbytes, Nbytes, Dtype]], "facts": dict[str, Any]})


def _pickle_for_process(file: KeptFile) -> Any:
    """Return what pickle sends for a cached file to a process that is started on this machine.

    That is path and digest, by which the process maps the file again, or all bytes if the file
    has been deleted or replaced. Plain pickle, which sends to the machines of a cluster, always
    sends all bytes: nobody knows whether such a machine has the file.
    """
    with suppress(OSError):
        if _open(file.path, file.digest) is not None:
            return _map_again, (file.path, file.digest)
    return file.__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def _map_again(path: Path, digest: bytes) -> KeptFile:
    with _store_errors(path):
        file = _open(path, digest)
    if file is None:
        raise StoreError(f"{path} was deleted just now: run the same again, which makes it again")
    return file


ForkingPickler.register(KeptFile, _pickle_for_process)


def release_pages(array: NDArray[Any]) -> None:
    """Take the file that an array is a view of out of this process's memory.

    What is used again comes from the page cache. An array in memory of its own stays.
    """
    if isinstance(array.base, memoryview) and isinstance(data := array.base.obj, mmap.mmap):
        data.madvise(mmap.MADV_DONTNEED)
