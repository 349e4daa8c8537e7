"""One file behind an http:// or https:// URL, read only, as a dataset hub serves its tables.

It is asked for by ranges of bytes, so that a table of any size is never fetched as a whole. The
address is the user's own argument, and may be on any network.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from wdsprep.errors import AccessError, NotFoundError, ShortReadError, StoreError, UsageError
from wdsprep.store.base import Entry
from wdsprep.store.remote import BEYOND, AnswerError, OverNetwork, Range, ReadOnly, is_busy
from wdsprep.store.schemes import WRITABLE_PLACE

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse


TIMEOUT_S = 30.0
FIRST_PAUSE_S = 0.05  # the attempts take 6 s: who mistypes a URL learns it soon
MOST_HOPS = 10


def is_transient(error: Exception) -> bool:
    from urllib3.exceptions import HTTPError

    is_of_body = isinstance(error, HTTPError | ShortReadError)
    return is_of_body or (isinstance(error, AnswerError) and is_busy(error.status))


def explain(error: Any, _what: str, url: str) -> StoreError | UsageError | None:
    from urllib3.exceptions import HTTPError

    if isinstance(error, HTTPError):
        return ShortReadError(f"{url} cannot be read: {getattr(error, 'reason', None) or error}")
    if not isinstance(error, AnswerError):
        return None
    said = f"(HTTP {error.status})"
    if error.status in (404, 410):
        return NotFoundError(f"{url} does not exist {said}: check the URL")
    if error.status in (401, 403):
        return AccessError(
            f"{url}: the server refuses it {said}: download the file and name it here"
        )
    return StoreError(f"{url} cannot be read {said}: run the same again later")


class WebStore(ReadOnly, OverNetwork):
    """A store that is a single file on a web server, named by the end of its URL's path.

    All reads are of the version that was listed last, or else read first.
    """

    is_transient = staticmethod(is_transient)
    explain = staticmethod(explain)

    def __init__(self, url: str, *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        from urllib3 import PoolManager, Retry

        super().__init__(url.partition("?")[0], "", first_pause_s)  # what follows may be a secret
        self._url = url
        self.name = unquote(urlsplit(url).path.rpartition("/")[2])
        self._lock = threading.Lock()
        self._version: Entry | None = None
        hops = Retry(None, connect=0, read=0, other=0, redirect=MOST_HOPS)
        self._pool = PoolManager(retries=hops, timeout=TIMEOUT_S, maxsize=4)

    @property
    def url(self) -> str:
        return self._url

    def list(self, prefix: str = "", /) -> Iterator[Entry]:
        """List the one file if its name begins with `prefix`.

        It is found by a request for its first byte: not every server with ranges answers HEAD.
        """
        if not self.name.startswith(prefix):
            return
        _, self._version = self._get(Range(nbytes=1))
        yield self._version

    def read(self, name: str, /, *, start: int = 0, nbytes: int | None = None) -> bytes:
        if name != self.name:
            raise NotFoundError(f"{self.place}: there is no {json.dumps(name)} beside it")
        data, version = self._get(Range(start=start, nbytes=nbytes))
        with self._lock:
            self._version = self._version or version
        if version != self._version:
            raise StoreError(
                f"{self.place}: the file has changed while it was read, or two servers disagree "
                "on it: run the same again"
            )
        return data[:nbytes]

    def write_error(self) -> UsageError:
        return UsageError(f"{self.place}: a web server is only read: give {WRITABLE_PLACE}")

    def _get(self, wanted: Range) -> tuple[bytes, Entry]:
        """Return the bytes of a range, and the version of the file that they are from."""
        headers = {"Range": wanted.header, "Accept-Encoding": "identity"}

        def ask() -> tuple[bytes, Entry]:
            answer = self._pool.request(
                "GET", self._url, headers=headers, preload_content=False, decode_content=False
            )
            with closing(answer):
                return self._read_answer(wanted, answer)

        with self.store_errors():
            return self.retrying(ask)

    def _read_answer(self, wanted: Range, answer: "BaseHTTPResponse") -> tuple[bytes, Entry]:
        """Return the bytes of an answer and the file's version, after checking status and range.

        There are no bytes if the file ends before the range. Raise AnswerError for a status without
        bytes.
        """
        said, known, data = answer.headers.get("Content-Range", ""), self._version, b""
        if answer.status == BEYOND:  # what this does not tell is taken from the version known
            total = wanted.check_beyond(said, self.place)
            if total is None and known is not None and known.nbytes <= wanted.start:
                total = known.nbytes
            stamp = known.stamp if known else ""
        else:
            if answer.status >= 400:
                raise AnswerError(answer.status)
            if answer.status != 206:
                raise self._no_ranges_error()
            nbytes, total = wanted.check_answer(said, self.place)
            if total is not None:
                data = answer.read(nbytes + 1)  # one more, to see the end
                if len(data) != nbytes:
                    raise ShortReadError(
                        f"{self.place} cannot be read: {len(data):,} bytes came of {nbytes:,}"
                    )
            stamp = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        if total is None:
            raise self._no_ranges_error()
        return data, Entry(name=self.name, nbytes=total, stamp=stamp.strip('"'))

    def _no_ranges_error(self) -> AccessError:
        return AccessError(
            f"{self.place}: the server does not serve ranges of bytes: download the file and "
            "give its path"
        )
