"""What writers do in tests of stores, and the one line that an error is."""

import contextlib
import random
from collections.abc import Iterator

from tests.kit.s3 import s3_client
from wdsprep.store.base import Store
from wdsprep.store.s3.s3_store import S3Store


def break_off(store: Store, error: BaseException, *, exclusive: bool = False) -> None:
    with store.write("f", exclusive=exclusive) as sink:
        sink.write(b"half")
        raise error


def one_line(error: Exception, *parts: str) -> bool:
    text = str(error)
    assert "\n" not in text
    assert [part for part in parts if part not in text] == [], text
    return True


def names(store: Store, prefix: str = "") -> list[str]:
    return [entry.name for entry in store.list(prefix)]


# --- on S3

MIB = 1 << 20
BIG = random.Random(0).randbytes(11 * MIB)  # three parts


def uploads(bucket: str) -> list[str]:
    with s3_client() as client:
        return [u["Key"] for u in client.list_multipart_uploads(Bucket=bucket).get("Uploads", ())]


def begin_uploads(bucket: str, *keys: str) -> None:
    with s3_client() as client:
        for key in keys:
            client.create_multipart_upload(Bucket=bucket, Key=key)


@contextlib.contextmanager
def opened(url: str) -> Iterator[S3Store]:
    store = S3Store(url, part_nbytes=5 * MIB, first_pause_s=0.001)
    with contextlib.closing(store):
        yield store
