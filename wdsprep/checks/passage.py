"""One pass over a file: each byte is read once and hashed, while the walk over its samples looks at
those that interest it.
"""

from collections.abc import Iterator

from wdsprep.dataset.digests import DigestKind
from wdsprep.dataset.receipts import Shard
from wdsprep.store.base import Chunks, Store

MAX_PIECE_NBYTES = 1 << 28  # a damaged header may state any size


class Passage:
    """Reads forward, and back no further than a chunk."""

    def __init__(self, store: Store, shard: Shard, kind: DigestKind) -> None:
        self._hash = kind.new()
        self._chunks = Chunks(store, shard.name, watch=self._hash.update, expected=shard.nbytes)
        self._before = self._chunk = b""
        self._start = 0  # of the chunk

    def __enter__(self) -> "Passage":
        return self

    def __exit__(self, *_: object) -> None:
        self._chunks.close()

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
        chunk = self._chunks.next()
        if not chunk:
            return False
        self._start = self.nbytes
        self._before, self._chunk = self._chunk, chunk
        return True

    def rest(self) -> Iterator[int]:
        """Read what is left; yields how much has been read."""
        while self._advance():
            yield self.nbytes

    def digest(self) -> str:
        """Of all that has been read; nothing is read after it."""
        self._chunks.close()
        return self._hash.hexdigest()
