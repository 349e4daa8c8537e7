"""Bytes that wait on disk, in a file that has no name, so that nothing can leave it behind."""

import errno
import tempfile
from typing import IO

from wdsprep.errors import FullError


class Spool:
    """The file shrinks when nothing waits in it."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._waiting = 0
        self.nbytes = 0

    def put(self, data: bytes) -> tuple[int, int]:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="wdsprep-", buffering=0)  # noqa: SIM115
        place = (self.nbytes, len(data))
        try:
            self._file.seek(self.nbytes)
            left = memoryview(data)
            while left:  # a file without a buffer may take less than all
                left = left[self._file.write(left) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise FullError(
                f"{tempfile.gettempdir()} is full: what arrives early waits there: make "
                "room, or set TMPDIR to another folder"
            ) from error
        self.nbytes += len(data)
        self._waiting += 1
        return place

    def get(self, place: tuple[int, int]) -> bytes:
        assert self._file is not None  # noqa: S101  for mypy: who has a place has put
        self._file.seek(place[0])
        return self._file.read(place[1])

    def drop(self) -> None:
        self._waiting -= 1
        if not self._waiting and self._file is not None:
            self._file.truncate(0)
            self.nbytes = 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
