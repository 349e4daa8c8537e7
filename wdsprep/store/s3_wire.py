"""GETs over connections that are open already.

boto3's session opens connections, with its proxies, certificates and timeouts, and urllib3 keeps
them. Through both a request costs a millisecond of the processor, nearly all of it to look at the
same URL and the same kind of headers anew. On a connection that is open, a GET is a few lines out
and a few lines in. Whatever is not as simple as that goes through boto3's session: the first
request of a connection, one by a proxy, one whose connection the server has closed meanwhile, and
one whose answer does not say how long it is.

urllib3 has no public names for this. They are all taken here, within `Wire.get`, so that an
AttributeError of it means that an installed version is another than those known.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from wdsprep.store.ranges import length_of

LONGEST_LINE = 1 << 16
MOST_LINES = 200
HEADERS = "Accept-Encoding: identity\r\n"
PLAIN = frozenset(("content-length", "content-range"))  # what may be said once


@dataclass(kw_only=True, slots=True)
class Answer:
    """The head of an answer. `nbytes` is the length of its body, -1 where that is unknown; `range`
    is its Content-Range."""

    status: int
    nbytes: int
    range: str
    body: Any
    keep: Callable[[], None]
    """The body has been read to its end: the connection may serve others."""
    close: Callable[[], None]
    """Lets go of the answer, and of the connection unless that is kept."""


@dataclass(frozen=True, slots=True)
class _Pool:
    """Of urllib3's connections to one server."""

    take: Callable[[], Any]
    put: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Wire:
    """Sends requests for a session of botocore's, for any number of threads."""

    session: Any
    _pools: dict[str, "_Pool"] = field(default_factory=dict)

    def get(self, url: str, headers: Mapping[str, str]) -> Answer:
        origin, path = _split(url)
        pool = self._pools.get(origin)
        connection = None if pool is None else _idle(pool)
        if pool is not None and connection is not None:
            try:
                return _asked(pool, connection, f"GET {path} HTTP/1.1", _host(origin), headers)
            except TimeoutError as error:
                connection.close()
                raise _too_slow(origin, error) from error
            except (OSError, EOFError):
                connection.close()
            except ValueError:  # nor will the next one be simple, until one was
                connection.close()
                self._pools.pop(origin, None)
        return self._by_session(url, origin, headers)

    def _by_session(self, url: str, origin: str, headers: Mapping[str, str]) -> Answer:
        from botocore.awsrequest import AWSPreparedRequest, HeadersDict

        request = AWSPreparedRequest("GET", url, HeadersDict(headers), None, True)
        answer = self.session.send(request)
        raw, nbytes = answer.raw, length_of(answer.headers.get("Content-Length", ""))
        pool = raw._pool
        if nbytes >= 0 and pool is not None and pool.proxy is None:
            self._pools[origin] = _Pool(pool._get_conn, pool._put_conn)
        return Answer(
            status=answer.status_code,
            nbytes=nbytes,
            range=answer.headers.get("Content-Range", ""),
            body=raw._fp,  # urllib3's own reading copies every byte once more
            keep=raw.release_conn,
            close=raw.close,
        )


def _too_slow(origin: str, error: Exception) -> Exception:
    from botocore.exceptions import ReadTimeoutError

    raised: Exception = ReadTimeoutError(endpoint_url=origin, error=error)
    return raised


def _split(url: str) -> tuple[str, str]:
    slash = url.index("/", url.index("://") + 3)
    return url[:slash], url[slash:]


def _host(origin: str) -> str:
    """As it is signed, and as the session sends it: without a port that goes without saying."""
    scheme, _, host = origin.lower().partition("://")
    return host.rpartition("@")[2].removesuffix({"http": ":80", "https": ":443"}.get(scheme, ""))


def _idle(pool: _Pool) -> Any:
    """A connection that nobody uses, if one is open."""
    from urllib3.exceptions import ClosedPoolError

    try:
        connection = pool.take()  # which closes those that the server has closed
    except ClosedPoolError:  # the session has dropped it, and makes another
        return None
    if not connection.is_closed:
        return connection
    pool.put(connection)
    return None


def _asked(
    pool: _Pool, connection: Any, line: str, host: str, headers: Mapping[str, str]
) -> Answer:
    """Send, and read the head of the answer; an error where none comes."""
    told = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    connection.sock.sendall(f"{line}\r\nHost: {host}\r\n{HEADERS}{told}\r\n".encode("ascii"))
    body = connection.sock.makefile("rb")
    try:
        status, said = _head(body)
    except BaseException:
        body.close()
        raise
    left = [connection]

    def keep() -> None:
        body.close()
        if said.get("connection", "").lower() != "close":
            pool.put(left.pop())

    def close() -> None:
        body.close()
        for one in left:
            one.close()

    nbytes, its_range = length_of(said["content-length"]), said.get("content-range", "")
    return Answer(status=status, nbytes=nbytes, range=its_range, body=body, keep=keep, close=close)


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
