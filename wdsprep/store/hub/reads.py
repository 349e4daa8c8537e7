"""Ranges of files of one commit on the hub.

The hub answers a request for a large file with the address of a server that has it, which holds for
an hour. It is asked for once in a few minutes and not once for each range: a loader asks for
hundreds a second, and the hub allows a few thousand requests in five minutes.
"""

import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from wdsprep.errors import ShortReadError
from wdsprep.store.byte_range import Range, length_of
from wdsprep.store.hub.failures import AnswerError

TIMEOUT_S = 60.0
KEPT_S = 300.0  # an address is valid for an hour
MOST_KEPT = 100_000
MOVED = (301, 302, 303, 307, 308)
BEYOND = 416
MOST_HOPS = 5
WHOLE_NBYTES = 64 << 20  # what the hub keeps in git may come whole; it is 10 MB at most there


@dataclass(slots=True)
class HubReads:
    """The reads of one dataset on the hub.

    `headers` have the user's token, and go to the hub alone.
    """

    endpoint: str
    repository: str
    headers: dict[str, str]
    _there: dict[str, tuple[str, float]] = field(default_factory=dict)

    def get(self, commit: str, path: str, wanted: Range, what: str) -> bytes:
        """Return a range of a file, in one attempt. `what` names the file in messages.

        The address that the hub gave for the file is used for KEPT_S. If that address is refused,
        the hub is asked for another, but not if the server is busy or failing (429 or 5xx). Raise
        AnswerError if the last answer is an error.
        """
        key = f"{commit}/{path}"
        known, since = self._there.get(key, ("", 0.0))
        if known and time.monotonic() - since < KEPT_S:
            try:
                return self._get(key, known, wanted, what)
            except AnswerError as error:
                if error.status >= 500 or error.status == 429:
                    raise
            self._there.pop(key, None)
        name = f"datasets/{self.repository}/resolve/{commit}/{quote(path)}"
        return self._get(key, f"{self.endpoint}/{name}", wanted, what)

    def _get(self, key: str, url: str, wanted: Range, what: str) -> bytes:
        from huggingface_hub import get_session

        for _ in range(MOST_HOPS):
            headers = {"Range": wanted.header, "Accept-Encoding": "identity"}
            if _origin(url) == _origin(self.endpoint):
                headers |= self.headers
            ask = get_session().stream(
                "GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=False
            )
            with ask as answer:
                if answer.status_code not in MOVED:
                    return _read_answer(answer, wanted, what)
                url = urljoin(url, answer.headers["location"])
            if _origin(url) != _origin(self.endpoint):
                self._keep(key, url)
        raise ShortReadError(f"{what}: the hub redirects without end")

    def _keep(self, key: str, url: str) -> None:
        if len(self._there) >= MOST_KEPT:
            self._there.clear()
        self._there[key] = (url, time.monotonic())


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _read_answer(answer: Any, wanted: Range, what: str) -> bytes:
    """Return the bytes of an answer, after checking that they are the range asked for.

    There are none if the file ends before the range. Raise AnswerError for a status without
    bytes.
    """
    status, said = answer.status_code, answer.headers.get("content-range", "")
    if status == BEYOND and wanted.check_beyond(said, what) is not None:
        return b""
    if status == 200:
        return _cut_range(answer, wanted, what)
    if status != 206:
        raise AnswerError(status)
    nbytes, _ = wanted.check_answer(said, what)
    data: bytes = answer.read()
    if len(data) != nbytes:
        raise ShortReadError(f"{what}: {len(data):,} of {nbytes:,} bytes came")
    return data[: wanted.nbytes]


def _cut_range(answer: Any, wanted: Range, what: str) -> bytes:
    """Cut the range out of an answer that brings the whole file.

    Raise StoreError if the file has more than WHOLE_NBYTES and the range is not all of it.
    """
    length = length_of(answer.headers.get("content-length", ""))
    if length > WHOLE_NBYTES and not wanted.covers_file(length):
        raise wanted.range_error("", what)
    data: bytes = answer.read()
    if length not in (-1, len(data)):
        raise ShortReadError(f"{what}: {len(data):,} of {length:,} bytes came")
    stop = None if wanted.nbytes is None else wanted.start + wanted.nbytes
    return data[wanted.start : stop]
