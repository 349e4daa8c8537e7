"""Cache samples of S3 shards on a local disk, such as NVMe.

The next pass, the next start and other processes read them there.

Each shard has one sparse file, named by what the shard holds, so a changed dataset has other files.
The file begins with a word for each sample, 0 until the sample is there. After the words, samples
lie as far apart as in the tar. A word is the sample's length and CRC-32, and is written after the
sample.

The digest of a shard says what it should hold, not which bytes came: a damaged shard and the one
that replaces it have the same digest, and the digest proves nothing before the whole shard is here.
So the CRC-32 begins with the stamp of the object that the bytes are from: its ETag and time, which
a loader looks up when it opens the shard (one HEAD, beside the GET of its index). A shard that was
written anew has another stamp. Then no word fits any more, whatever the bytes are, and its samples
are fetched again.

So no lock is needed. A process that is killed leaves samples without words, and a machine that goes
down leaves, at worst, words that do not fit: both are fetched again. Two processes that fetch the
same sample write the same bytes to the same place. A file that another process removes stays
readable for those who have it open, and the next process makes it anew.

Samples are kept one by one, as they were fetched. A first batch of 1,024 samples out of 64 windows
would otherwise need 327 times its bytes as whole shards, 14 times as pieces of 4 MB.

The limit holds over all processes: each looks how full the folder is, may then add a 64th of what
is free, and looks again. When the folder is full, what is there stays, since every pass over the
data has another order. With room for half the shards, half the reads are served from here, whereas
dropping the longest unused would serve 16 %. Only files that no loader has claimed for a while are
removed. A loader claims the files of its dataset by touching them as it goes.
"""

import errno
import hashlib
import logging
import os
import re
import struct
import threading
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path

from wdsprep.errors import StoreError, UsageError
from wdsprep.store.base import expand_home

VERSION = 1
STALE_S = 900  # a file without a claim for so long may be removed
CLAIM_S = STALE_S // 4
FULL_S = 10  # a full cache is looked at again after so long
SHARERS = 64  # processes that may fill one cache at a time without going over its limit
PAGE, WORD = 4096, 8
NAME = re.compile(r"[0-9a-f]{32}\.samples")
CacheDir = tuple[Path, int]
"""A cache folder on a local disk, and the bytes that it may hold."""
Fetch = Callable[[int, memoryview], int]
"""A function that fills memory with samples from one on, and returns how many bytes came."""
_log = logging.getLogger("wdsprep")


def open_cache_dir(folder: "str | os.PathLike[str] | None", nbytes: int | None) -> CacheDir | None:
    """Make a cache folder, and return it with its limit, or None if no cache is asked for."""
    if folder is None and nbytes is None:
        return None
    if folder is None or nbytes is None:
        raise UsageError("give both cache=, a folder, and cache_nbytes=, the bytes it may hold")
    path = expand_home(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "permission denied")
    except OSError as error:
        raise StoreError(
            f"cannot use the cache {path} ({error.strerror}): give another folder"
        ) from error
    return path, nbytes


class Cache:
    """The cached samples of one dataset, for any number of threads.

    `contents` identifies what each shard holds.
    """

    def __init__(self, where: CacheDir, contents: Sequence[str]) -> None:
        self._folder, self._limit = where
        names = (f"{VERSION} {content}".encode() for content in contents)
        digests = (hashlib.blake2b(name, digest_size=16).hexdigest() for name in names)
        self._paths = [self._folder / f"{digest}.samples" for digest in digests]
        self._names = frozenset(path.name for path in self._paths)
        self._lock = threading.Lock()
        self._free = 0  # bytes that may be added
        self._claimed = self._full = float("-inf")  # when that was last
        self._complained = False

    def read(
        self,
        shard: int,
        offsets: Sequence[int],
        first: int,
        stop: int,
        data: memoryview,
        fetch: Fetch,
        *,
        stamp: str = "",
    ) -> int:
        """Fill `data` with the samples [first, stop) of a shard; return how many bytes came.

        `fetch` brings the samples from the first to the last one that is missing. They are
        then written to the cache, as far as it has room. `stamp` is the stamp that the object
        has now.
        """
        path, seed = self._paths[shard], zlib.crc32(stamp.encode())
        top = -(-len(offsets) * WORD // PAGE) * PAGE  # where samples begin in the file

        def word(number: int) -> int:
            """Return the word that marks a sample as complete."""
            start, end = (offsets[n] - offsets[first] for n in (number, number + 1))
            return (end - start) % (1 << 32) << 32 | zlib.crc32(data[start:end], seed)

        missing = [first, stop - 1]
        with self._warn_of_failure():
            if time.monotonic() - self._claimed > CLAIM_S:
                with self._lock:
                    self._measure()
            with suppress(FileNotFoundError), _opened(path, os.O_RDONLY) as fd:
                words = _read_words(fd, first, stop)
                if any(words):
                    os.preadv(fd, [data], top + offsets[first])
                missing = [
                    n for n, known in enumerate(words, first) if not known or known != word(n)
                ]
        if not missing:
            return len(data)
        low, high = missing[0], missing[-1] + 1
        start, end = (offsets[number] - offsets[first] for number in (low, high))
        count = fetch(low, data[start:end])
        with self._warn_of_failure(), _opened(path, os.O_RDWR | os.O_CREAT) as fd:
            came = bisect_right(offsets, offsets[low] + count, low, high + 1) - 1
            known_words = enumerate(_read_words(fd, low, came), low)
            # samples with a word are in the file already, and need no room
            nbytes = (0 if known else offsets[n + 1] - offsets[n] for n, known in known_words)
            granted = low + self._grant([*accumulate(nbytes)])
            words = tuple(map(word, range(low, granted)))
            _write(fd, data[start : offsets[granted] - offsets[first]], top + offsets[low])
            _write(fd, memoryview(struct.pack(f"<{len(words)}Q", *words)), low * WORD)
        return len(data) if count == end - start else start + count  # the tar was cut

    @contextmanager
    def _warn_of_failure(self) -> Iterator[None]:
        """Catch errors of the disk, and warn of the first: they cost speed, not the run."""
        try:
            yield
        except OSError as error:
            if not self._complained:
                self._complained = True
                _log.warning(
                    "the cache failed (%s): samples that are not in it are read from S3", error
                )

    def _grant(self, nbytes: Sequence[int]) -> int:
        """Return how many samples may be written, if the first n take `nbytes[n - 1]` together.

        Their bytes no longer count as free. If not even the first may be written, the folder counts
        as full for a while.
        """
        if not nbytes:
            return 0
        with self._lock:
            now = time.monotonic()
            if self._free < nbytes[-1] and now - self._full > FULL_S:
                self._measure()
                if self._free < nbytes[0]:
                    self._full = now
            count = bisect_right(nbytes, self._free)
            self._free -= nbytes[count - 1] if count else 0
            return count

    def _measure(self) -> None:
        """Mark the files of this dataset as in use, and find out how many bytes may be added.

        If the folder is too full, remove files from it, first those that are not in use.
        """
        self._claimed = time.monotonic()
        used = 0
        files: list[tuple[bool, float, int, Path]] = []
        for entry in os.scandir(self._folder):
            if not NAME.fullmatch(entry.name):
                continue
            with suppress(FileNotFoundError):
                status, is_ours = entry.stat(), entry.name in self._names
                nbytes, age = status.st_blocks * 512, time.time() - status.st_mtime
                is_live = is_ours or age <= STALE_S
                files.append((is_live, status.st_mtime, nbytes, Path(entry.path)))
                used += nbytes
                if is_ours and age > CLAIM_S:
                    os.utime(entry.path)
        for is_live, _, nbytes, path in sorted(files):
            if used > self._limit - (0 if is_live else self._limit // 10):
                path.unlink(missing_ok=True)
                used -= nbytes
        self._free = max(0, self._limit - used) // SHARERS


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


def _read_words(fd: int, first: int, stop: int) -> tuple[int, ...]:
    nbytes = (stop - first) * WORD
    data = os.pread(fd, nbytes, first * WORD).ljust(nbytes, b"\0")
    return struct.unpack(f"<{stop - first}Q", data)


def _write(fd: int, view: memoryview, start: int) -> None:
    while view:
        count = os.pwrite(fd, view, start)
        view, start = view[count:], start + count
