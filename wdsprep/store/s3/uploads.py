"""How a file goes up, in one PUT or in parts, and who still writes an unfinished upload.

S3 tells the key of an unfinished upload and when it was begun, and nothing of who writes it. So a
writer leaves a note on its own machine: an empty file, named by a digest of the upload, that it
holds a lock on for as long as it lives, however it ends. A note without its lock says that the
upload has lost its writer. A writer on another machine leaves none here, nor does one that ran
before this machine was started anew, as another user, or with another temporary folder (as that of
a container): of its upload nothing is known but its age.
"""

import contextlib
import fcntl
import hashlib
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from wdsprep.errors import StoreError, WdsprepError
from wdsprep.store.local import remove_if_dead
from wdsprep.store.object_locks import boot
from wdsprep.store.remote import PARTS_IN_FLIGHT, PartSink

PARTS_A_SIZE = 2_000  # then parts double, so that 10,000 parts hold any tar
KEPT_S = 2 * 86_400  # a note that nobody has asked for; uploads of that age need none
Note = tuple[Path, int]
"""A note of an upload that this process has begun: its path, and the open file that is locked."""
WRITER = "wdsprep-writer"  # object metadata: tells a writer whether what it finds is its own


class S3Sink(PartSink):
    """A file that is uploaded to S3. Full parts go out in the background, a few at a time."""

    def __init__(
        self, ask: Callable[..., Any], place: str, part_nbytes: int, condition: Mapping[str, str]
    ) -> None:
        super().__init__(place)
        self._ask, self._place, self._condition = ask, place, condition
        self._first_part_nbytes = part_nbytes
        self._note: Note | None = None
        self._facts = {
            "Metadata": {WRITER: self.writer},
            **({"ContentType": self.kind} if self.kind else {}),
        }
        self._upload: dict[str, str] = {}
        self._pool = ThreadPoolExecutor(PARTS_IN_FLIGHT)  # without a thread yet
        self._parts: list[Future[dict[str, Any]]] = []

    def part_nbytes(self) -> int:
        return self._first_part_nbytes << len(self._parts) // PARTS_A_SIZE

    def send_part(self) -> None:
        if not self._upload:
            answer = self._ask("create_multipart_upload", **self._facts)
            self._upload = {"UploadId": answer["UploadId"]}
            self._note = write_note(f"{self._place}/{answer['UploadId']}")
        if len(self._parts) >= PARTS_IN_FLIGHT:
            self._parts[-PARTS_IN_FLIGHT].result()
        number = len(self._parts) + 1
        self._parts.append(self._pool.submit(self._put_part, number, self.take_pending()))

    def _put_part(self, number: int, data: bytes) -> dict[str, Any]:
        answer = self._ask("upload_part", PartNumber=number, Body=data, **self._upload)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def finish(self) -> None:
        if not self._upload:
            self._ask("put_object", Body=self.take_pending(), **self._facts, **self._condition)
            return
        self.end()
        parts = [part.result() for part in self._parts]
        self._ask("complete_multipart_upload", MultipartUpload={"Parts": parts}, **self._upload)
        self._let_go(is_gone=True)

    def end(self, *, waits: bool = False) -> None:
        if self.pending and (waits or self._upload):
            self.send_part()
        for part in self._parts:
            part.result()
        self._pool.shutdown()

    def abort(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        is_gone = False
        if self._upload:
            with contextlib.suppress(WdsprepError):  # the first failure is the news
                abort_upload(self._ask, self._upload)
                is_gone = True
        self._let_go(is_gone=is_gone)

    def _let_go(self, *, is_gone: bool) -> None:
        """Release the lock of the note of the upload, and delete the note if that is gone."""
        note, self._note = self._note, None
        if note is not None:
            path, fd = note
            if is_gone:
                with contextlib.suppress(OSError):
                    path.unlink()
            os.close(fd)


def abort_upload(ask: Callable[..., Any], upload: dict[str, str]) -> None:
    try:
        ask("abort_multipart_upload", **upload)
    except StoreError as error:
        if error.status != 404:  # somebody else was quicker
            raise


def write_note(upload: str) -> Note | None:
    """Write a note of an upload, or return None if no note can be written.

    The note is locked before it has its name, so nobody finds it without its lock.
    """
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
        return path, fd
    return None


def has_living_writer(upload: str) -> bool | None:
    """Return whether the writer of an upload lives, by its note here; None if nobody can tell.

    That is so if there is no note here, or it cannot be read. A dead writer's note is deleted.
    """
    with contextlib.suppress(OSError):
        path = _folder() / _name(upload)
        return not remove_if_dead(path) if path.exists() else None
    return None


def remove_old_notes() -> None:
    """Remove the notes that are older than KEPT_S and whose lock is free.

    Notes are left of uploads that others have aborted, or in buckets that nobody sweeps from here.
    Errors of the system end this without a message.
    """
    with contextlib.suppress(OSError):
        for path in _folder().iterdir():
            if path.stat().st_mtime < time.time() - KEPT_S:
                remove_if_dead(path)


def _folder() -> Path:
    """Return the folder of notes, and make it if there is none.

    Raise PermissionError if others may write to it: they could have uploads aborted.
    """
    folder = Path(tempfile.gettempdir(), f"wdsprep-uploads-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(str(folder))
    return folder


def _name(upload: str) -> str:
    """Return the file name of the note of an upload, which differs for each boot of each machine.

    Machines may share the folder, but a lock on a note is seen only on the machine that took it.
    So machines must not find each other's notes.
    """
    return hashlib.sha256(f"{boot() or socket.gethostname()} {upload}".encode()).hexdigest()
