"""What stores over a network share: their failures, ranges of files, and uploads in parts.

Each library behind a store has errors of its own, of which the store knows what they mean
(`OverNetwork`). How often and how long one tries again is the same for all of them.

A `Range` of a file is what a server is asked for, and checks what it says that it serves. A proxy
that drops the request's range, or serves another one, answers with bytes that look as good as the
right ones. What came is taken only where the answer's head says that it is what was asked.

`PartSink` is a file that is uploaded in parts, to whatever store.
"""

import os
import random
import re
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

from wdsprep.errors import StoreError, UsageError
from wdsprep.store.base import CONTENT_TYPES, READERS, Ours, check_name, none_of_ours

ATTEMPTS = 8
FIRST_PAUSE_S = 0.4  # before the second attempt; eight attempts take about 40 s
LONGEST_PAUSE_S = 20.0
PART_NBYTES = 8 << 20  # GCS takes 10,000 parts: 80 GB
PARTS_IN_FLIGHT = 3
NOT_SUPPORTED = 501  # of a server that does not know what a header asks for
BEYOND = 416
T = TypeVar("T")


class AnswerError(Exception):
    """The error that a server has answered with a status, and no bytes."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status


def is_busy(status: int) -> bool:
    """Return whether a server that answered so may answer otherwise later."""
    return status in (408, 429) or (status >= 500 and status != NOT_SUPPORTED)


CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.IGNORECASE | re.ASCII)
MOST_SHOWN = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """A range of the bytes of a file, from `start` on; without `nbytes`, up to the end."""

    start: int = 0
    nbytes: int | None = None

    @property
    def header(self) -> str:
        if self.nbytes is None:
            return f"bytes={self.start}-"
        return f"bytes={self.start}-{self.start + max(self.nbytes, 1) - 1}"  # there is none of 0

    def covers_file(self, length: int) -> bool:
        """Return whether the range has the whole of a file of that length."""
        return self.start == 0 <= length and (self.nbytes is None or length <= self.nbytes)

    def check_answer(self, said: str, what: str) -> tuple[int, int | None]:
        """Return how many bytes an answer brings, and the length of the file if it is told.

        `said` is the Content-Range of the answer. Raise StoreError, which names the file `what`,
        if it is not this range: only the end of the file may cut it short.
        """
        match = CONTENT_RANGE.fullmatch(said.strip())
        if match is None:
            raise self.range_error(said, what)
        start, last = int(match[1]), int(match[2])
        total = None if match[3] == "*" else int(match[3])
        ends = [] if total is None else [total - 1]
        if self.nbytes is not None:
            ends.append(self.start + max(self.nbytes, 1) - 1)
        if start != self.start or last < start or not ends or last != min(ends):
            raise self.range_error(said, what)
        return last - start + 1, total

    def check_beyond(self, said: str, what: str) -> int | None:
        """Return the length of a file that ends before this range, by the answer that says so.

        `said` is the Content-Range of the answer. Return None if it does not tell the length.
        Raise StoreError, which names the file `what`, if the length is beyond the start of the
        range.
        """
        match = re.fullmatch(r"bytes \*/(\d{1,18})", said.strip(), re.IGNORECASE | re.ASCII)
        if match is None:
            return None
        if int(match[1]) > self.start:
            raise self.range_error(said, what)
        return int(match[1])

    def range_error(self, said: str, what: str) -> StoreError:
        gave = repr(said[:MOST_SHOWN]) if said else "no range"
        return StoreError(
            f"{what}: the server gave {gave} when asked for {self.header}, so it or a proxy before "
            "it does not keep to ranges: avoid the proxy, or copy the file"
        )


def length_of(said: str) -> int:
    """Parse a Content-Length. Return -1 if it is none."""
    return int(said) if re.fullmatch(r"\d{1,18}", said, re.ASCII) else -1


class PartSink(ABC):
    """A file that is sent in parts, each when it is full."""

    waiting = ""

    def __init__(self, name: str) -> None:
        self.writer = secrets.token_hex(8)
        """Tells this writer from others of the same file."""
        self.kind = CONTENT_TYPES.get(name.rpartition(".")[2].lower())
        self.pending: list[bytes] = []
        self._pending_nbytes = 0
        self.failure: BaseException | None = None
        """The error of a write, for a caller that goes on after it."""

    @abstractmethod
    def part_nbytes(self) -> int:
        """Return the size of the next part."""

    @abstractmethod
    def send_part(self) -> None:
        """Send the bytes that are pending as a part."""

    @abstractmethod
    def end(self, *, waits: bool = False) -> None:
        """Take no more bytes, as `FileSink.end` says."""

    @abstractmethod
    def finish(self) -> None:
        """Let the file appear under its name."""

    @abstractmethod
    def abort(self) -> None:
        """Give the file up. Raise nothing: the first failure is the news."""

    def writelines(self, pieces: Sequence[bytes | memoryview], /) -> None:
        for piece in pieces:
            self.write(piece)

    def write(self, data: bytes | memoryview, /) -> None:
        view = memoryview(data)
        try:
            while view:
                nbytes = self.part_nbytes()
                self.pending.append(bytes(view[: nbytes - self._pending_nbytes]))
                self._pending_nbytes += len(self.pending[-1])
                view = view[len(self.pending[-1]) :]
                if self._pending_nbytes == nbytes:
                    self.send_part()
        except BaseException as error:
            self.failure = error
            raise

    def take_pending(self) -> bytes:
        data = b"".join(self.pending)
        self.pending, self._pending_nbytes = [], 0
        return data


class PerProcess(Generic[T]):
    """A value that each process makes when it first asks for it, such as a client.

    A forked child must not use its parent's connections, nor wait for a lock that one of its
    threads had. Nothing of a parent is freed in a child.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._made = make, dict[int, T]()
        self._locks: dict[int, threading.RLock] = {}

    def get(self) -> T:
        process = os.getpid()
        if process not in self._made:  # many threads want the same value at the start
            with self._locks.setdefault(process, threading.RLock()):
                if process not in self._made:
                    self._made[process] = self._make()
        return self._made[process]

    def pop(self) -> T | None:
        """Return the value of this process, if it has made one, and forget it."""
        return self._made.pop(os.getpid(), None)


class OverNetwork(ABC):
    """A store below a folder of a place in the network, such as a bucket."""

    root: Path | None = None
    readers = READERS

    def __init__(self, place: str, folder: str, first_pause_s: float) -> None:
        folder = folder.strip("/")
        self.place, self.prefix = place, f"{folder}/" if folder else ""
        self.first_pause_s = first_pause_s

    @property
    def url(self) -> str:
        return f"{self.place}/{self.prefix}".rstrip("/")

    @abstractmethod
    def read(self, name: str, /, *, start: int = 0, nbytes: int | None = None) -> bytes: ...

    def read_into(self, name: str, buffer: memoryview, /, *, start: int) -> int:
        """Fill a buffer with the bytes of a file from `start` on, and return how many came.

        Fewer come only if the file ends before.
        """
        data = self.read(name, start=start, nbytes=len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def sweep(self, ours: Ours = none_of_ours) -> tuple[int, int]:
        """Remove nothing, in a store whose library does not tell of unfinished files."""
        del ours
        return 0, 0

    def key(self, name: str) -> str:
        return self.prefix + check_name(name)

    @staticmethod
    def is_transient(_error: Exception, /) -> bool:
        """Return whether another attempt may succeed after an error of the store's library."""
        return False

    @staticmethod
    def status_of(_error: BaseException, /) -> int:
        """Return the HTTP status of an error of the store's library, or 0."""
        return 0

    @staticmethod
    def explain(_error: Exception, _what: str, _place: str, /) -> StoreError | UsageError | None:
        """Return an error that says what a user can do, or None if it is none of the library's.

        It gets the URL of the file, and that of its bucket or repository.
        """
        return None

    def retrying(self, act: Callable[[], T]) -> T:
        """Return the result of `act`, which is called again after each error that is transient.

        There are at most ATTEMPTS calls, with pauses that grow. The error of the last one is
        raised, and so is any error that is not transient.
        """
        for attempt in range(ATTEMPTS - 1):
            try:
                return act()
            except Exception as error:
                if not self.is_transient(error):
                    raise
            pause = min(LONGEST_PAUSE_S, self.first_pause_s * 2**attempt)
            time.sleep(random.uniform(pause / 2, pause))  # noqa: S311 (jitter, not a secret)
        return act()

    @contextmanager
    def store_errors(self, name: str = "") -> Iterator[None]:
        """Explain the library's errors in the block, which are about a file or about all."""
        try:
            yield
        except (StoreError, UsageError):
            raise
        except Exception as error:
            what = f"{self.url}/{name}" if name else self.url
            explained = self.explain(error, what, self.place)
            if explained is None:
                raise
            if isinstance(explained, StoreError):
                explained.status = self.status_of(error)
            raise explained from None  # its own words may have a signed URL


class ReadOnly(ABC):
    """A store that refuses all that would change it."""

    @abstractmethod
    def write_error(self) -> UsageError:
        """Return the error for an attempt to change a file."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise self.write_error()

    write = delete = hold = let_go = _refuse
