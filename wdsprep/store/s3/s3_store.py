"""S3 and what speaks like it. Credentials, profile, region and `AWS_ENDPOINT_URL` are boto3's own.

A file becomes visible by one PUT, or by the completion of a multipart upload whose parts go out
while the next ones are still being written. The SHA-256 of each body is signed, over TLS too, so
the server refuses what was bent on the way. All servers compare it. SHA-256 takes 0.6 s a GB here,
and MD5, which is the other one that all know, 1.6 s. A failure aborts the upload. A killed writer
leaves at most an upload that nobody sees; `sweep` aborts it where that writer is known to be dead,
or else after a day.
"""

import datetime
import sys
from collections import Counter
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

from wdsprep.errors import ShortReadError
from wdsprep.store.base import Entry, Ours, check_prefix, none_of_ours
from wdsprep.store.object_locks import Mark, MarkedStore
from wdsprep.store.remote import Range
from wdsprep.store.s3.failures import explain, is_transient, settings_error, status_of
from wdsprep.store.s3.listing import Page, Stretch, listing, page_of, quicken_listings
from wdsprep.store.s3.reads import BROKE_OFF, Reads, T, Take, bytes_of, fill
from wdsprep.store.s3.uploads import (
    WRITER,
    S3Sink,
    abort_upload,
    has_living_writer,
    remove_old_notes,
)

ABANDONED_UPLOAD = datetime.timedelta(days=1)
FRESH_UPLOAD = datetime.timedelta(hours=1)
ANSWERS = {  # boto3 takes a body that never came for an empty answer
    "list_objects_v2": "IsTruncated",
    "list_multipart_uploads": "IsTruncated",
    "create_multipart_upload": "UploadId",
    "complete_multipart_upload": "ETag",
}


class S3Store(MarkedStore):
    """A store in a bucket of S3, or of a server that speaks like it, below a prefix."""

    is_transient = staticmethod(is_transient)
    status_of = staticmethod(status_of)
    explain = staticmethod(explain)

    @property
    def client(self) -> Any:
        return self.clients.get()[0]

    def new_clients(self) -> tuple[Any, Reads]:
        """Return the client that this process uses, and what reads by it."""
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        config = Config(
            retries={"mode": "standard", "total_max_attempts": 1},  # see failures.py
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            connect_timeout=10,
            max_pool_connections=64,
            tcp_keepalive=True,
        )
        try:
            client = boto3.session.Session().client("s3", config=config)
        except (BotoCoreError, ValueError) as error:
            raise settings_error(error, self.place) from error
        quicken_listings(client)
        client.meta.events.register("before-send.s3", self.check_locks)
        config = client.meta.config  # by itself botocore signs no body over TLS
        config.s3 = {**(config.s3 or {}), "payload_signing_enabled": True}
        return client, Reads(client, self.bucket)

    def close(self) -> None:
        """Close the connections of this process to the server. The next call opens new ones."""
        if clients := self.clients.pop():
            clients[0].close()

    def _ask(self, operation: str, name: str = "", **what: Any) -> Any:
        """Return the answer to a request. Errors are about a file or prefix, if one is named."""
        call = getattr(self.client, operation)

        def act() -> Any:
            self.refresh_locks()
            answer = call(Bucket=self.bucket, **what)
            if ANSWERS.get(operation, "ResponseMetadata") not in answer:
                raise ShortReadError(f"{self.url}: {BROKE_OFF}")
            return answer

        with self.store_errors(name):
            return self.retrying(act)

    def list(self, prefix: str = "", /) -> Iterator[Entry]:
        check_prefix(prefix)
        return listing(partial(self._page, prefix), prefix)

    def _page(self, prefix: str, stretch: Stretch) -> Page:
        ask = {"Prefix": self.prefix + prefix}
        if stretch.token:
            ask["ContinuationToken"] = stretch.token
        elif stretch.after:
            ask["StartAfter"] = self.prefix + stretch.after
        answer = self._ask("list_objects_v2", prefix, **ask)
        return page_of(answer, len(self.prefix), stretch, self.url)

    def read(self, name: str, /, *, start: int = 0, nbytes: int | None = None) -> bytes:
        return self._take(name, Range(start=start, nbytes=nbytes), bytes_of)[:nbytes]

    def read_into(self, name: str, buffer: memoryview, /, *, start: int) -> int:
        """Fill a buffer with the bytes of an object from `start` on, and return how many came.

        Fewer come only if the object ends before.
        """
        return self._take(name, Range(start=start, nbytes=len(buffer)), partial(fill, buffer))

    def _take(self, name: str, wanted: Range, take: Take[T]) -> T:
        """Return what `take` makes of a range of an object, which is asked for again if need be."""
        key = self.key(name)
        with self.store_errors(name):
            self.refresh_locks()
            reads: Reads = self.clients.get()[1]
            return self.retrying(lambda: reads.take(key, wanted, take))

    def stamp(self, name: str, /) -> str:
        """Return a text that changes whenever the object is written."""
        head = self._ask("head_object", name, Key=self.key(name))
        return f"{head['ETag']} {head['LastModified'].isoformat()}"

    def new_sink(self, name: str, *, exclusive: bool) -> S3Sink:
        key = self.key(name)
        condition = {"IfNoneMatch": "*"} if exclusive else {}
        # Not every server checks the condition when it completes a multipart upload.
        part_nbytes = sys.maxsize if exclusive else self.part_nbytes
        ask = partial(self._ask, name=name, Key=key)
        return S3Sink(ask, f"{self.bucket}/{key}", part_nbytes, condition)

    def writer_of(self, name: str, /) -> str:
        head = self._ask("head_object", name, Key=self.key(name))
        return str(head["Metadata"].get(WRITER, ""))

    def read_mark(self, name: str, /) -> Mark:
        def read() -> tuple[bytes, Any]:
            answer = self._ask("get_object", name, Key=self.key(name))
            return answer["Body"].read(), answer

        with self.store_errors(name):
            data, answer = self.retrying(read)
        now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
        age_s = (now - answer["LastModified"]).total_seconds()
        return data, _tag(answer), age_s

    def make_mark(self, name: str, data: bytes, /) -> str:
        what = {"Key": self.key(name), "Body": data, "IfNoneMatch": "*"}
        return _tag(self._ask("put_object", name, **what))

    def delete(self, name: str, /) -> None:
        self._ask("delete_object", name, Key=self.key(name))

    def sweep(self, ours: Ours = none_of_ours) -> tuple[int, int]:
        """Abort the unfinished uploads of dead writers.

        Return how many there were, and how many uploads of living writers there are.
        An upload whose writer is unknown is aborted if it is more than a day old, as no live
        writer takes that long over a file, and if `ours` says so of its name. Notes of old
        uploads are removed too.
        """
        are_alive, ask, is_last = Counter[bool | None](), {"Prefix": self.prefix}, False
        while not is_last:
            page = self._ask("list_multipart_uploads", **ask)
            for upload in page.get("Uploads", ()):
                is_alive = self._is_alive(upload, ours)
                if is_alive is False:
                    abort_upload(self._ask, {n: upload[n] for n in ("Key", "UploadId")})
                are_alive[is_alive] += 1
            if not (is_last := not page["IsTruncated"]):
                ask |= {name: page[f"Next{name}"] for name in ("KeyMarker", "UploadIdMarker")}
        remove_old_notes()
        return are_alive[False], are_alive[True]

    def _is_alive(self, upload: dict[str, Any], ours: Ours) -> bool | None:
        """Return whether an upload goes on, or None if nobody knows.

        That is told by its writer's note, or of one that is ours by its age.
        """
        key, age = upload["Key"], datetime.datetime.now(datetime.timezone.utc) - upload["Initiated"]
        is_alive = has_living_writer(f"{self.bucket}/{key}/{upload['UploadId']}")
        if is_alive is not None or not ours(key[len(self.prefix) :]):
            return is_alive
        if age > ABANDONED_UPLOAD:
            return False
        return True if age < FRESH_UPLOAD else None


def _tag(answer: Any) -> str:
    return str(answer["ETag"]).strip('"')
