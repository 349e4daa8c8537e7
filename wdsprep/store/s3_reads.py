"""Reads of S3 objects by signed URLs: signed once, read many times.

To build a request, sign it and parse its answer takes boto3 three times as long as to send it, and
a loader sends hundreds a second. A presigned URL holds for any range of its object, so one serves
all reads for some minutes. It goes over the client's own connections, so that proxies,
certificates and timeouts are boto3's, and failures are raised as boto3 raises them. An answer that
boto3 may know what to do with, such as another region or credentials that have ended, is left to
it: the same read is asked for once more as boto3 does it. Every read is, where the installed
botocore and urllib3 do not have what is taken from within them.
"""

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from io import BytesIO
from typing import Any, TypeVar

from wdsprep.errors import ShortReadError
from wdsprep.store.ranges import Range
from wdsprep.store.s3_errors import code_of
from wdsprep.store.s3_wire import Answer, Wire

VALID_S = 900
KEPT_S = 300  # then it is signed anew: boto3 renews credentials 600 s before they end
KEPT = 4096  # URLs
MOST_SAID = 1 << 16  # bytes of an error; a server that ignores ranges sends a whole tar
MOST_REFUSALS = 32  # in a row, where boto3 was let in: then the server takes no URLs
BROKE_OFF = "the server's answer broke off again and again: check the network"
T = TypeVar("T")
Take = Callable[[Any, int], T]
"""What is made of a body and its length."""
_log = logging.getLogger("wdsprep")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """A read always has a range: then the answer says what it is, however it is sent."""

    bucket: str
    key: str
    range: Range

    @property
    def what(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    def is_all(self, status: int, length: int) -> bool:
        """Whether an answer that knows no ranges brings this one all the same."""
        return status == 200 and self.range.is_first(length)

    def comes(self, status: int, said: str, length: int) -> int:
        """How many bytes an answer brings; an error where they are others than these."""
        if self.is_all(status, length):
            return length
        nbytes, _ = self.range.served(said, self.what)
        if length not in (-1, nbytes):
            raise EOFError  # something has cut it
        return nbytes


class _RefusedError(Exception):
    """The server does not take the URL; it may take a request that boto3 signs."""


class Reads:
    """GETs by one client, for any number of threads."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._wire = _wire_of(client)  # None where there can be none
        self._lock = threading.Lock()
        self._urls: dict[tuple[str, str], tuple[float, str]] = {}
        self._refusals = 0
        client.meta.events.register_first("choose-signer.s3.GetObject", _newest_signature)

    def get(self, ask: Ask) -> bytes:
        """What boto3's `get_object` brings; nothing where a range starts at the end or after."""
        return self._take(ask, _read)

    def get_into(self, ask: Ask, buffer: memoryview) -> int:
        """The same into memory that is there; how many bytes came."""
        return self._take(ask, partial(_read_into, buffer))

    def _take(self, ask: Ask, take: Take[T]) -> T:
        from botocore.exceptions import ClientError

        try:
            wire = self._wire
            if wire is None or self._refusals >= MOST_REFUSALS:
                return self._take_with_boto3(ask, take)
            try:
                return self._take_by_url(wire, ask, take)
            except _RefusedError as error:
                taken = self._take_with_boto3(ask, take)
                self._forget(ask, error)
                return taken
        except ClientError as error:
            if code_of(error) in ("InvalidRange", "416"):
                headers = error.response["ResponseMetadata"].get("HTTPHeaders", {})
                ask.range.check_beyond(headers.get("content-range", ""), ask.what)
                return take(BytesIO(), 0)
            raise

    def _take_by_url(self, wire: Wire, ask: Ask, take: Take[T]) -> T:
        url = self._url(ask.bucket, ask.key)
        try:
            answer = wire.get(url, {"Range": ask.range.header})
        except (AttributeError, ImportError, TypeError) as error:
            self._wire = None
            _warn_of_version(error)
            return self._take_with_boto3(ask, take)
        with contextlib.closing(answer), _broken_off(ask):
            if answer.status == 206 or ask.is_all(answer.status, answer.nbytes):
                taken = take(answer.body, ask.comes(answer.status, answer.range, answer.nbytes))
                _check_ended(answer)
                answer.keep()
                self._refusals = 0
                return taken
            most = min(answer.nbytes, MOST_SAID) if answer.nbytes >= 0 else MOST_SAID
            said = answer.body.read(most)
            if len(said) == answer.nbytes:
                answer.keep()
        raise _error(answer, said)

    def _take_with_boto3(self, ask: Ask, take: Take[T]) -> T:
        answer = self._client.get_object(Bucket=ask.bucket, Key=ask.key, Range=ask.range.header)
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        with contextlib.closing(answer["Body"]) as body, _broken_off(ask):
            said, length = answer.get("ContentRange", ""), answer.get("ContentLength", -1)
            return take(body, ask.comes(status, said, length))

    def _url(self, bucket: str, key: str) -> str:
        now = time.monotonic()
        signed, url = self._urls.get((bucket, key), (0.0, ""))
        if not url or now - signed > KEPT_S:
            what = {"Bucket": bucket, "Key": key}
            url = self._client.generate_presigned_url("get_object", Params=what, ExpiresIn=VALID_S)
            with self._lock:
                if len(self._urls) >= KEPT:
                    self._urls.clear()
                self._urls[bucket, key] = now, url
        return url

    def _forget(self, ask: Ask, error: _RefusedError) -> None:
        """Boto3 was let in where the URL was not: sign anew, or give URLs up."""
        with self._lock:
            self._urls.pop((ask.bucket, ask.key), None)
            self._refusals += 1
            if self._refusals == MOST_REFUSALS:
                _log.warning(
                    "s3://%s refuses signed URLs (%s): every read is signed by itself from now on, "
                    "which is slower",
                    ask.bucket,
                    error,
                )


def _wire_of(client: Any) -> Wire | None:
    try:
        return Wire(client._endpoint.http_session)
    except AttributeError as error:
        _warn_of_version(error)
        return None


def _warn_of_version(error: Exception) -> None:
    _log.warning("this boto3 or urllib3 is not one that wdsprep knows (%s): S3 is slower", error)


def _newest_signature(signature_version: str, **_: object) -> "str | None":
    """For URLs boto3 prefers an old signature, which newer regions do not take."""
    return "s3v4-query" if signature_version in ("v4-query", "s3v4-query") else None


def _read(body: Any, nbytes: int) -> bytes:
    data: bytes = body.read(nbytes)
    if len(data) != nbytes:
        raise EOFError
    return data


def _read_into(buffer: memoryview, body: Any, nbytes: int) -> int:
    if not 0 <= nbytes <= len(buffer) or (nbytes and body.readinto(buffer[:nbytes]) != nbytes):
        raise EOFError
    return nbytes


def _check_ended(answer: Answer) -> None:
    """An answer in chunks has one more that says it was the last."""
    if answer.nbytes < 0 and answer.body.read(1):
        raise EOFError


@contextlib.contextmanager
def _broken_off(ask: Ask) -> Iterator[None]:
    """Whatever ends a body before its end."""
    from botocore.exceptions import HTTPClientError, IncompleteReadError
    from urllib3.exceptions import HTTPError

    lost = (EOFError, HTTPError, HTTPException, HTTPClientError, IncompleteReadError, OSError)
    try:
        yield
    except lost as error:
        raise ShortReadError(f"{ask.what}: {BROKE_OFF}") from error


def _error(answer: Answer, body: bytes) -> Exception:
    """As boto3 raises it, unless there is something that boto3 might do."""
    from botocore.exceptions import ClientError

    status, found = answer.status, re.search(rb"<Code>(\w+)</Code>", body)
    code = found[1].decode() if found else str(status)
    if status < 500 and status not in (404, 416, 429):
        return _RefusedError(f"{status} {code}")
    headers = {"content-range": answer.range}
    said: Any = {
        "Error": {"Code": code},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers},
    }
    error: Exception = ClientError(said, "GetObject")
    return error
