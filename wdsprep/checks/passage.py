"""One pass over a file: each byte is read once and hashed in a thread of its own, while the walk
over its samples looks at those that interest it.

SHA-256 is nearly all of the time, and it runs without Python's lock. So the walk must stay as far
ahead of it as memory allows, and no further.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from wdsprep.dataset.digests import DigestKind
from wdsprep.store.base import Store
from wdsprep.store.local import LocalStore

LOCAL_NBYTES = 1 << 20  # read at once: what the processor's cache can hold
REMOTE_NBYTES = 8 << 20
HASHED_BEHIND = 2  # chunks that wait for their hash
MAX_PIECE_NBYTES = 1 << 28  # a damaged header may state any size


class Passage:
    """Reads forward, and back no further than a chunk."""

    def __init__(self, store: Store, name: str, digest: DigestKind) -> None:
        self._store, self._name = store, name
        self._chunk_nbytes = LOCAL_NBYTES if isinstance(store, LocalStore) else REMOTE_NBYTES
        self._reading = ThreadPoolExecutor(1, "verify-read")
        self._hashing = ThreadPoolExecutor(1, "verify-hash")
        self._hash = digest.new()
        self._hashes: deque[Future[object]] = deque()
        self._before = self._chunk = b""
        self._start = 0  # of the chunk
        self._next: Future[bytes] | None = None
        self._ended = False

    def __enter__(self) -> "Passage":
        return self

    def __exit__(self, *_: object) -> None:
        self._reading.shutdown(cancel_futures=True)
        self._hashing.shutdown(cancel_futures=True)

    def _read(self, start: int) -> bytes:
        return self._store.read(self._name, start=start, nbytes=self._chunk_nbytes)

    @property
    def nbytes(self) -> int:
        """Read so far."""
        return self._start + len(self._chunk)

    def at(self, offset: int, nbytes: int) -> bytes:
        """A tape, as `wdsprep.dataset.tar.members` reads."""
        inside = offset - self._start
        if 0 <= inside <= len(self._chunk) - nbytes:
            return self._chunk[inside : inside + nbytes]
        return bytes(self.view(offset, nbytes))

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The same without a copy where one chunk has it all."""
        while offset >= self.nbytes and self._advance():
            pass
        inside = offset - self._start
        if 0 <= inside <= len(self._chunk) - nbytes:
            return memoryview(self._chunk)[inside : inside + nbytes]
        return memoryview(self._across(offset, min(nbytes, MAX_PIECE_NBYTES)))

    def _across(self, offset: int, nbytes: int) -> bytes:
        """Bytes that lie in more than one chunk, or before the one at hand."""
        inside = offset - self._start
        parts = [self._before[len(self._before) + inside :]] if inside < 0 else []
        parts.append(self._chunk[max(0, inside) : max(0, inside + nbytes)])
        there = sum(map(len, parts))
        while there < nbytes and self._advance():
            parts.append(self._chunk[: nbytes - there])
            there += len(parts[-1])
        return b"".join(parts)[:nbytes]

    def _advance(self) -> bool:
        """Go on to the next chunk; False at the end of the file."""
        if self._ended:
            return False
        chunk = self._next.result() if self._next else self._read(self.nbytes)
        if len(chunk) == self._chunk_nbytes:
            self._next = self._reading.submit(self._read, self.nbytes + len(chunk))
        else:
            self._ended = True
        if not chunk:
            return False
        self._start = self.nbytes
        self._before, self._chunk = self._chunk, chunk
        self._take_in(chunk)
        return True

    def _take_in(self, chunk: bytes) -> None:
        if self._ended and not self._start:  # a small file: it has the threads to itself
            self._hash.update(chunk)
            return
        if len(self._hashes) >= HASHED_BEHIND:
            self._hashes.popleft().result()
        self._hashes.append(self._hashing.submit(self._hash.update, chunk))

    def rest(self) -> Iterator[int]:
        """Read what is left; yields how much has been read."""
        while self._advance():
            yield self.nbytes

    def digest(self) -> str:
        """Of all that has been read."""
        while self._hashes:
            self._hashes.popleft().result()
        return self._hash.hexdigest()
