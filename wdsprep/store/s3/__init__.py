"""S3 and what speaks like it. Credentials, profile, region and `AWS_ENDPOINT_URL` are boto3's own.

A file becomes visible by one PUT, or by the completion of a multipart upload whose parts go out
while the next ones are still being written. Each body carries its MD5, so the server refuses what
the network bent. A failure aborts the upload. A killed writer leaves at most an upload that nobody
sees; `sweep` aborts it where that writer is known to be dead, or else after a day.
"""

import base64
import contextlib
import datetime
import hashlib
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from wdsprep.errors import ShortReadError, UsageError
from wdsprep.store.base import Entry, FileSink, Ours, check_name, check_prefix, none_of_ours
from wdsprep.store.ranges import Range
from wdsprep.store.s3.holds import Holds
from wdsprep.store.s3.listing import Page, Stretch, listing, page_of, quicken_listings
from wdsprep.store.s3.reads import BROKE_OFF, GetRequest, Reads
from wdsprep.store.s3.retry import (
    FIRST_PAUSE_S,
    code_of,
    retrying,
    translated,
    unusable_settings,
)
from wdsprep.store.s3.uploads import Note, Writer, remove_old_notes, write_note, writer_of

PART_NBYTES = 8 << 20
PARTS_A_SIZE = 2_000  # then parts double, so that 10,000 parts hold any tar
PARTS_IN_FLIGHT = 3
ABANDONED_UPLOAD = datetime.timedelta(days=1)
ANSWERS = {  # boto3 takes a body that never came for an empty answer
    "list_objects_v2": "IsTruncated",
    "list_multipart_uploads": "IsTruncated",
    "create_multipart_upload": "UploadId",
    "complete_multipart_upload": "ETag",
}
CONTENT_TYPES = {  # what a browser shows; all else is bytes
    "html": "text/html; charset=utf-8",
    "json": "application/json",
    "jsonl": "application/x-ndjson",
    "tar": "application/x-tar",
}
WRITER = "wdsprep-writer"  # object metadata: tells a writer whether what it finds is its own
_CLIENT_LOCK = threading.Lock()


class S3Store:
    """Implements `wdsprep.store.base.Store` on a bucket and a key prefix."""

    def __init__(
        self, url: str, *, part_nbytes: int = PART_NBYTES, first_pause_s: float = FIRST_PAUSE_S
    ) -> None:
        self._bucket, _, prefix = url[len("s3://") :].partition("/")
        if not self._bucket:
            raise UsageError(f"{url}: names no bucket: give s3://BUCKET/PREFIX")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._part_nbytes, self._first_pause_s = part_nbytes, first_pause_s
        self._clients: dict[int, tuple[Any, Reads]] = {}
        self._holds = Holds(self._ask)

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def __reduce__(self) -> tuple[Callable[..., "S3Store"], tuple[str]]:
        make = partial(S3Store, part_nbytes=self._part_nbytes, first_pause_s=self._first_pause_s)
        return make, (self.url,)

    @property
    def client(self) -> Any:
        return self._own[0]

    @property
    def _own(self) -> tuple[Any, Reads]:
        """A client belongs to the process that made it: a fork must not share its connections."""
        process = os.getpid()
        with _CLIENT_LOCK:  # making one takes a while: many threads at the start want the same
            if process not in self._clients:
                client = self._new_client()
                self._clients[process] = client, Reads(client)
            return self._clients[process]

    def _new_client(self) -> Any:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        config = Config(
            retries={"mode": "standard", "total_max_attempts": 1},  # see s3_errors.py
            request_checksum_calculation="when_required",  # bodies carry an MD5 instead
            response_checksum_validation="when_required",
            connect_timeout=10,
            max_pool_connections=64,
            tcp_keepalive=True,
        )
        try:
            client = boto3.session.Session().client("s3", config=config)
        except (BotoCoreError, ValueError) as error:
            raise unusable_settings(error, self.url) from error
        quicken_listings(client)
        client.meta.events.register("before-send.s3", self._holds.check)
        return client

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        if own := self._clients.pop(os.getpid(), None):
            own[0].close()

    def _ask(self, operation: str, **what: Any) -> Any:
        call = getattr(self.client, operation)

        def act() -> Any:
            self._holds.refresh()
            answer = call(Bucket=self._bucket, **what)
            if ANSWERS.get(operation, "ResponseMetadata") not in answer:
                raise ShortReadError(f"{self.url}: {BROKE_OFF}")
            return answer

        return retrying(act, pause_s=self._first_pause_s)

    def list(self, prefix: str = "", /) -> Iterator[Entry]:
        check_prefix(prefix)
        return listing(partial(self._page, prefix), prefix)

    def _page(self, prefix: str, stretch: Stretch) -> Page:
        ask = {"Prefix": self._prefix + prefix}
        if stretch.token:
            ask["ContinuationToken"] = stretch.token
        elif stretch.after:
            ask["StartAfter"] = self._prefix + stretch.after
        with self._translated(prefix):
            answer = self._ask("list_objects_v2", **ask)
        return page_of(answer, len(self._prefix), stretch, self.url)

    def read(self, name: str, /, *, start: int = 0, nbytes: int | None = None) -> bytes:
        ask = self._range(name, start, nbytes)
        with self._translated(name):
            self._holds.refresh()
            return retrying(lambda: self._own[1].get(ask), pause_s=self._first_pause_s)[:nbytes]

    def read_into(self, name: str, buffer: memoryview, /, *, start: int) -> int:
        """Fill a buffer from `start`; how many bytes, fewer only where the file ends before."""
        ask = self._range(name, start, len(buffer))
        with self._translated(name):
            self._holds.refresh()
            reads = self._own[1]
            return retrying(lambda: reads.get_into(ask, buffer), pause_s=self._first_pause_s)

    def _range(self, name: str, start: int, nbytes: int | None) -> GetRequest:
        wanted = Range(start=start, nbytes=nbytes)
        return GetRequest(bucket=self._bucket, key=self._key(name), range=wanted)

    def stamp(self, name: str, /) -> str:
        """What changes whenever the object is written."""
        with self._translated(name):
            found = self._ask("head_object", Key=self._key(name))
        return f"{found['ETag']} {found['LastModified'].isoformat()}"

    @contextlib.contextmanager
    def write(self, name: str, /, *, exclusive: bool = False) -> Iterator["_S3Sink"]:
        # Not every server checks the condition when it completes a multipart upload.
        part_nbytes = sys.maxsize if exclusive else self._part_nbytes
        with self._translated(name):
            key = self._key(name)
            sink = _S3Sink(partial(self._ask, Key=key), f"{self._bucket}/{key}", part_nbytes)
            try:
                yield sink
                sink.finish({"IfNoneMatch": "*"} if exclusive else {})
            except BaseException:
                sink.abort()
                raise

    def delete(self, name: str, /) -> None:
        with self._translated(name):
            self._ask("delete_object", Key=self._key(name))

    @contextlib.contextmanager
    def hold(self, name: str, /, *, giving: Sequence[FileSink] = ()) -> Iterator[None]:
        del giving  # what is stopped in the middle of it is waited for until it counts as dead
        with self._translated(name), self._holds.hold(self._key(name), f"{self.url}/{name}"):
            yield

    def let_go(self, name: str, /) -> None:
        with self._translated(name):
            self._holds.let_go(self._key(name), f"{self.url}/{name}")

    def sweep(self, ours: Ours = none_of_ours) -> int:
        """Abort the uploads whose writer is known to be dead; where nobody knows, those under names
        that are `ours` begun over a day ago: no live writer takes that long over a file."""
        with self._translated(""):
            lost = [upload for upload in self._uploads() if self._has_lost_its_writer(upload, ours)]
            for upload in lost:
                _abort(self._ask, {"Key": upload["Key"], "UploadId": upload["UploadId"]})
        remove_old_notes()
        return len(lost)

    def _has_lost_its_writer(self, upload: dict[str, Any], ours: Ours) -> bool:
        key, age = upload["Key"], datetime.datetime.now(datetime.timezone.utc) - upload["Initiated"]
        writer = writer_of(f"{self._bucket}/{key}/{upload['UploadId']}")
        if writer is Writer.UNKNOWN:
            return age > ABANDONED_UPLOAD and bool(ours(key[len(self._prefix) :]))
        return writer is Writer.DEAD

    def _uploads(self) -> Iterator[dict[str, Any]]:
        ask = {"Prefix": self._prefix}
        while True:
            page = self._ask("list_multipart_uploads", **ask)
            yield from page.get("Uploads", ())
            if not page["IsTruncated"]:
                return
            ask["KeyMarker"] = page["NextKeyMarker"]
            ask["UploadIdMarker"] = page["NextUploadIdMarker"]

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)

    def _translated(self, name: str) -> contextlib.AbstractContextManager[None]:
        return translated(f"{self.url}/{name}" if name else self.url, f"s3://{self._bucket}")


class _S3Sink:
    """Collects parts and sends full ones in the background, a few at a time."""

    def __init__(self, ask: Callable[..., Any], place: str, part_nbytes: int) -> None:
        self._ask, self._place, self._first_part_nbytes = ask, place, part_nbytes
        self._note: Note | None = None
        self._writer = secrets.token_hex(8)
        kind = CONTENT_TYPES.get(place.rpartition(".")[2].lower())
        self._facts = {
            "Metadata": {WRITER: self._writer},
            **({"ContentType": kind} if kind else {}),
        }
        self._pending: list[bytes] = []
        self._pending_nbytes = 0
        self._upload: dict[str, str] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._parts: list[Future[dict[str, Any]]] = []
        self._failure: BaseException | None = None  # fatal, even to a caller that went on

    @property
    def waiting(self) -> str:
        return ""

    def write(self, data: bytes, /) -> None:
        try:
            self._collect(memoryview(data))
        except BaseException as error:
            self._failure = error
            raise

    def _collect(self, view: memoryview) -> None:
        while view:
            room = self._part_nbytes() - self._pending_nbytes
            self._pending.append(bytes(view[:room]))
            self._pending_nbytes += len(self._pending[-1])
            view = view[room:]
            if self._pending_nbytes == self._part_nbytes():
                self._send_part()

    def _part_nbytes(self) -> int:
        return self._first_part_nbytes << len(self._parts) // PARTS_A_SIZE

    def _take_pending(self) -> dict[str, Any]:
        data = b"".join(self._pending)
        self._pending, self._pending_nbytes = [], 0
        md5 = hashlib.md5(data, usedforsecurity=False).digest()
        return {"Body": data, "ContentMD5": base64.b64encode(md5).decode()}

    def _send_part(self) -> None:
        if not self._upload:
            answer = self._ask("create_multipart_upload", **self._facts)
            self._upload = {"UploadId": answer["UploadId"]}
            self._note = write_note(f"{self._place}/{answer['UploadId']}")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(PARTS_IN_FLIGHT)
        if len(self._parts) >= PARTS_IN_FLIGHT:
            self._parts[-PARTS_IN_FLIGHT].result()
        number = len(self._parts) + 1
        self._parts.append(self._pool.submit(self._put_part, number, self._take_pending()))

    def _put_part(self, number: int, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._ask("upload_part", PartNumber=number, **self._upload, **body)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    def finish(self, condition: dict[str, str]) -> None:
        if self._failure is not None:
            raise self._failure
        if not self._upload:
            whole = {**self._facts, **self._take_pending(), **condition}
            self._make_visible("put_object", **whole)
            return
        self.end()
        parts = [part.result() for part in self._parts]
        self._make_visible(
            "complete_multipart_upload", MultipartUpload={"Parts": parts}, **self._upload
        )
        self._let_go(is_gone=True)

    def end(self, *, waits: bool = False) -> None:
        if self._pending and (waits or self._upload):
            self._send_part()
        for part in self._parts:
            part.result()
        self._close_pool()

    def _make_visible(self, operation: str, **what: Any) -> None:
        """Where a retry meets its own success, whose answer was lost, that is success."""
        from botocore.exceptions import ClientError

        try:
            self._ask(operation, **what)
        except ClientError as error:
            if code_of(error) not in ("PreconditionFailed", "NoSuchUpload"):
                raise
            if not self._is_there():
                raise

    def _is_there(self) -> bool:
        from botocore.exceptions import ClientError

        try:
            return bool(self._ask("head_object")["Metadata"].get(WRITER) == self._writer)
        except ClientError:  # the refusal is the news, not this
            return False

    def abort(self) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        self._close_pool()
        is_gone = False
        if self._upload:
            with contextlib.suppress(BotoCoreError, ClientError):  # the first failure is the news
                _abort(self._ask, self._upload)
                is_gone = True
        self._let_go(is_gone=is_gone)

    def _let_go(self, *, is_gone: bool) -> None:
        note, self._note = self._note, None
        if note is not None:
            note.remove() if is_gone else note.abandon()

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _abort(ask: Callable[..., Any], upload: dict[str, str]) -> None:
    from botocore.exceptions import ClientError

    try:
        ask("abort_multipart_upload", **upload)
    except ClientError as error:
        if code_of(error) != "NoSuchUpload":  # somebody else was quicker
            raise
