"""A local file without a name, for bytes that wait on disk: a killed process leaves none behind.

Many systems keep /tmp in memory. Bytes that wait because memory has no room for them go there only
if TMPDIR says so, or if there is no other place.
"""

import errno
import logging
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import IO

from wdsprep.errors import FullError

Place = tuple[int, int]
"""Where some bytes begin in a file, and how many they are."""
ASKED_BY = ("TMPDIR", "TEMP", "TMP")
MOUNTS = Path("/proc/self/mountinfo")
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
ON_DISK = ("/var/tmp", "~/.cache", ".")  # noqa: S108  files there have no names
"""The folders for what waits if /tmp lies in memory; the first that does not is taken."""

_log = logging.getLogger("wdsprep")


def spool_folder() -> str:
    """Return the folder in which bytes wait: that of TMPDIR, or else one on a disk.

    If there is no disk, a warning is logged once.
    """
    usual = tempfile.gettempdir()
    if any(map(os.environ.get, ASKED_BY)) or not is_in_memory(usual):
        return usual
    for folder in map(os.path.expanduser, ON_DISK):
        if os.access(folder, os.W_OK) and not is_in_memory(folder):
            return folder
    _warn_of_memory(usual)
    return usual


def is_in_memory(folder: str) -> bool:
    """Return whether a folder lies in a file system in memory, as far as the system tells."""
    device = Path(folder).stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.split() for line in MOUNTS.read_text(errors="replace").splitlines()]
    except OSError:
        return False
    return any(number == mount[2] and mount[mount.index("-") + 1] in IN_MEMORY for mount in mounts)


@cache
def _warn_of_memory(folder: str) -> None:
    _log.warning("what waits on disk waits in memory, where %s lies: set TMPDIR to a disk", folder)


class Spool:
    """A temporary file for bytes that wait. It is emptied when none wait any more."""

    def __init__(self, why: str = "what arrives early waits there") -> None:
        """Prepare a file. If the disk is full, the error says `why` bytes wait."""
        self._why = why
        self._file: IO[bytes] | None = None
        self._folder = ""
        self._waiting = 0
        self.nbytes = 0

    def put(self, data: "bytes | memoryview") -> Place:
        if self._file is None:
            self._folder = spool_folder()
            self._file = tempfile.TemporaryFile(  # noqa: SIM115
                prefix="wdsprep-", buffering=0, dir=self._folder
            )
        left = memoryview(data).cast("B")
        place = (self.nbytes, len(left))
        try:
            self._file.seek(self.nbytes)
            while left:  # a file without a buffer may take less than all
                left = left[self._file.write(left) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise FullError(
                f"{self._folder} is full: {self._why}: make room, or set TMPDIR to another folder"
            ) from error
        self.nbytes += place[1]
        self._waiting += 1
        return place

    def get(self, place: Place) -> bytes:
        assert self._file is not None  # noqa: S101  for mypy: who has a place has put
        self._file.seek(place[0])
        return self._file.read(place[1])

    def drop(self) -> None:
        """Count the bytes of one `put` as no longer needed.

        The file is emptied once that holds for all.
        """
        self._waiting -= 1
        if not self._waiting and self._file is not None:
            self._file.truncate(0)
            self.nbytes = 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
