"""What holds ask of S3."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from email.utils import parsedate_to_datetime
from typing import Any

from wdsprep.store.object_locks import Mark
from wdsprep.store.s3.retry import retrying


class S3Objects:
    """The objects of S3 as holds use them (`wdsprep.store.object_locks.MarkedObjects`).

    `ask` makes a request of the store, for any object. What it raises becomes a StoreError in
    `translated`.
    """

    def __init__(
        self, ask: Callable[..., Any], translated: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._ask, self._translated = ask, translated

    def tags(self, prefix: str, /) -> Mapping[str, str]:
        with self._translated():
            answer = self._ask("list_objects_v2", Prefix=prefix)
        return {each["Key"]: _tag(each) for each in answer.get("Contents", ())}

    def read(self, key: str, /) -> Mark:
        def read() -> tuple[bytes, Any]:
            answer = self._ask("get_object", Key=key)
            return answer["Body"].read(), answer

        with self._translated():
            data, answer = retrying(read)
        now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
        age_s = (now - answer["LastModified"]).total_seconds()
        return Mark(data=data, tag=_tag(answer), age_s=age_s)

    def make(self, key: str, data: bytes, /) -> str:
        with self._translated():
            return _tag(self._ask("put_object", Key=key, Body=data, IfNoneMatch="*"))

    def delete(self, key: str, /) -> None:
        with self._translated():
            self._ask("delete_object", Key=key)


def _tag(answer: Any) -> str:
    return str(answer["ETag"]).strip('"')
