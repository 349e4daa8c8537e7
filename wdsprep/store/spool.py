"""A local file without a name, for bytes that wait on disk: a killed process leaves none behind."""

import errno
import tempfile
from typing import IO

from wdsprep.errors import FullError

Place = tuple[int, int]
"""Where some bytes begin in a file, and how many they are."""


class Spool:
    """A temporary file for bytes that wait. It is emptied when none wait any more."""

    def __init__(self, why: str = "what arrives early waits there") -> None:
        """Prepare a file. If the disk is full, the error says `why` bytes wait."""
        self._why = why
        self._file: IO[bytes] | None = None
        self._waiting = 0
        self.nbytes = 0

    def put(self, data: "bytes | memoryview") -> Place:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="wdsprep-", buffering=0)  # noqa: SIM115
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
                f"{tempfile.gettempdir()} is full: {self._why}: make room, or set TMPDIR to "
                "another folder"
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
