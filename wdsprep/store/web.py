"""One file behind an http:// or https:// URL, read only, as a dataset hub serves its tables.

It is asked for by ranges of bytes, so that a table of any size is never fetched as a whole. The
address is the user's own argument, and may be on any network.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from wdsprep.errors import AccessError, NotFoundError, ShortReadError, StoreError, UsageError
from wdsprep.store.base import READERS, Entry
from wdsprep.store.remote import Range, ReadOnly
from wdsprep.store.schemes import WRITABLE_PLACE

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse


TIMEOUT_S = 30.0
ATTEMPTS = 6
FIRST_PAUSE_S = 0.2
BUSY = (429, 500, 502, 503, 504)
BEYOND = 416


class WebStore(ReadOnly):
    """A store that is a single file on a web server, named by the end of its URL's path.

    All reads are of the version that was listed last, or else read first.
    """

    root = None
    readers = READERS

    def __init__(self, url: str, *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        from urllib3 import PoolManager, Retry

        self.url, self._first_pause_s = url, first_pause_s
        self.name = unquote(urlsplit(url).path.rpartition("/")[2])
        self._shown = url.partition("?")[0]  # what follows may be a secret
        self._lock = threading.Lock()
        self._version: Entry | None = None
        retry = Retry(
            ATTEMPTS - 1,
            backoff_factor=first_pause_s,
            status_forcelist=BUSY,  # or where an answer breaks off
            raise_on_status=False,
        )
        self._pool = PoolManager(retries=retry, timeout=TIMEOUT_S, maxsize=4)

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
            raise NotFoundError(f"{self._shown}: there is no {json.dumps(name)} beside it")
        data, version = self._get(Range(start=start, nbytes=nbytes))
        with self._lock:
            self._version = self._version or version
        if version != self._version:
            raise StoreError(
                f"{self._shown}: the file has changed while it was read, or two servers disagree "
                "on it: run the same again"
            )
        return data[:nbytes]

    def write_error(self) -> UsageError:
        return UsageError(f"{self._shown}: a web server is only read: give {WRITABLE_PLACE}")

    def _get(self, wanted: Range) -> tuple[bytes, Entry]:
        """Return the bytes of a range, and the version of the file that they are from.

        The range is requested again if an answer breaks off. Until an answer begins, urllib3
        tries again itself. Raise ShortReadError if no attempt succeeds.
        """
        from urllib3.exceptions import HTTPError, MaxRetryError

        for pause_s in (*(self._first_pause_s * 2**n for n in range(ATTEMPTS - 1)), 0):
            try:
                headers = {"Range": wanted.header, "Accept-Encoding": "identity"}
                answer = self._pool.request(
                    "GET", self.url, headers=headers, preload_content=False, decode_content=False
                )
                with closing(answer):
                    return self._read_answer(wanted, answer)
            except HTTPError as error:
                why = getattr(error, "reason", None) or error
                if isinstance(error, MaxRetryError):
                    break
            time.sleep(pause_s)
        # Without its cause, which words the whole URL.
        raise ShortReadError(f"{self._shown} cannot be read: {why}") from None

    def _read_answer(self, wanted: Range, answer: "BaseHTTPResponse") -> tuple[bytes, Entry]:
        """Return the bytes of an answer and the file's version, after checking status and range.

        There are no bytes if the file ends before the range.
        """
        from urllib3.exceptions import ProtocolError

        said, known, data = answer.headers.get("Content-Range", ""), self._version, b""
        if answer.status == BEYOND:  # what this does not tell is taken from the version known
            total = wanted.check_beyond(said, self._shown)
            if total is None and known is not None and known.nbytes <= wanted.start:
                total = known.nbytes
            stamp = known.stamp if known else ""
        else:
            if answer.status in (404, 410):
                why = f"does not exist (HTTP {answer.status}): check the URL"
                raise NotFoundError(f"{self._shown} {why}")
            if answer.status in (401, 403):
                raise AccessError(
                    f"{self._shown}: the server refuses it (HTTP {answer.status}): download the "
                    "file and name it here"
                )
            if answer.status >= 400:
                why = f"cannot be read (HTTP {answer.status}): run the same again later"
                raise StoreError(f"{self._shown} {why}")
            if answer.status != 206:
                raise self._no_ranges_error()
            nbytes, total = wanted.check_answer(said, self._shown)
            if total is not None:
                data = answer.read(nbytes + 1)  # one more, to see the end
                if len(data) != nbytes:
                    raise ProtocolError(f"{len(data):,} bytes came of {nbytes:,}")
            stamp = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        if total is None:
            raise self._no_ranges_error()
        return data, Entry(name=self.name, nbytes=total, stamp=stamp.strip('"'))

    def _no_ranges_error(self) -> AccessError:
        return AccessError(
            f"{self._shown}: the server does not serve ranges of bytes: download the file and "
            "give its path"
        )
