"""The images of one slice of a table of URLs: many on their way at once, given out in order.

1. Rows are asked for ahead of the one that is due, so that a server that takes its time holds up
   nobody behind it. How far ahead depends on who is slower: while the next row is there already,
   only as much as its reader will soon take; while it is waited for, as much as the bounds allow.
2. What arrives early stays in memory up to a bound, and beyond it in a temporary file that has no
   name, which a killed worker cannot leave behind.
3. A URL that several rows of the slice have is asked for once.
4. The slices of one worker take turns: while one has rows to ask for, the others only take what
   they have asked for before. So slices are finished one after the other, each one's last answers
   are waited for beside the next one's first, and memory is that of one.
5. Where no answer at all comes from many sites in a row, the network itself is down, which is no
   fault of the rows: the run ends in an error, and nothing of the slice has happened.
"""

import errno
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import IO, Protocol

from wdsprep.errors import FullError
from wdsprep.fetch import Fetched
from wdsprep.outage import Outage
from wdsprep.samples import Sample
from wdsprep.sources import Refusal

WAIT_S = 0.25
ROWS_AHEAD = 4_096
ASKED_AHEAD = 1_024
HELD_NBYTES = 16 << 20
SPOOLED_NBYTES = 1 << 30
USUAL_NBYTES = 100_000  # of an image, until some have come


class Asks(Protocol):
    """What of a Fetcher is needed here."""

    def submit(self, url: str, /) -> "Future[Fetched]": ...


@dataclass(slots=True)
class _Download:
    """One URL; `rows` is how many of the rows ahead wait for it."""

    url: str
    future: "Future[Fetched] | None"
    rows: int = 0
    fetched: Fetched | None = None  # once it was heard of; without its data where that is spooled
    place: tuple[int, int] | None = None


class Downloads:
    """`repeated` counts the URLs that the slice has more than once. Where nothing but failures are
    asked for again, an outage cannot be told, and does no harm."""

    def __init__(
        self,
        fetcher: Asks,
        repeated: Callable[[], Counter[str]],
        *,
        turn: threading.Lock,
        minds_outage: bool,
    ) -> None:
        self._fetcher, self._count_repeated, self._turn = fetcher, repeated, turn
        self._repeated: Counter[str] = Counter()
        self._has_turn = False
        self._ahead: deque[tuple[int, Sample | Refusal, _Download | None]] = deque()
        self._arrived: SimpleQueue[_Download] = SimpleQueue()
        self._by_url: dict[str, _Download] = {}
        self._asked = self._held = 0
        self._mean_nbytes = float(USUAL_NBYTES)
        self._spool = Spool()
        self._outage = Outage() if minds_outage else None
        self.failed_hosts: Counter[str] = Counter()
        """Failures by host and code: `example.org (dns)`."""

    def __enter__(self) -> "Downloads":
        return self

    def __exit__(self, *_: object) -> None:
        for _number, _row, download in self._ahead:
            if download is not None and download.future is not None:
                download.future.cancel()
        self._end_turn()
        self._spool.close()

    def take(
        self, rows: Iterable[tuple[int, Sample | Refusal]]
    ) -> Iterator[tuple[int, Sample | Refusal] | None]:
        """The rows in their order, with their images or with why there are none. None comes where
        nothing has happened for a while."""
        while not self._begin_turn():
            yield None
        self._repeated = self._count_repeated()
        coming = iter(rows)
        while True:
            self._hear()
            self._ask(coming)
            if not self._ahead:
                break
            number, row, download = self._ahead[0]
            if download is None:
                self._ahead.popleft()
                yield number, row
            elif download.fetched is not None:
                self._ahead.popleft()
                yield number, self._result(row, download)
            elif not self._hear(WAIT_S):
                yield None
        if self._outage is not None:
            self._outage.check_at_end()

    def _ask(self, coming: Iterator[tuple[int, Sample | Refusal]]) -> None:
        while self._wants_more():
            found = next(coming, None)
            if found is None:
                self._end_turn()
                return
            number, row = found
            self._ahead.append((number, row, self._download(row)))

    def _begin_turn(self) -> bool:
        self._has_turn = self._turn.acquire(timeout=WAIT_S)
        return self._has_turn

    def _end_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._turn.release()

    def _wants_more(self) -> bool:
        if not self._has_turn:
            return False
        if len(self._ahead) >= ROWS_AHEAD or self._asked >= ASKED_AHEAD:
            return False
        if not self._ahead:
            return True
        due = self._ahead[0][2]
        if due is not None and due.fetched is None:
            return self._spool.nbytes < SPOOLED_NBYTES
        return self._held + self._spool.nbytes + self._asked * self._mean_nbytes < HELD_NBYTES

    def _download(self, row: Sample | Refusal) -> _Download | None:
        if isinstance(row, Refusal):
            return None
        download = self._by_url.get(row.url)
        if download is None:
            future = self._fetcher.submit(row.url)
            download = _Download(row.url, future)
            self._asked += 1
            if row.url in self._repeated:
                self._by_url[row.url] = download
            future.add_done_callback(partial(self._note_arrival, download))
        download.rows += 1
        return download

    def _note_arrival(self, download: _Download, _: "Future[Fetched]") -> None:
        self._arrived.put(download)

    def _hear(self, timeout_s: float = 0.0) -> bool:
        """Take note of what has arrived; whether anything has."""
        heard = False
        with suppress(Empty):
            while True:
                wait = timeout_s > 0 and not heard
                download = self._arrived.get(wait, timeout_s if wait else None)
                heard = True
                self._keep(download)
        return heard

    def _keep(self, download: _Download) -> None:
        assert download.future is not None  # noqa: S101  for mypy: it is heard of once
        self._asked -= 1
        fetched = download.future.result()
        download.future = None  # it holds the data too
        nbytes = len(fetched.data)
        if fetched.code is None:
            self._mean_nbytes += (nbytes - self._mean_nbytes) / 64
        if nbytes and self._held + nbytes > HELD_NBYTES and self._ahead[0][2] is not download:
            download.place = self._spool.put(fetched.data)
            fetched = replace(fetched, data=b"")
        else:
            self._held += nbytes
        download.fetched = fetched

    def _result(self, row: Sample | Refusal, download: _Download) -> Sample | Refusal:
        fetched = download.fetched
        assert isinstance(row, Sample)  # noqa: S101  for mypy: a refusal has no download
        assert fetched is not None  # noqa: S101
        data = self._spool.get(download.place) if download.place else fetched.data
        self._release(download, len(fetched.data))
        if self._outage is not None:
            self._outage.note(row.url, fetched.code)
        if fetched.code is None:
            return replace(row, image=data)
        self.failed_hosts[f"{fetched.host or '(no host)'} ({fetched.code})"] += 1
        return Refusal(source=row.source, code=fetched.code, detail=fetched.detail, url=row.url)

    def _release(self, download: _Download, nbytes: int) -> None:
        """Let go of the data where no row is left that wants it."""
        download.rows -= 1
        if download.url in self._by_url:
            self._repeated[download.url] -= 1
            if self._repeated[download.url] > 0:
                return
            del self._by_url[download.url]
        if download.place:
            self._spool.drop()
        self._held -= nbytes


class Spool:
    """Bytes that wait on disk. The file shrinks when it is empty, and has no name."""

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
            self._file.write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise FullError(
                f"{tempfile.gettempdir()} is full: downloads that arrive early wait there: make "
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
