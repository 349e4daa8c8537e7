"""Reads of S3 objects by signed URLs: signed once, read many times.

To build a request, sign it and parse its answer takes boto3 three times as long as to send it, and
a loader sends hundreds a second. A presigned URL holds for any range of its object, so one serves
all reads for some minutes. It goes over the client's own connections, so that proxies,
certificates and timeouts are boto3's, and failures are raised as boto3 raises them. An answer that
boto3 may know what to do with, such as another region or credentials that have ended, is left to
it: the same read is asked for once more as boto3 does it. Every read is, where the installed
botocore and urllib3 do not have what is taken from within them.

GETs go over connections that are open already. boto3's session opens connections, with its
proxies, certificates and timeouts, and urllib3 keeps them. Through both a request costs a
millisecond of the processor, nearly all of it to look at the same URL and the same kind of headers
anew. On a connection that is open, a GET is a few lines out and a few lines in. Whatever is not as
simple as that goes through boto3's session: the first request of a connection, one by a proxy, one
whose connection the server has closed meanwhile, and one whose answer does not say how long it is.

What it beats, by the processor's time of the client, in turns on a Ceph gateway with one thread and
with eight: a range of 170 kB takes 0.65 and 0.47 ms. By urllib3 alone on the same signed URL it
takes 1.8 times as long, by the parser of http.client on the same connections 1.4, by boto3's
session about 2, and by boto3 4.9. Ranges of 2.7 MB take 1.3 ms, and 1.3, 1.0, 1.7 and 2.4 times
that. It goes when plain urllib3 comes within 1.2.

Nor is obstore 0.12, which reads GCS and Azure here, faster. For a range of 170 kB into a buffer it
takes 1.3 times our processor time with one thread and 1.6 with eight, for one of 2.7 MB 1.8 and 2.2
times: it puts a range together from pieces, and from there it is copied once more. It was 0.9 to
1.4 times as long about it, and neither failed behind a proxy that breaks every tenth answer. A
process takes 20 MB less with it, and a forked child its first 64 ranges in 0.75 of our time, where
boto3 makes a client. It lists in a quarter of our time (`listing`). But it reads no profiles of
AWS's files, so for listings alone users would set up two libraries. `tools/bench s3` measures all
that: look again when obstore reads into a buffer.

urllib3 has no public names for this. They are all taken here, within `Wire.get`, so that an
AttributeError of it means that an installed version is another than those known.
"""

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from io import BytesIO
from typing import Any, NamedTuple, TypeVar

from wdsprep.errors import ShortReadError
from wdsprep.store.remote import BEYOND, Range, length_of
from wdsprep.store.s3.failures import code_of, status_of

LONGEST_LINE = 1 << 16
MOST_LINES = 200
HEADERS = "Accept-Encoding: identity\r\n"
PLAIN = frozenset(("content-length", "content-range"))  # what may be said once


class S3Answer(NamedTuple):
    """The head of an answer of a server.

    `nbytes` is the length of its body, -1 where that is unknown; `range` is its Content-Range.
    """

    status: int
    nbytes: int
    range: str
    body: Any
    keep: Callable[[], None]
    """Lets others use the connection, once the body has been read to its end."""
    close: Callable[[], None]
    """Lets go of the answer, and of the connection unless that is kept."""


@dataclass(frozen=True, slots=True)
class Wire:
    """A sender of GET requests over the connections of a session of botocore, for any thread."""

    session: Any
    _pools: dict[str, Any] = field(default_factory=dict)
    """The connections of urllib3, by server."""

    def get(self, url: str, headers: Mapping[str, str]) -> S3Answer:
        from botocore.exceptions import ReadTimeoutError

        slash = url.index("/", url.index("://") + 3)
        origin, path = url[:slash], url[slash:]
        pool = self._pools.get(origin)
        connection = None if pool is None else _idle_connection(pool)
        if connection is not None:
            try:
                return _send(pool, connection, f"GET {path} HTTP/1.1", _host(origin), headers)
            except TimeoutError as error:
                connection.close()
                raise ReadTimeoutError(endpoint_url=origin, error=error) from error
            except (OSError, EOFError):
                connection.close()
            except ValueError:  # nor will the next one be simple, until one was
                connection.close()
                self._pools.pop(origin, None)
        return self._by_session(url, origin, headers)

    def _by_session(self, url: str, origin: str, headers: Mapping[str, str]) -> S3Answer:
        from botocore.awsrequest import AWSPreparedRequest, HeadersDict

        request = AWSPreparedRequest("GET", url, HeadersDict(headers), None, True)
        answer = self.session.send(request)
        raw, nbytes = answer.raw, length_of(answer.headers.get("Content-Length", ""))
        pool = raw._pool
        if nbytes >= 0 and pool is not None and pool.proxy is None:
            self._pools[origin] = pool
        said = answer.headers.get("Content-Range", "")
        # urllib3's own reading of `_fp` copies every byte once more.
        return S3Answer(answer.status_code, nbytes, said, raw._fp, raw.release_conn, raw.close)


def _host(origin: str) -> str:
    """Return the host of a URL as it is signed and sent: without a default port."""
    scheme, _, host = origin.lower().partition("://")
    return host.rpartition("@")[2].removesuffix({"http": ":80", "https": ":443"}.get(scheme, ""))


def _idle_connection(pool: Any) -> Any:
    """Return an open connection that nobody uses, or None if there is none."""
    from urllib3.exceptions import ClosedPoolError

    try:
        connection = pool._get_conn()  # which closes those that the server has closed
    except ClosedPoolError:  # the session has dropped it, and makes another
        return None
    if not connection.is_closed:
        return connection
    pool._put_conn(connection)
    return None


def _send(pool: Any, connection: Any, line: str, host: str, headers: Mapping[str, str]) -> S3Answer:
    """Send a request over an open connection, and read the head of its answer."""
    more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    connection.sock.sendall(f"{line}\r\nHost: {host}\r\n{HEADERS}{more}\r\n".encode("ascii"))
    body, put = connection.sock.makefile("rb"), pool._put_conn
    try:
        status, said = _head(body)
    except BaseException:
        body.close()
        raise
    left = [connection]

    def keep() -> None:
        body.close()
        if said.get("connection", "").lower() != "close":
            put(left.pop())

    def close() -> None:
        body.close()
        for unused in left:
            unused.close()

    nbytes, content_range = length_of(said["content-length"]), said.get("content-range", "")
    return S3Answer(status, nbytes, content_range, body, keep, close)


def _head(body: Any) -> tuple[int, dict[str, str]]:
    version, status = body.readline(LONGEST_LINE)[:12].split()
    if version != b"HTTP/1.1":
        raise ValueError(f"an answer in {version!r}")
    said: dict[str, str] = {}
    for _ in range(MOST_LINES):
        line = body.readline(LONGEST_LINE)
        if not line.endswith(b"\n"):
            raise EOFError
        if line in (b"\r\n", b"\n"):
            if length_of(said.get("content-length", "")) < 0 or "transfer-encoding" in said:
                raise ValueError("an answer in chunks, as AWS gives its errors")
            return int(status), said
        name, _, value = line.decode("latin-1").partition(":")
        value = value.strip()
        if said.setdefault(name.lower(), value) != value and name.lower() in PLAIN:
            raise ValueError(f"an answer with two of {name}")
    raise ValueError("an answer with too many headers")


VALID_S = 900
KEPT_S = 300  # then it is signed anew: boto3 renews credentials 600 s before they end
KEPT = 4096  # URLs
MOST_SAID = 1 << 16  # bytes of an error; a server that ignores ranges sends a whole tar
MOST_REFUSALS = 32  # in a row, where boto3 was let in: then the server takes no URLs
BROKE_OFF = "the server's answer broke off again and again: check the network"
T = TypeVar("T")
Take = Callable[[Any, int], T]
"""Returns a value read from a body of a length. Raises EOFError if the body is shorter."""
_log = logging.getLogger("wdsprep")


def bytes_of(body: Any, nbytes: int) -> bytes:
    """Return the bytes of a body of this length."""
    data: bytes = body.read(nbytes)
    if len(data) != nbytes:
        raise EOFError
    return data


def fill(buffer: memoryview, body: Any, nbytes: int) -> int:
    """Read a body of this length into a buffer, and return the length."""
    is_fitting = 0 <= nbytes <= len(buffer)
    if not is_fitting or (nbytes and body.readinto(buffer[:nbytes]) != nbytes):
        raise EOFError
    return nbytes


class Reads:
    """The reads of objects in one bucket by one client, for any number of threads.

    They always ask for a range: then the answer says what it brings, however the request is sent.
    """

    def __init__(self, client: Any, bucket: str) -> None:
        self._client, self._bucket = client, bucket
        self._wire: Wire | None = None  # which stays where there can be none
        try:
            self._wire = Wire(client._endpoint.http_session)
        except AttributeError as error:
            _warn_of_version(error)
        self._lock = threading.Lock()
        self._urls: dict[str, tuple[float, str]] = {}
        self._refusals = 0
        client.meta.events.register_first("choose-signer.s3.GetObject", _newest_signature)

    def take(self, key: str, wanted: Range, take: Take[T]) -> T:
        """Return what `take` makes of a range of an object.

        The range has no bytes if it starts at the end or after.
        """
        from botocore.exceptions import ClientError

        try:
            wire = self._wire
            if wire is None or self._refusals >= MOST_REFUSALS:
                return self._take_with_boto3(key, wanted, take)
            try:
                return self._take_by_url(wire, key, wanted, take)
            except ClientError as error:
                if not _may_be_taken(status_of(error)):
                    raise
                taken = self._take_with_boto3(key, wanted, take)
                with self._lock:  # the server takes the request, and not its URL
                    self._urls.pop(key, None)
                    self._refusals += 1
                    is_last = self._refusals == MOST_REFUSALS
                if is_last:
                    _log.warning(
                        "s3://%s refuses signed URLs (%s %s): every read is signed by itself from "
                        "now on, which is slower",
                        self._bucket,
                        status_of(error),
                        code_of(error),
                    )
                return taken
        except ClientError as error:
            if status_of(error) == BEYOND:
                headers = error.response["ResponseMetadata"].get("HTTPHeaders", {})
                wanted.check_beyond(headers.get("content-range", ""), self._shown(key))
                return take(BytesIO(), 0)
            raise

    def _shown(self, key: str) -> str:
        return f"s3://{self._bucket}/{key}"

    def _take_by_url(self, wire: Wire, key: str, wanted: Range, take: Take[T]) -> T:
        from botocore.exceptions import ClientError

        url = self._url(key)
        try:
            answer = wire.get(url, {"Range": wanted.header})
        except (AttributeError, ImportError, TypeError) as error:
            self._wire = None
            _warn_of_version(error)
            return self._take_with_boto3(key, wanted, take)
        status, length, what = answer.status, answer.nbytes, self._shown(key)
        with contextlib.closing(answer), _short_read_errors(what):
            if status == 206 or _is_all(wanted, status, length):
                taken = take(answer.body, _nbytes_of(wanted, status, answer.range, length, what))
                if length < 0 and answer.body.read(1):  # its last chunk has not come
                    raise EOFError
                answer.keep()
                self._refusals = 0
                return taken
            said = answer.body.read(min(length, MOST_SAID) if length >= 0 else MOST_SAID)
            if len(said) == length:
                answer.keep()
        match = re.search(rb"<Code>(\w+)</Code>", said)
        code = match[1].decode() if match else str(status)
        headers = {"content-range": answer.range}
        facts: Any = {
            "Error": {"Code": code},
            "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers},
        }
        raise ClientError(facts, "GetObject")  # as boto3 raises it

    def _take_with_boto3(self, key: str, wanted: Range, take: Take[T]) -> T:
        answer = self._client.get_object(Bucket=self._bucket, Key=key, Range=wanted.header)
        status, what = answer["ResponseMetadata"]["HTTPStatusCode"], self._shown(key)
        with contextlib.closing(answer["Body"]) as body, _short_read_errors(what):
            said, length = answer.get("ContentRange", ""), answer.get("ContentLength", -1)
            return take(body, _nbytes_of(wanted, status, said, length, what))

    def _url(self, key: str) -> str:
        now = time.monotonic()
        signed, url = self._urls.get(key, (0.0, ""))
        if not url or now - signed > KEPT_S:
            what = {"Bucket": self._bucket, "Key": key}
            url = self._client.generate_presigned_url("get_object", Params=what, ExpiresIn=VALID_S)
            with self._lock:
                if len(self._urls) >= KEPT:
                    self._urls.clear()
                self._urls[key] = now, url
        return url


def _may_be_taken(status: int) -> bool:
    """Return whether a server that refuses a URL so may take a request that boto3 signs."""
    return status < 500 and status not in (404, BEYOND, 429)


def _is_all(wanted: Range, status: int, length: int) -> bool:
    """Return whether an answer without a range brings all that is wanted."""
    return status == 200 and wanted.covers_file(length)


def _nbytes_of(wanted: Range, status: int, said: str, length: int, what: str) -> int:
    """Return how many bytes an answer brings. Raise an error if they are not those wanted.

    `said` is its Content-Range, and `length` its Content-Length, or -1 if that is unknown. The
    error is an EOFError if the two do not fit, which means that the answer was cut, else a
    StoreError, which names the file `what`.
    """
    if _is_all(wanted, status, length):
        return length
    nbytes, _ = wanted.check_answer(said, what)
    if length not in (-1, nbytes):
        raise EOFError  # something has cut it
    return nbytes


def _warn_of_version(error: Exception) -> None:
    _log.warning("this boto3 or urllib3 is not one that wdsprep knows (%s): S3 is slower", error)


def _newest_signature(signature_version: str, **_: object) -> "str | None":
    """Choose the newest signature for URLs; boto3 prefers an old one that newer regions refuse.

    This handles botocore's event `choose-signer`. None leaves the choice to botocore, for
    requests that are not signed in their URL.
    """
    return "s3v4-query" if signature_version in ("v4-query", "s3v4-query") else None


@contextlib.contextmanager
def _short_read_errors(what: str) -> Iterator[None]:
    """Turn all errors by which an answer ends too early into a ShortReadError."""
    from botocore.exceptions import HTTPClientError, IncompleteReadError
    from urllib3.exceptions import HTTPError

    lost = (EOFError, HTTPError, HTTPException, HTTPClientError, IncompleteReadError, OSError)
    try:
        yield
    except lost as error:
        raise ShortReadError(f"{what}: {BROKE_OFF}") from error
