"""Reads one image shard in a thread of its own and gives its images to the engine, in order."""

import hashlib
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain, islice

from wdsprep.engine import Engine, Result
from wdsprep.image_shards import ImageShard
from wdsprep.progress import human_bytes
from wdsprep.runners import HopelessError
from wdsprep.samples import Code, Reject, Sample
from wdsprep.sources import LeftOut, Refusal, opened
from wdsprep.sources.tars import TarsSource
from wdsprep.tar.read import leads_out

JOIN_S = 0.05


@dataclass(frozen=True, slots=True)
class Fed:
    """A sample that the engine is working on, which has its image."""

    key: str
    sample: Sample
    result: "Future[Result]"


class Feeder:
    """`entries` are the samples of the shard in order, each one fed or rejected; after them None,
    or the error that ended the reading."""

    def __init__(self, engine: Engine, source: TarsSource, shard: ImageShard) -> None:
        self.entries: queue.SimpleQueue[Fed | Reject | Exception | None] = queue.SimpleQueue()
        self._engine, self._source, self._shard = engine, source, shard
        self.left_out = LeftOut()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"feed {shard.name}", daemon=True)

    def __enter__(self) -> "Feeder":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """What is still in the engine is of no interest, but it takes up places there."""
        self._stopped = True
        while self._thread.is_alive() or not self.entries.empty():
            self._thread.join(JOIN_S)
            while not self.entries.empty():
                if isinstance(self.entries.get(), Fed):
                    self._engine.free_place()

    def _run(self) -> None:
        try:
            with self._engine.feeding():
                rows = self._rows()
                first = list(islice(rows, 1))  # the tar is open, its first bytes are here
                with self._engine.turn():
                    for key, row in chain(first, rows):
                        if self._stopped:
                            return
                        self.entries.put(self._feed(key, row))
        except Exception as error:  # noqa: BLE001  raised again where the entries are read
            self.entries.put(error)
        else:
            self.entries.put(None)

    def _feed(self, key: str, row: Sample | Refusal) -> Fed | Reject:
        if isinstance(row, Refusal):
            return row.to_reject(key)
        if leads_out(key):
            return Reject(key=key, source=row.source, code=Code.BAD_KEY)
        return Fed(key, replace(row, image=b""), self._engine.put(key, row.image, row.caption))

    def _rows(self) -> Iterator[tuple[str, Sample | Refusal]]:
        """The samples of the tar, and at the end the certainty that it is what it was."""
        item, sha256 = self._shard.item, hashlib.sha256()
        rows = self._source.read_keyed(
            item,
            watch=sha256.update if self._shard.sha256 else None,
            left_out=self.left_out.note,
        )
        for key, row in islice(rows, item.take or None):
            if isinstance(row, Refusal) and row.code is Code.TAR_VANISHED:
                raise HopelessError(self._damaged("is not there"))
            yield key, row
        if self._shard.sha256 and not item.take and sha256.hexdigest() != self._shard.sha256:
            raise HopelessError(self._damaged(self._how()))

    def _how(self) -> str:
        """Reading ends where a tar is broken, so only the store knows how long it is."""
        name, expected = self._shard.item.name, self._shard.item.nbytes
        listed = opened(self._source.url).list(name)
        nbytes = next((entry.nbytes for entry in listed if entry.name == name), 0)
        if nbytes < expected:
            return f"is truncated (expected {human_bytes(expected)}, found {human_bytes(nbytes)})"
        return "is not what was packed (another SHA-256)"

    def _damaged(self, how: str) -> str:
        name = self._shard.item.name
        if not self._shard.sha256:
            return f"{name} {how}"
        return f'{name} {how}: run "wdsprep repair {self._source.url}", then "wdsprep pack" again'
