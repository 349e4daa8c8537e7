"""The requests that locks make to S3."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from email.utils import parsedate_to_datetime
from typing import Any

from wdsprep.store.object_locks import Mark
from wdsprep.store.s3.failures import retrying


class S3Objects:
    """The requests of locks to S3 (`wdsprep.store.object_locks.MarkedObjects`).

    `ask` makes a request to the bucket, for any object. `errors` turns what it raises into a
    StoreError.
    """

    def __init__(
        self, ask: Callable[..., Any], errors: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._ask, self._errors = ask, errors

    def tags(self, prefix: str, /) -> Mapping[str, str]:
        with self._errors():
            answer = self._ask("list_objects_v2", Prefix=prefix)
        return {each["Key"]: _tag(each) for each in answer.get("Contents", ())}

    def read(self, key: str, /) -> Mark:
        def read() -> tuple[bytes, Any]:
            answer = self._ask("get_object", Key=key)
            return answer["Body"].read(), answer

        with self._errors():
            data, answer = retrying(read)
        now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
        age_s = (now - answer["LastModified"]).total_seconds()
        return Mark(data=data, tag=_tag(answer), age_s=age_s)

    def make(self, key: str, data: bytes, /) -> str:
        with self._errors():
            return _tag(self._ask("put_object", Key=key, Body=data, IfNoneMatch="*"))

    def delete(self, key: str, /) -> None:
        with self._errors():
            self._ask("delete_object", Key=key)


def _tag(answer: Any) -> str:
    return str(answer["ETag"]).strip('"')
