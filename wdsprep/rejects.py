"""The rejects of one unit of work as a file: written as they come and counted, read back whole."""

import hashlib
from collections import Counter

from wdsprep.samples import Reject
from wdsprep.store import Sink

UNSETTLED = "rejects that rows are leaving"
"""By this a receipt has the digest of its rejects as they were, until they are as it says."""


def rejects_name(unit: str) -> str:
    return f"rejects/{unit}.jsonl"


class RejectsFile:
    """Writes rejects to a sink; a unit may have any number of them."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._hash = hashlib.sha256()
        self.counts: Counter[str] = Counter()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def add(self, reject: Reject) -> None:
        line = reject.to_json().encode("utf-8", "replace")
        self._sink.write(line)
        self._hash.update(line)
        self.counts[reject.code.value] += 1


def read_rejects(data: bytes) -> list[Reject]:
    """The rejects in a file's bytes; a ValueError where a line is none."""
    try:
        return [Reject.from_json(line.decode()) for line in data.splitlines()]
    except (KeyError, TypeError, StopIteration) as error:
        raise ValueError(f"no reject: {error!r}") from error
