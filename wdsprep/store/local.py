"""A local folder. A file is written under a temporary name, synced, renamed, and its folder synced.

The temporary name carries this host's name and its writer holds a lock on it, so `sweep` can tell
a dead writer's leftovers from a file that is still being written. A hold is a lock on a file too,
which the kernel opens when its process ends. A process that is stopped keeps it, and is waited for;
but where all that it does is to give files their names, that can be ended from outside: the file
that it has locked lists the paths where they wait, and without these it does nothing more. Where a
file system has no locks, there is nothing to hold.
"""

import contextlib
import errno
import fcntl
import os
import re
import resource
import secrets
import socket
import stat
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from wdsprep.errors import (
    AccessError,
    ExistsError,
    FullError,
    NotAFileError,
    NotFoundError,
    ShortReadError,
    StoreError,
)
from wdsprep.store.base import (
    LOCAL_READERS,
    Entry,
    FileSink,
    Ours,
    check_name,
    check_prefix,
    expand_home,
    none_of_ours,
)
from wdsprep.store.object_locks import Wait

HOST = re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname()) or "host"
TEMPORARY = re.compile(r"\.wdsprep-([A-Za-z0-9-]+)\.[0-9a-f]{16}\.tmp")
LOST = "lost+found/"  # what is at the root of a disk, where only root may look
HOLD_WAIT_S = 2_000.0  # as long as on S3
NOT_THERE = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOLCK)
"""Errors of file systems that have no hard links, or no locks."""
PIECES_AT_ONCE = 512  # pieces; Linux and macOS take 1024
PATIENCE_S = 15.0  # with somebody who has to give files their names
WRITTEN_NBYTES = 128 << 10
"""The bytes that are written at once. For one of several MB the kernel looks for as much memory in
one piece, and on a machine that has run for long (Linux 6, ext4) such writes came to a sixth of the
speed."""
FRESH_S = 600.0
"""The age of another host's temporary file from which on its writer seems to write no more."""
FOREIGN_LEFTOVER_S = 86_400  # another host's lock may be out of sight: only old files are its dead


MOVE_IT = "move it away, then run the same command again"


class LocalStore:
    """A store in a local folder, which is made when first written to."""

    readers = LOCAL_READERS

    def __init__(self, root: str | Path) -> None:
        self.url = str(expand_home(root))
        self.root = Path(self.url).absolute()  # wherever the program goes
        self._root = str(self.root)

    def list(self, prefix: str = "", /) -> Iterator[Entry]:
        folder, _, start = check_prefix(prefix).rpartition("/")
        yield from _walk(self.root / folder, f"{folder}/" if folder else "", start, frozenset())

    def read(self, name: str, /, *, start: int = 0, nbytes: int | None = None) -> bytes:
        path = f"{self._root}/{check_name(name)}"
        fd, whole = open_file(path)
        try:
            there = max(0, whole - start)
            wanted = there if nbytes is None else min(nbytes, there)
            data = os.pread(fd, wanted, start)
            while len(data) < wanted and (
                more := os.pread(fd, wanted - len(data), start + len(data))
            ):
                data += more  # rarely: one call nearly always brings everything
        except OSError as error:
            raise _store_error(error, path) from error
        finally:
            os.close(fd)
        if len(data) != wanted:
            raise ShortReadError(f"{path}: {len(data):,} of {wanted:,} bytes read: it was cut")
        return data

    @contextlib.contextmanager
    def write(self, name: str, /, *, exclusive: bool = False) -> Iterator["_LocalSink"]:
        path = self.root / check_name(name)
        with _store_errors(path):
            _make_folder(path.parent)
            temporary, fd = _create_temporary(path.parent)
        sink = _LocalSink(fd, path, str(temporary.relative_to(self.root)))
        try:
            yield sink  # an OSError of the block itself is not this file's
            if sink.failure is not None:
                raise sink.failure
            with _store_errors(path):
                os.fsync(fd)
                if exclusive:
                    _name_once(temporary, path)
                else:
                    temporary.replace(path)
                _sync_folder(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        finally:
            os.close(fd)

    def delete(self, name: str, /) -> None:
        path = self.root / check_name(name)
        with _store_errors(path):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return
            _sync_folder(path.parent)

    def sweep(self, ours: Ours = none_of_ours) -> tuple[int, int]:
        del ours  # the names of temporary files show it
        removed = unfinished = 0
        for folder, _, names in os.walk(self.root):
            for name in names:
                if match := TEMPORARY.fullmatch(name):
                    path = Path(folder) / name
                    if remove_if_dead(path, host=match[1]):
                        removed += 1
                        continue
                    # One of this host is locked by its writer. Of another one the date tells.
                    with contextlib.suppress(OSError):
                        is_ours = match[1] == HOST
                        unfinished += path.exists() and (is_ours or _age_s(path) < FRESH_S)
        return removed, unfinished

    @contextlib.contextmanager
    def hold(self, name: str, /, *, giving: Sequence[FileSink] = ()) -> Iterator[None]:
        path = self.root / check_name(name)
        with _store_errors(path):
            _make_folder(path.parent)
            fd = _wait_for_lock(path, self.root)
            os.write(fd, os.fsencode("".join(f"{file.waiting}\0" for file in giving)))
        try:
            yield
        finally:
            _unlink_same(path, fd)  # but where somebody has lost patience
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has it too
            os.close(fd)

    def let_go(self, name: str, /) -> None:
        remove_if_dead(self.root / check_name(name))


def _first_pieces(left: Iterable[memoryview]) -> list[memoryview]:
    """Return the first of many pieces: as many bytes as one call writes."""
    first, room = [], WRITTEN_NBYTES
    for piece in islice(left, PIECES_AT_ONCE):
        first.append(piece[:room])
        room -= len(first[-1])
        if not room:
            break
    return first


class _LocalSink:
    def __init__(self, fd: int, path: Path, waiting: str) -> None:
        self._fd, self._path, self.waiting = fd, path, waiting
        self.failure: StoreError | None = None
        """The error of a write, for a caller that goes on after it."""

    def write(self, data: bytes | memoryview, /) -> None:
        self.writelines([data])

    def writelines(self, pieces: Sequence[bytes | memoryview], /) -> None:
        """Write many pieces with one call, without joining them."""
        left = deque(memoryview(piece) for piece in pieces if piece)
        try:
            with _store_errors(self._path):
                while left:
                    written = os.writev(self._fd, _first_pieces(left))
                    while left and written >= len(left[0]):
                        written -= len(left.popleft())
                    if written:
                        left[0] = left[0][written:]
        except StoreError as error:
            self.failure = error
            raise

    def end(self, *, waits: bool = False) -> None:
        del waits  # nothing is kept
        with _store_errors(self._path):
            os.fsync(self._fd)


def _walk(
    folder: Path, path: str, start: str, above: frozenset[tuple[int, int]]
) -> Iterator[Entry]:
    """Yield the files below a folder in the order of their names, which begin with `start`.

    A link to a folder that holds the link is not entered.
    """
    with _store_errors(folder):
        try:
            here = folder.stat()
            # A folder sorts as its name with a slash, so that the whole listing is in name order;
            # names alone are kept, and code points sort as their UTF-8 does.
            names = [f"{e.name}/" if _is_folder(e) else e.name for e in os.scandir(folder)]
            if not path and LOST in names:
                names.remove(LOST)
        except (FileNotFoundError, NotADirectoryError):
            return
    if (here.st_dev, here.st_ino) in above:
        return
    above |= {(here.st_dev, here.st_ino)}
    for name in sorted(names):
        if not name.startswith(start):
            continue
        if name[-1] == "/":
            yield from _walk(folder / name[:-1], path + name, "", above)
        elif not (name[0] == "." and TEMPORARY.fullmatch(name)):
            entry = _entry(f"{folder}/{name}", path + name)
            if entry is not None:
                yield entry


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _entry(path: str, name: str) -> Entry | None:
    """Return the entry of a regular file, or of a link that leads nowhere; None for others.

    Whoever reads the link learns that it is broken.
    """
    try:
        status = os.stat(path)  # noqa: PTH116 (a million times over)
    except OSError:
        # What is no link was deleted since the listing.
        return Entry(name=name, nbytes=0, stamp="broken link") if Path(path).is_symlink() else None
    if not stat.S_ISREG(status.st_mode):
        return None
    stamp, written_s = str(status.st_mtime_ns), status.st_mtime
    return Entry(name=name, nbytes=status.st_size, stamp=stamp, written_s=written_s)


def open_file(path: Path | str) -> tuple[int, int]:
    """Open a regular file to read it. Return its descriptor and its length."""
    fd = -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would block
        status = os.fstat(fd)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise _store_error(error, path) from error
    if stat.S_ISREG(status.st_mode):
        return fd, status.st_size
    os.close(fd)
    is_folder = stat.S_ISDIR(status.st_mode)
    raise _not_a_file(path, "is a folder" if is_folder else "is a device or a pipe")


def _name_once(temporary: Path, path: Path) -> None:
    """Give a temporary file its name, unless the name is taken.

    If the file system has no hard links, another process may take the name between the check and
    the renaming.
    """
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, "exists") from None
        temporary.replace(path)
    else:
        temporary.unlink()


def _create_temporary(folder: Path) -> tuple[Path, int]:
    while True:
        path = folder / f".wdsprep-{HOST}.{secrets.token_hex(8)}.tmp"
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks: sweep leaves it alone
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)  # a sweep came between creation and lock


def _wait_for_lock(path: Path, root: Path) -> int:
    """Wait until this process has locked the file at a path, and return its descriptor."""
    wait, began = Wait(str(path), HOLD_WAIT_S), time.monotonic()
    while True:
        try:
            fd, is_ours = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666), True
        except PermissionError:  # a file of another user can be locked too
            fd, is_ours = os.open(path, os.O_RDONLY | os.O_CLOEXEC), False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        except BlockingIOError:
            is_locked = False
        except OSError as error:
            is_locked = error.errno in NOT_THERE
            if not is_locked:
                os.close(fd)
                raise
        there = os.fstat(fd)
        if is_locked and there.st_nlink and not there.st_size and is_ours:
            return fd
        if is_locked:  # its owner died: a new lock says nothing of him
            _unlink_same(path, fd)
        elif time.monotonic() - began > PATIENCE_S:
            _take_files_away(fd, path, root)
        os.close(fd)
        if not is_locked:
            wait.pause()


def _take_files_away(fd: int, path: Path, root: Path) -> None:
    """Delete the files that a process was to give names, the last one first.

    After that it can give no name to any of them.
    """
    *files, rest = os.fsdecode(os.pread(fd, os.fstat(fd).st_size, 0)).split("\0")
    parts = [file.split("/") for file in files]
    are_temporary = all(TEMPORARY.fullmatch(names[-1]) and ".." not in names for names in parts)
    if not files or rest or not are_temporary:
        return
    for file in reversed(files):
        (root / file).unlink(missing_ok=True)
    _unlink_same(path, fd)


def _unlink_same(path: Path, fd: int) -> None:
    """Remove the name of an open file, if the name is still its own."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(fd), path.stat()):
            path.unlink()


def remove_if_dead(path: Path, *, host: str = HOST) -> bool:
    """Remove a file on which its writer has a lock as long as it lives, if that writer is dead.

    Return whether it is removed. The file of another host is removed only if it is old.
    """
    with contextlib.suppress(OSError):
        if host != HOST and _age_s(path) < FOREIGN_LEFTOVER_S:
            return False
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:  # or the name is another's by now
                path.unlink()
            return True
        finally:
            os.close(fd)
    return False


def allow_files(wanted: int) -> int:
    """Raise the limit on open files to `wanted` if allowed, and return how many may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, most), hard))
    return min(wanted, most)


def _age_s(path: Path) -> float:
    """Return the age of a file by the clock of the file system.

    Every machine sees this clock. The machines' own clocks may be days apart.
    """
    probe, fd = _create_temporary(path.parent)
    try:
        return os.fstat(fd).st_mtime - path.stat().st_mtime
    finally:
        probe.unlink()
        os.close(fd)


def _make_folder(folder: Path) -> None:
    """Make a folder and the missing ones above it, and sync each to disk."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
    except (FileExistsError, FileNotFoundError) as error:  # of the latter kind is one under /proc
        raise StoreError(
            f"{folder} is not a folder, and none can be made there: choose another place"
        ) from error
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _store_errors(path: Path | str) -> Iterator[None]:
    """Turn errors of the system into StoreErrors that say what a user can do."""
    try:
        yield
    except OSError as error:
        raise _store_error(error, path) from error


def _store_error(error: OSError, path: Path | str) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FullError(f"{path}: the disk is full: free some space and run the same again")
    if error.errno in (errno.EACCES, errno.EPERM):
        return AccessError(f"{path}: permission denied: change its mode, or choose another place")
    if error.errno == errno.EROFS:
        return AccessError(f"{path}: the file system is read-only: choose another place")
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return NotFoundError(f"{path}: no such file")
    if error.errno == errno.EEXIST:
        return ExistsError(f"{path}: exists already")
    if error.errno == errno.EISDIR:
        return _not_a_file(path, "is a folder")
    if error.errno == errno.ENXIO:  # a socket, which cannot even be opened
        return _not_a_file(path, "is a device or a pipe")
    if error.errno == errno.ELOOP:
        return _not_a_file(path, "is a link in a circle")
    return StoreError(f"{path}: {error.strerror or error}")


def _not_a_file(path: Path | str, what: str) -> NotAFileError:
    return NotAFileError(f"{path}: {what}, not a file").with_next_step(MOVE_IT)
