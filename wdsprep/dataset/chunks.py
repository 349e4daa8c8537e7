"""A file of a store that is read chunk after chunk, or as a stream over these."""

import io
import math
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, takewhile

from wdsprep.dataset.thread_map import map_ahead
from wdsprep.store.base import Store

CHUNK_NBYTES = 8 << 20
LOCAL_CHUNK_NBYTES = 1 << 20  # what the processor's cache holds until it is hashed
AHEAD = 4  # chunks on their way at once
WATCHED_BEHIND = 2  # chunks that wait to be watched, at most
OnBytes = Callable[[bytes], object]


class Chunks(io.RawIOBase):
    """A file of a store that is read chunk after chunk, or as a stream over these.

    Each chunk is one ranged read, checked and retried alone. Who asks for a second one will want
    them all, so from then on `ahead` of them are on their way at once: one after the other, they
    would wait for each other's first byte. What `watch` makes of a chunk, a hash as a rule, is made
    in a thread of its own meanwhile.

    A disk of this machine has read ahead itself, and to hand 1 MB to another thread takes as long
    as BLAKE3 of it. So there, all is done in the caller's thread: with all cores, `verify` takes
    0.8 of the time.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        *,
        start: int = 0,
        chunk_nbytes: int = 0,
        watch: OnBytes | None = None,
        ahead: int | None = None,
        expected: int | None = None,
    ) -> None:
        """Prepare to read a file in chunks, from `start` on.

        If `chunk_nbytes` is 0, chunks have the size that suits the store. `expected` is the
        length of the file, if it is known: no chunk is read ahead beyond it.
        """
        super().__init__()
        is_local = store.root is not None
        self._store, self._name = store, name
        self._chunk_nbytes = chunk_nbytes or (LOCAL_CHUNK_NBYTES if is_local else CHUNK_NBYTES)
        self._expected = math.inf if expected is None else expected
        self._ahead = (0 if is_local else AHEAD) if ahead is None else ahead
        self._next = start  # the begin of the next chunk
        self._coming = self._read_on()
        self._ended = False
        self._peeked = b""
        self._watch, self._watcher = watch, ThreadPoolExecutor(1, "watch")  # without a thread yet
        self._watched: deque[Future[object]] = deque()
        self._left = memoryview(b"")  # of a chunk, where it is read as a stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object, /) -> int:
        target = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        self._left = self._left or memoryview(self.next())
        nbytes = min(len(target), len(self._left))
        target[:nbytes] = self._left[:nbytes]
        self._left = self._left[nbytes:]
        return nbytes

    def peek(self) -> bytes:
        """Return the next chunk without taking it: `next` returns it again."""
        self._peeked = self._peeked or self.next()
        return self._peeked

    def next(self) -> bytes:
        """Return the next chunk. It is shorter, or empty, only if the file ends.

        If reading it fails, the chunks ahead are given up, and the next call asks for it anew. An
        error of `watch` in its thread is raised by a later call, or by `close`.
        """
        if self._peeked:
            chunk, self._peeked = self._peeked, b""
            return chunk
        if self._ended:
            return b""
        try:
            data = next(self._coming)
        except BaseException:
            self._coming = self._read_on()
            raise
        self._ended = len(data) < self._chunk_nbytes
        self._next += len(data)
        if self._watch is None or not data:
            return data
        if not self._ahead:
            self._watch(data)
            return data
        while len(self._watched) >= WATCHED_BEHIND:
            self._watched.popleft().result()
        self._watched.append(self._watcher.submit(self._watch, data))
        return data

    def _read_on(self) -> Generator[bytes, None, None]:
        """Yield the next chunk, and then those behind it, which are read ahead."""

        def read(start: int) -> bytes:
            return self._store.read(self._name, start=start, nbytes=self._chunk_nbytes)

        while True:
            yield read(self._next)
            starts = count(self._next, self._chunk_nbytes)
            known = takewhile(lambda start: start < self._expected, starts)
            yield from map_ahead(read, known, self._ahead, most=self._ahead - 1)

    def as_stream(self) -> io.BufferedReader:
        """Return the file as a stream, which takes bounded memory.

        When the stream is closed, `watch` has seen each chunk that was read, in order.
        """
        return io.BufferedReader(self, 1 << 16)

    def close(self) -> None:
        """Stop reading ahead, and wait until `watch` has been given each chunk that was taken."""
        try:
            self._coming.close()
            while self._watched:
                self._watched.popleft().result()
            self._watcher.shutdown()
        finally:
            super().close()
