"""The images of one slice of a table of URLs: many on their way at once, given out in order.

1. Rows are asked for ahead of the one that is due, so that a server that takes its time holds up
   nobody behind it. How far ahead depends on who is slower: while the next row is there already,
   only as much as its reader will soon take; while it is waited for, as much as the bounds allow.
2. What arrives early stays in memory up to a bound, and beyond it in a temporary file that has no
   name, which a killed worker cannot leave behind.
3. A URL that several rows of the slice have is asked for once.
4. The slices of one worker take turns: while one has rows to ask for, the others only take what
   they have asked for before. So slices are finished one after the other, each one's last answers
   are waited for beside the next one's first, and memory is that of one. What may take long before
   the first row, as reading through a large table does, is done before the turn.
5. Where no answer at all comes from many sites in a row, the network itself may be down, which is
   no fault of the rows. If it is, the run ends in an error, and nothing of the slice has happened.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from wdsprep.dataset.rejects import Reject
from wdsprep.dataset.samples import Sample
from wdsprep.fetch.limits import USUAL_NBYTES
from wdsprep.fetch.options import Fetched
from wdsprep.fetch.outage import OutageCheck, Witnesses
from wdsprep.store.spool import Spool

if TYPE_CHECKING:
    from wdsprep.fetch.client import Fetcher

WAIT_S = 0.25
ROWS_AHEAD = 4_096
ASKED_AHEAD = 1_024
FIRST_ASKED, MORE_A_SECOND = 16, 64
HELD_NBYTES = 16 << 20
COMING_NBYTES = 128 << 20  # of what is asked for, by the mean of what came
SPOOLED_NBYTES = 1 << 30


T = TypeVar("T")
NumberedRow = tuple[int, Sample | Reject]
"""A row of a table with its number in the slice."""


@dataclass(slots=True)
class DownloadTurns:
    """The state that slices of a worker share: a lock to ask in turn, the mean size of images.

    Only a few URLs are asked for at first, because the size of the images decides how many may be
    under way at a time. The number grows with the answers, and with time if answers take long.
    """

    turn: threading.Lock = field(default_factory=threading.Lock)
    witnesses: Witnesses = field(default_factory=Witnesses)
    heard: int = 0
    started: float = 0.0
    mean_nbytes: float = float(USUAL_NBYTES)
    _images: int = 0

    def most_asked(self) -> int:
        now = time.monotonic()
        self.started = self.started or now
        ramp = FIRST_ASKED + 2 * self.heard + MORE_A_SECOND * (now - self.started)
        return min(ASKED_AHEAD, int(ramp))

    def learn(self, nbytes: int) -> None:
        """Count an answer, and the size of its image if it has one."""
        self.heard += 1
        if nbytes:
            self._images += 1
            self.mean_nbytes += (nbytes - self.mean_nbytes) / min(16, self._images)


@dataclass(slots=True, eq=False)
class _Download:
    """The download of one URL, for which one or more of the rows ahead wait."""

    url: str
    future: "Future[Fetched] | None"
    fetched: Fetched | None = None  # once it was heard of; without its data where that is spooled
    place: tuple[int, int] | None = None


class Downloads:
    """The downloads of one slice.

    `repeated` returns the number of rows of each URL that the slice has more than once; it is
    called in a thread. `minds_outage` tells whether to check if the network is down. It is False
    for a slice that only retries failures, to which an outage does no harm.
    """

    def __init__(
        self,
        fetcher: "Fetcher",
        repeated: Callable[[], Counter[str]],
        *,
        pace: DownloadTurns,
        minds_outage: bool,
    ) -> None:
        self._fetcher, self._count_repeated, self._pace = fetcher, repeated, pace
        self._repeated: Counter[str] = Counter()
        self._has_turn = False
        self._ahead: deque[tuple[NumberedRow, tuple[_Download, ...]]] = deque()
        self._arrived: SimpleQueue[_Download] = SimpleQueue()
        self._by_url: dict[str, _Download] = {}
        self._asked = self._held = 0
        self._spool = Spool()
        self._outage = OutageCheck(fetcher.submit, pace.witnesses) if minds_outage else None
        self.failed_hosts: Counter[str] = Counter()
        """Failures by host and code: `example.org (dns)`."""

    def __enter__(self) -> "Downloads":
        return self

    def __exit__(self, *_: object) -> None:
        for download in chain(*(downloads for _, downloads in self._ahead)):
            if download.future is not None:
                download.future.cancel()
        self._end_turn()
        self._spool.close()

    def take(self, rows: Iterable[NumberedRow]) -> Iterator[NumberedRow | None]:
        """Yield the rows in their order, each with its images or with the reason why it lacks one.

        Yield None if nothing has happened for a while. Raise WorkError if the network is down.
        """
        coming = iter(rows)
        self._repeated, first = yield from _in_thread(
            lambda: (self._count_repeated(), list(islice(coming, 1)))
        )
        coming = chain(first, coming)
        while not self._pace.turn.acquire(timeout=WAIT_S):
            yield None
        self._has_turn = True
        while True:
            self._hear()
            self._ask(coming)
            if not self._ahead:
                break
            (number, row), downloads = self._ahead[0]
            if isinstance(row, Reject):
                self._ahead.popleft()
                yield number, row
            elif all(download.fetched for download in downloads):
                self._ahead.popleft()
                yield number, self._result(row, downloads)
                yield from self._mind_outage()
            elif not self._hear(WAIT_S):
                yield None
        yield from self._mind_outage(at_end=True)

    def _mind_outage(self, *, at_end: bool = False) -> Iterator[None]:
        """Find out whether the network is down, if it seems so, and raise WorkError if it is.

        Yield None from time to time until that is known.
        """
        if self._outage is not None and self._outage.is_suspected(at_end=at_end):
            yield from _in_thread(self._outage.confirm)

    def _ask(self, coming: Iterator[NumberedRow]) -> None:
        while self._wants_more():
            numbered = next(coming, None)
            if numbered is None:
                self._end_turn()
                return
            images = numbered[1].all_images if isinstance(numbered[1], Sample) else ()
            downloads = tuple(self._download(image.url) for image in images)
            self._ahead.append((numbered, downloads))

    def _end_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._pace.turn.release()

    def _wants_more(self) -> bool:
        if not self._has_turn:
            return False
        if len(self._ahead) >= ROWS_AHEAD or self._asked >= self._pace.most_asked():
            return False
        if not self._ahead:
            return True
        coming = self._asked * self._pace.mean_nbytes
        if not all(download.fetched for download in self._ahead[0][1]):
            return coming < COMING_NBYTES and self._spool.nbytes + coming < SPOOLED_NBYTES
        return self._held + self._spool.nbytes + coming < HELD_NBYTES

    def _download(self, url: str) -> _Download:
        download = self._by_url.get(url)
        if download is None:
            future = self._fetcher.submit(url)
            download = _Download(url, future)
            self._asked += 1
            if url in self._repeated:
                self._by_url[url] = download
            future.add_done_callback(lambda _: self._arrived.put(download))
        return download

    def _hear(self, timeout_s: float = 0.0) -> bool:
        """Take note of the answers that have arrived. Return whether there were any.

        If there are none, wait for one for up to `timeout_s`.
        """
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
        self._pace.learn(nbytes)
        if nbytes and self._held + nbytes > HELD_NBYTES and download not in self._ahead[0][1]:
            download.place = self._spool.put(fetched.data)
            fetched = replace(fetched, data=b"")
        else:
            self._held += nbytes
        download.fetched = fetched

    def _result(self, row: Sample, downloads: Sequence[_Download]) -> Sample | Reject:
        """Return a row with its images, or a reject that names the first that could not be had."""
        fetched = [self._take(download) for download in downloads]
        for (name, _, url), answer in zip(row.all_images, fetched, strict=True):
            if answer.code is not None:
                detail = f"{name}: {answer.detail or answer.code}" if name else answer.detail
                return Reject(source=row.source, code=answer.code, detail=detail, url=url)
        image, *others = (answer.data for answer in fetched)
        images = [image._replace(data=data) for image, data in zip(row.images, others, strict=True)]
        return replace(row, image=image, images=tuple(images))

    def _take(self, download: _Download) -> Fetched:
        """Return what was fetched, with its data, for a row that is due.

        The data is dropped unless further rows need it.
        """
        fetched, url = download.fetched, download.url
        assert fetched is not None  # noqa: S101  for mypy: the row is due
        data = self._spool.get(download.place) if download.place else fetched.data
        if url in self._by_url:
            self._repeated[url] -= 1
            if self._repeated[url] <= 0:
                del self._by_url[url]
        if url not in self._by_url:
            if download.place:
                self._spool.drop()
            self._held -= len(fetched.data)
        if self._outage is not None:
            self._outage.note(url, fetched.code)
        if fetched.code is not None:
            self.failed_hosts[f"{fetched.host or '(no host)'} ({fetched.code})"] += 1
        return replace(fetched, data=data)


def _in_thread(act: Callable[[], T]) -> Generator[None, None, T]:
    """Run a slow function in a thread, and return its result.

    Yield None from time to time until then, so that the caller can report that it is alive.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # noqa: BLE001  raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    while wait([future], WAIT_S).not_done:
        yield None
    return future.result()
