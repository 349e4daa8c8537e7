"""Plain USTAR with every changing field fixed (time, owner, mode): equal samples, equal bytes.

Two threads hash and write each block of 4 MB while the caller builds the headers of the next one.
Many small updates of the hash, and `writev` in place of joining what is small, both cost more than
the copy that they save. What is large is not copied: with arrays of 157 kB that takes 0.6 of the
time, and 0.8 of the CPU's.
"""

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from zlib import adler32

from blake3 import blake3

from wdsprep.dataset.tar import BLOCK, END, ZEROS
from wdsprep.dataset.tar.members import encode_index, leads_out
from wdsprep.errors import TarError
from wdsprep.store.base import Sink

FLUSH_NBYTES = 4 << 20
LARGE_NBYTES = 1 << 16
"""The bytes from which it costs less to write and hash a piece by itself than to copy it."""
MAX_MEMBER_NBYTES = 8**11 - 1
Buffer = bytes | memoryview
"""Bytes to be written. The length of a view is how many bytes it has."""
Data = Buffer | tuple[Buffer, ...]
"""The data of a member, in one piece or in several that follow one another."""

_BEFORE_SIZE = b"0000644\0" + b"0000000\0" * 2  # mode, uid, gid
_MTIME = b"00000000000\0"
_AFTER_SUM = b"0" + bytes(100) + b"ustar\x0000" + bytes(64) + b"0000000\0" * 2
_FIXED_SUM = sum(_BEFORE_SIZE + _MTIME + b" " * 8 + _AFTER_SUM)
_HEADER = struct.Struct("100s 24s 12s 12s 8s 189s 167s")  # fills each field with zeros


def header(name: str, nbytes: int) -> bytes:
    """Return the 512 bytes before a member's data.

    They have its name in two fields: a name of over 100 bytes is split at a slash, or refused.
    """
    try:
        base, prefix = name.encode(), b""
    except UnicodeEncodeError:  # half a surrogate pair, or bytes that are no UTF-8
        base = b""
    if not base or b"\0" in base:
        raise TarError(f"{name!r} cannot be the name of a tar member")
    if len(base) > 100:
        slash = base.find(b"/", len(base) - 101)
        if not 0 < slash <= 155 or slash == len(base) - 1:
            raise TarError(f"{name!r} is too long for the name of a file in a tar: shorten it")
        base, prefix = base[slash + 1 :], base[:slash]
    if nbytes > MAX_MEMBER_NBYTES:
        raise TarError(f"{name}: {nbytes:,} bytes are more than a tar can hold (8 GiB): leave out")
    size = b"%011o\0" % nbytes
    # The lower half of Adler-32 is the sum of the bytes and one, up to 65,519: no name in UTF-8
    # with a prefix and a size comes to so much.
    varying = (adler32(base + size + prefix) & 0xFFFF) - 1
    total = b"%06o\0 " % (_FIXED_SUM + varying)
    return _HEADER.pack(base, _BEFORE_SIZE, size, _MTIME, total, _AFTER_SUM, prefix)


def pieces_of(data: Data) -> tuple[Buffer, ...]:
    return data if isinstance(data, tuple) else (data,)


def nbytes_of(data: Data) -> int:
    return sum(map(len, pieces_of(data)))


class TarWriter:
    """A writer of a tar of samples.

    After `finish` its size, digest and index are known. Leaving the block without `finish` leaves
    the tar without end.
    """

    def __init__(self, sink: Sink, *, hashed: bool = True) -> None:
        """Write the tar to this sink. If it is not `hashed`, its digest stays empty."""
        self._sink = sink
        self._hash = blake3() if hashed else None
        self._blocks: list[Buffer] = []
        self._offsets = array("Q", [0])
        self._keys: set[str] = set()
        self._reserved: set[str] = set()
        self._names: Sequence[str] = ()
        self._flushed_at = 0
        self._background = ThreadPoolExecutor(2, "tar-writer")
        self._pending: list[Future[object]] = []
        self.nbytes = 0

    def __enter__(self) -> "TarWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._background.shutdown(cancel_futures=True)

    @property
    def samples(self) -> int:
        return len(self._offsets) - 1

    def add(self, key: str, fields: Iterable[tuple[str, Data]]) -> None:
        """Append one sample: a member `{key}.{field}` for each field, in the order given.

        The data must not change afterwards. A sample that is refused leaves no trace: the
        next one may be added.
        """
        blocks: list[Buffer] = []
        names = []
        nbytes = self.nbytes
        for name, data in fields:
            if type(data) is bytes:  # as all of image shards is
                size = len(data)
                blocks += (header(f"{key}.{name}", size), data)
            else:
                size = nbytes_of(data)
                blocks += (header(f"{key}.{name}", size), *pieces_of(data))
            padding = -size % BLOCK
            blocks.append(ZEROS[:padding])
            nbytes += BLOCK + size + padding
            names.append(name)
        if key in self._reserved:
            self._reserved.remove(key)
        else:
            self._check(key, names)
            self._keys.add(key)
        self._blocks += blocks
        self._offsets.append(nbytes)
        self.nbytes = nbytes
        if nbytes - self._flushed_at >= FLUSH_NBYTES:
            self._flush()

    def add_tarred(
        self, keys: Sequence[str], sizes: Sequence[int], blocks: Iterable[bytes | memoryview]
    ) -> None:
        """Append samples that lie in another tar of wdsprep, without packing them again.

        They have these keys and sizes, and `blocks` together are their bytes.
        """
        for key, size in zip(keys, sizes, strict=True):
            self._check_key(key)
            self._keys.add(key)
            self.nbytes += size
            self._offsets.append(self.nbytes)
        self._blocks += blocks
        if self.nbytes - self._flushed_at >= FLUSH_NBYTES:
            self._flush()

    def reserve(self, key: str, names: Sequence[str]) -> None:
        """Reserve the key of a sample that is added later, with these fields.

        Raise now the error that `add` would raise then.
        """
        for name in names:
            header(f"{key}.{name}", 0)
        self._check(key, names)
        self._keys.add(key)
        self._reserved.add(key)

    def _check(self, key: str, names: Sequence[str]) -> None:
        """Raise TarError if a reader would not find this key with these fields as one sample."""
        self._check_key(key)
        if names == self._names:  # as of nearly all samples
            return
        if not names or len(set(names)) < len(names):
            raise TarError(f"{key!r} has no fields, or one of them twice")
        for name in names:
            if not name or "/" in name or name != name.lower():
                raise TarError(f"{name!r} cannot be the name of a field of {key!r}")
        self._names = names

    def _check_key(self, key: str) -> None:
        base = key.rpartition("/")[2]
        if not base or "." in base or leads_out(key):
            raise TarError(f"{key!r} cannot be the key of a sample")
        if key in self._keys:
            raise TarError(f"{key!r} is the key of an earlier sample too")

    def finish(self) -> None:
        """Write the rest and the end of the tar."""
        self._blocks.append(END)
        self._flush()
        self._wait()
        self.nbytes += len(END)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest() if self._hash else ""

    @property
    def index(self) -> bytes:
        return encode_index(self._offsets)

    def _flush(self) -> None:
        pieces = [*join_small(self._blocks)]
        self._blocks.clear()
        self._flushed_at = self.nbytes
        self._wait()
        self._pending = [self._background.submit(self._sink.writelines, pieces)]
        if self._hash:
            self._pending.append(self._background.submit(_update, self._hash, pieces))

    def _wait(self) -> None:
        """Wait until the last block is written and hashed, so that at most two are in memory.

        If writing or hashing failed, raise the error of that.
        """
        for task in self._pending:
            task.result()


def _update(digest: blake3, pieces: Iterable[Buffer]) -> None:
    for piece in pieces:
        digest.update(piece)


def join_small(blocks: Iterable[Buffer]) -> Iterator[Buffer]:
    """Yield blocks in order, with small ones that follow each other joined into one."""
    small: list[Buffer] = []
    for block in blocks:
        if len(block) < LARGE_NBYTES:
            small.append(block)
            continue
        yield b"".join(small)
        yield block
        small = []
    yield b"".join(small)
