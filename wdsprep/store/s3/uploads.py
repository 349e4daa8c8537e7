"""Who still writes an unfinished upload, as far as this machine knows.

S3 tells the key of an unfinished upload and when it was begun, and nothing of who writes it. So a
writer leaves a note on its own machine: an empty file, named by a digest of the upload, that it
holds a lock on for as long as it lives, however it ends. A note without its lock says that the
upload has lost its writer. A writer on another machine leaves none here, nor does one that ran
before this machine was started anew, as another user, or with another temporary folder (as that of
a container): of its upload nothing is known but its age.
"""

import contextlib
import enum
import fcntl
import hashlib
import os
import socket
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from wdsprep.store.holds import boot

KEPT_S = 2 * 86_400  # a note that nobody has asked for; uploads of that age need none


class Writer(enum.Enum):
    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Of an upload of this process."""

    path: Path
    fd: int

    def remove(self) -> None:
        """The upload is no more."""
        with contextlib.suppress(OSError):
            self.path.unlink()
        self.abandon()

    def abandon(self) -> None:
        """The upload is still there, and nobody goes on with it."""
        os.close(self.fd)


def write_note(upload: str) -> Note | None:
    """Nothing where there is no place for one. It has its lock before it has its name, so nobody
    finds it without."""
    with contextlib.suppress(OSError):
        folder = _folder()
        fd, temporary = tempfile.mkstemp(dir=folder)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path = Path(temporary).rename(folder / _name(upload))
        except OSError:
            os.close(fd)
            Path(temporary).unlink()
            raise
        return Note(path=path, fd=fd)
    return None


def writer_of(upload: str) -> Writer:
    """What the note says, which goes where the writer is dead."""
    try:
        return _read(_folder() / _name(upload))
    except OSError:
        return Writer.UNKNOWN


def remove_old_notes() -> None:
    """Those of uploads that others have aborted, or that are not in buckets swept from here."""
    with contextlib.suppress(OSError):
        for path in _folder().iterdir():
            if path.stat().st_mtime < time.time() - KEPT_S:
                _read(path)


def _read(path: Path) -> Writer:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except BlockingIOError:
        return Writer.ALIVE
    finally:
        os.close(fd)
    return Writer.DEAD


def _folder() -> Path:
    """Ours alone: what others could write there, they could have us abort."""
    folder = Path(tempfile.gettempdir(), f"wdsprep-uploads-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(str(folder))
    return folder


def _name(upload: str) -> str:
    """Of one boot of one machine: a lock is known where it was taken, though the folder may be
    shared."""
    return hashlib.sha256(f"{boot() or socket.gethostname()} {upload}".encode()).hexdigest()
