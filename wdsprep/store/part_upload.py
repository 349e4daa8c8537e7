"""A file that is uploaded in parts, to whatever store."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence

from wdsprep.store.base import CONTENT_TYPES


class PartSink(ABC):
    """A file that is sent in parts, each when it is full."""

    def __init__(self, name: str) -> None:
        self.writer = secrets.token_hex(8)
        """Tells this writer from others of the same file."""
        self.kind = CONTENT_TYPES.get(name.rpartition(".")[2].lower())
        self.pending: list[bytes] = []
        self._pending_nbytes = 0
        self._failure: BaseException | None = None

    @property
    def waiting(self) -> str:
        return ""

    @abstractmethod
    def part_nbytes(self) -> int:
        """Return the size of the next part."""

    @abstractmethod
    def send_part(self) -> None:
        """Send the bytes that are pending as a part."""

    def writelines(self, pieces: Sequence[bytes | memoryview], /) -> None:
        for piece in pieces:
            self.write(piece)

    def write(self, data: bytes | memoryview, /) -> None:
        try:
            self._collect(memoryview(data))
        except BaseException as error:
            self._failure = error
            raise

    def _collect(self, view: memoryview) -> None:
        while view:
            nbytes = self.part_nbytes()
            self.pending.append(bytes(view[: nbytes - self._pending_nbytes]))
            self._pending_nbytes += len(self.pending[-1])
            view = view[len(self.pending[-1]) :]
            if self._pending_nbytes == nbytes:
                self.send_part()

    def take_pending(self) -> bytes:
        data = b"".join(self.pending)
        self.pending, self._pending_nbytes = [], 0
        return data

    def check(self) -> None:
        """Raise the error of an earlier write, for a caller that went on after it."""
        if self._failure is not None:
            raise self._failure
