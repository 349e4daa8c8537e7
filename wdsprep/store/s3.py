"""S3 and what speaks like it. Credentials, profile, region and `AWS_ENDPOINT_URL` are boto3's own.

A file becomes visible by one PUT, or by the completion of a multipart upload whose parts go out
while the next ones are still being written. Each body carries its MD5, so the server refuses what
the network bent. A failure aborts the upload. A killed writer leaves at most an upload that nobody
sees; `sweep` aborts those a day old.
"""

import base64
import contextlib
import datetime
import hashlib
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

from wdsprep.errors import (
    AccessError,
    ExistsError,
    NotFoundError,
    ShortReadError,
    StoreError,
    UsageError,
)
from wdsprep.store import Entry, check_name

PART_NBYTES = 8 << 20
PARTS_A_SIZE = 2_000  # then parts double, so that 10,000 parts hold any tar
PARTS_IN_FLIGHT = 3
ATTEMPTS = 8
ABANDONED_UPLOAD = datetime.timedelta(days=1)
REFUSED = {
    "AccessDenied": "access denied: check the permissions of these credentials",
    "403": "access denied: check the permissions of these credentials",
    "InvalidAccessKeyId": "the access key is unknown there: check AWS_ACCESS_KEY_ID or AWS_PROFILE",
    "SignatureDoesNotMatch": "the secret key is wrong: check AWS_SECRET_ACCESS_KEY or AWS_PROFILE",
    "ExpiredToken": "the credentials have expired: log in again",
    "InvalidToken": "the session token is wrong: check AWS_SESSION_TOKEN",
}
T = TypeVar("T")


class S3Store:
    """Implements `wdsprep.store.Store` on a bucket and a key prefix."""

    def __init__(self, url: str, *, part_nbytes: int = PART_NBYTES) -> None:
        self._bucket, _, prefix = url[len("s3://") :].partition("/")
        if not self._bucket:
            raise UsageError(f"{url}: names no bucket: give s3://BUCKET/PREFIX")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._part_nbytes = part_nbytes

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def __reduce__(self) -> tuple[type["S3Store"], tuple[str]]:
        return S3Store, (self.url,)  # a client belongs to the process that made it

    @cached_property
    def client(self) -> Any:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        config = Config(
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            request_checksum_calculation="when_required",  # bodies carry an MD5 instead
            response_checksum_validation="when_required",
            connect_timeout=10,
            max_pool_connections=64,
            tcp_keepalive=True,
        )
        try:
            return boto3.session.Session().client("s3", config=config)
        except (BotoCoreError, ValueError) as error:  # no such profile, a bad endpoint URL
            raise AccessError(
                f"{self.url}: {str(error).rstrip('.')}: check the AWS settings"
            ) from error

    def list(self, prefix: str = "", /) -> Iterator[Entry]:
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix + prefix
        )
        with self._translated(prefix):
            for page in pages:
                for found in page.get("Contents", ()):
                    name = found["Key"][len(self._prefix) :]
                    if name and not name.endswith("/"):  # a console's idea of a folder
                        stamp = found["ETag"].strip('"')
                        yield Entry(name=name, nbytes=found["Size"], stamp=stamp)

    def read(self, name: str, /, *, start: int = 0, nbytes: int | None = None) -> bytes:
        if nbytes == 0:
            return b""
        ask = {"Bucket": self._bucket, "Key": self._key(name)}
        if start or nbytes is not None:
            ask["Range"] = f"bytes={start}-{'' if nbytes is None else start + nbytes - 1}"
        with self._translated(name):
            return _with_retries(lambda: self._get(ask, name))

    def _get(self, ask: dict[str, str], name: str) -> bytes:
        from botocore.exceptions import ClientError

        try:
            answer = self.client.get_object(**ask)
        except ClientError as error:
            if error.response["Error"]["Code"] == "InvalidRange":  # starts at the end or after
                return b""
            raise
        with contextlib.closing(answer["Body"]) as body:
            data: bytes = body.read()
        if len(data) != answer["ContentLength"]:
            raise ShortReadError(
                f"{self.url}/{name}: {len(data):,} of {answer['ContentLength']:,} bytes arrived"
            )
        return data

    @contextlib.contextmanager
    def write(self, name: str, /, *, exclusive: bool = False) -> Iterator["_S3Sink"]:
        with self._translated(name):
            # Not every server checks the condition when it completes a multipart upload.
            part_nbytes = sys.maxsize if exclusive else self._part_nbytes
            sink = _S3Sink(self.client, self._bucket, self._key(name), part_nbytes)
            try:
                yield sink
                sink.finish({"IfNoneMatch": "*"} if exclusive else {})
            except BaseException:
                sink.abort()
                raise

    def delete(self, name: str, /) -> None:
        with self._translated(name):
            self.client.delete_object(Bucket=self._bucket, Key=self._key(name))

    def sweep(self) -> int:
        """Abort uploads begun over a day ago: no live writer takes that long over a file."""
        too_old = datetime.datetime.now(datetime.timezone.utc) - ABANDONED_UPLOAD
        return self.abort_uploads(lambda begun: begun < too_old)

    def abort_uploads(self, chosen: Callable[[datetime.datetime], bool]) -> int:
        """Abort the unfinished uploads below this prefix whose time of beginning is `chosen`."""
        pages = self.client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self._bucket, Prefix=self._prefix
        )
        with self._translated(""):
            found = [u for page in pages for u in page.get("Uploads", ()) if chosen(u["Initiated"])]
            for upload in found:
                self.client.abort_multipart_upload(
                    Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                )
        return len(found)

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)

    @contextlib.contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        what = f"{self.url}/{name}" if name else self.url
        try:
            yield
        except ClientError as error:
            raise _client_error(error, what, f"s3://{self._bucket}") from error
        except BotoCoreError as error:
            raise _connection_error(error, what) from error


class _S3Sink:
    """Collects parts and sends full ones in the background, a few at a time."""

    def __init__(self, client: Any, bucket: str, key: str, part_nbytes: int) -> None:
        self._client, self._at = client, {"Bucket": bucket, "Key": key}
        self._first_part_nbytes = part_nbytes
        self._pending: list[bytes] = []
        self._pending_nbytes = 0
        self._upload: dict[str, str] | None = None
        self._sending: deque[Future[bytes]] = deque()
        self._digests: list[bytes] = []
        self._started = 0
        self._pool: ThreadPoolExecutor | None = None

    def write(self, data: bytes, /) -> None:
        view = memoryview(data)
        while view:
            room = self._part_nbytes() - self._pending_nbytes
            self._pending.append(bytes(view[:room]))
            self._pending_nbytes += len(self._pending[-1])
            view = view[room:]
            if self._pending_nbytes == self._part_nbytes():
                self._send_part()

    def _part_nbytes(self) -> int:
        return self._first_part_nbytes << self._started // PARTS_A_SIZE

    def _take_pending(self) -> bytes:
        data = b"".join(self._pending)
        self._pending, self._pending_nbytes = [], 0
        return data

    def _send_part(self) -> None:
        if self._upload is None or self._pool is None:
            answer = self._client.create_multipart_upload(**self._at)
            self._upload = {**self._at, "UploadId": answer["UploadId"]}
            self._pool = ThreadPoolExecutor(PARTS_IN_FLIGHT)
        if len(self._sending) == PARTS_IN_FLIGHT:
            self._digests.append(self._sending.popleft().result())
        self._started += 1
        part = self._pool.submit(self._put_part, self._take_pending(), self._started)
        self._sending.append(part)

    def _put_part(self, data: bytes, number: int) -> bytes:
        digest = _md5(data)
        self._client.upload_part(
            **(self._upload or {}), PartNumber=number, Body=data, ContentMD5=_base64(digest)
        )
        return digest

    def finish(self, condition: dict[str, str]) -> None:
        if self._upload is None:
            data = self._take_pending()
            etag = _md5(data).hex()
            put = {"Body": data, "ContentMD5": _base64(_md5(data)), **condition}
            self._make_visible(lambda: self._client.put_object(**self._at, **put), etag)
            return
        if self._pending:
            self._send_part()
        while self._sending:
            self._digests.append(self._sending.popleft().result())
        etag = f"{_md5(b''.join(self._digests)).hex()}-{len(self._digests)}"
        parts = [{"PartNumber": n, "ETag": d.hex()} for n, d in enumerate(self._digests, 1)]
        done = {"MultipartUpload": {"Parts": parts}, **self._upload}
        self._make_visible(lambda: self._client.complete_multipart_upload(**done), etag)
        self._close_pool()

    def _make_visible(self, act: Callable[[], object], etag: str) -> None:
        """Act; where a retry meets its own success, whose answer was lost, that is success."""
        from botocore.exceptions import ClientError

        try:
            act()
        except ClientError as error:
            if error.response["Error"]["Code"] in ("PreconditionFailed", "412", "NoSuchUpload"):
                with contextlib.suppress(ClientError):
                    if self._client.head_object(**self._at)["ETag"].strip('"') == etag:
                        return
            raise

    def abort(self) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        self._close_pool()
        if self._upload is not None:
            with contextlib.suppress(BotoCoreError, ClientError):  # the first failure is the news
                self._client.abort_multipart_upload(**self._upload)

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _with_retries(read: Callable[[], T]) -> T:
    """boto3 retries requests; a body that breaks off on the way is ours to ask for again."""
    from botocore.exceptions import HTTPClientError, IncompleteReadError, ResponseStreamingError

    for attempt in range(ATTEMPTS):
        try:
            return read()
        except (HTTPClientError, IncompleteReadError, ResponseStreamingError, ShortReadError):
            if attempt == ATTEMPTS - 1:
                raise
            time.sleep(random.uniform(0, min(10.0, 0.1 * 2**attempt)))  # noqa: S311 (jitter)
    raise AssertionError("unreachable")


def _client_error(error: Any, what: str, bucket: str) -> StoreError:
    code = error.response["Error"]["Code"]
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if code == "NoSuchBucket":
        return NotFoundError(f"{bucket}: no such bucket: create it, or check the name")
    if code in ("NoSuchKey", "404"):
        return NotFoundError(f"{what}: no such object")
    if code in REFUSED:
        return AccessError(f"{what}: {REFUSED[code]}")
    if status == 412:
        return ExistsError(f"{what}: exists already")
    return StoreError(f"{what}: the server answered {status} {code}: try again")


def _connection_error(error: Exception, what: str) -> StoreError:
    from botocore.exceptions import CredentialRetrievalError, NoCredentialsError

    if isinstance(error, NoCredentialsError | CredentialRetrievalError):
        return AccessError(f"{what}: no credentials: set AWS_ACCESS_KEY_ID or AWS_PROFILE")
    return StoreError(f"{what}: {str(error).rstrip('.')}: check the network or AWS_ENDPOINT_URL")
