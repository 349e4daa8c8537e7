"""One file behind an http:// or https:// URL, read only, as a dataset hub serves its tables.

It is asked for by ranges of bytes, so that a table of any size is never fetched as a whole. The
address is the user's own argument, and may be on any network.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import unquote, urlsplit

from wdsprep.errors import AccessError, NotFoundError, ShortReadError, StoreError, UsageError
from wdsprep.store import Entry, FileSink

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager

TIMEOUT_S = 30.0
ATTEMPTS = 6
FIRST_PAUSE_S = 0.2
BUSY = (429, 500, 502, 503, 504)


class WebStore:
    """Implements `wdsprep.store.Store` for a single file, named by the end of its URL's path."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.name = unquote(urlsplit(url).path.rpartition("/")[2])
        self._shown = url.partition("?")[0]  # what follows may be a secret
        self._lock = threading.Lock()
        self._pool: PoolManager | None = None

    @property
    def url(self) -> str:
        return self._url

    def list(self, prefix: str = "", /) -> Iterator[Entry]:
        """By its first byte: not every server that has ranges answers HEAD."""
        if not self.name.startswith(prefix):
            return
        answer = self._get("bytes=0-0")
        total = re.fullmatch(r"bytes (?:0-0|\*)/(\d+)", answer.headers.get("Content-Range", ""))
        if answer.status not in (206, 416) or total is None:
            raise AccessError(
                f"{self._shown}: the server does not serve ranges of bytes: download the file and "
                "name it here"
            )
        stamp = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        yield Entry(name=self.name, nbytes=int(total[1]), stamp=stamp.strip('"'))

    def read(self, name: str, /, *, start: int = 0, nbytes: int | None = None) -> bytes:
        if name != self.name:
            raise NotFoundError(f"{self._shown}: there is no {json.dumps(name)} beside it")
        end = "" if nbytes is None else start + max(nbytes, 1) - 1
        answer = self._get(f"bytes={start}-{end}")
        if answer.status == 416:  # starts at the end or after
            return b""
        if answer.status != 206:
            raise AccessError(f"{self._shown}: the server did not keep to the range asked for")
        return answer.data[:nbytes]

    def write(self, name: str, /, *, exclusive: bool = False) -> AbstractContextManager[FileSink]:
        del exclusive
        self._refuse(name)

    def delete(self, name: str, /) -> None:
        self._refuse(name)

    def sweep(self) -> int:
        return 0

    def hold(self, name: str, /) -> AbstractContextManager[None]:
        self._refuse(name)

    def let_go(self, name: str, /) -> None:
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise UsageError(
            f"{self._shown}: {name} cannot be written to a web server: give a local path or s3://"
        )

    def _get(self, ranged: str) -> "BaseHTTPResponse":
        from urllib3.exceptions import HTTPError

        try:
            answer = self._open().request("GET", self._url, headers={"Range": ranged})
        except HTTPError as error:
            reason = getattr(error, "reason", None) or error
            raise ShortReadError(f"{self._shown} cannot be read: {reason}") from error
        if answer.status in (404, 410):
            raise NotFoundError(f"{self._shown} is not there (HTTP {answer.status})")
        if answer.status in (401, 403):
            raise AccessError(f"{self._shown}: the server refuses it (HTTP {answer.status})")
        if answer.status >= 400 and answer.status != 416:
            raise StoreError(f"{self._shown} cannot be read: HTTP {answer.status}")
        return answer

    def _open(self) -> "PoolManager":
        """Connections that stay open; another attempt where the server is busy or breaks off."""
        from urllib3 import PoolManager, Retry

        with self._lock:
            if self._pool is None:
                retry = Retry(
                    ATTEMPTS - 1,
                    backoff_factor=FIRST_PAUSE_S,
                    status_forcelist=BUSY,
                    raise_on_status=False,
                )
                self._pool = PoolManager(retries=retry, timeout=TIMEOUT_S, maxsize=4)
            return self._pool
