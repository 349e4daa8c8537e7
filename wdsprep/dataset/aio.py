"""Many positioned reads in one system call.

Between two reads a thread needs the interpreter's lock for a moment, and where a few threads read
a hundred kilobytes at a time they spend as long waiting for it as reading. `io_submit` of Linux
takes a list of reads; those of a file that is opened as usual it does before it returns, as if each
had been a `preadv`. Beside `os.preadv` in the same threads it brings 1.2 times the samples where
they have 166 KB and a batch 64 of them, and 1.4 times where they have 20 KB and a batch 1,024 (two
cores, page cache). Look again when Python runs without that lock. Where there is no such call,
because the kernel leaves it out, a sandbox forbids it, or others have used up what the machine
allows (`fs.aio-max-nr`), each read is a call of its own.
"""

import ctypes
import errno
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsprep.dataset.random_numbers import Ints

READS_AT_ONCE = 256  # reads in a call
_PREADV = 7
_READ = np.dtype(
    {
        "names": ["data", "what", "fd", "vectors", "count", "start"],
        "formats": ["u8", "u2", "u4", "u8", "u8", "i8"],
        "offsets": [0, 16, 20, 24, 32, 40],
        "itemsize": 64,
    }
)
_EVENT = np.dtype(
    {"names": ["data", "result"], "formats": ["u8", "i8"], "offsets": [0, 16], "itemsize": 32}
)
_libc = ctypes.CDLL(None, use_errno=True)
_libc_at_once = ctypes.PyDLL(None, use_errno=True)  # for calls that never wait: keeps the lock
# Numbers of calls for which the C library has no functions.
_CALLS = ("io_setup", "io_destroy", "io_getevents", "io_submit")
SYSCALLS = {
    ("linux", "x86_64"): dict(zip(_CALLS, (206, 207, 208, 209), strict=True)),
    ("linux", "aarch64"): dict(zip(_CALLS, (0, 1, 4, 2), strict=True)),
}
Bytes = NDArray[np.uint8]
Vectors = NDArray[np.uint64]  # contiguous; of each read an address and a length for each part


def read_all(fds: Sequence[int], starts: Sequence[int], vectors: Vectors) -> Ints:
    """Do many reads of files, and return for each how many bytes came.

    The bytes go to the addresses in `vectors`. A read that fails raises nothing: its number is 0
    or negative. The caller repeats a read that brought too few bytes, and so learns why.
    """
    came = np.zeros(len(fds), np.int64)
    queue = None
    with suppress(OSError):
        try:
            queue = spare_queues.pop()
        except IndexError:
            queue = _Queue()
    read = _one_by_one if queue is None else queue.read
    try:
        for top in range(0, len(fds), READS_AT_ONCE):
            batch = slice(top, top + READS_AT_ONCE)
            came[batch] = read(fds[batch], starts[batch], vectors[batch])
    except BaseException:
        if queue is not None:
            queue.end()
        raise
    if queue is not None:
        spare_queues.append(queue)
    return came


def address_of(data: NDArray[Any]) -> int:
    """Return the address of an array's first byte. The caller must keep the array alive."""
    address: int = data.__array_interface__["data"][0]
    return address


class _Queue:
    """A queue of the kernel for many reads at once, used by one thread at a time."""

    def __init__(self) -> None:
        self._id = ctypes.c_ulong(0)
        _call("io_setup", ctypes.c_uint(READS_AT_ONCE), ctypes.byref(self._id))
        self._reads = np.zeros(READS_AT_ONCE, _READ)
        self._reads["what"] = _PREADV
        self._reads["data"] = np.arange(READS_AT_ONCE)
        steps = np.arange(READS_AT_ONCE, dtype=np.uint64) * _READ.itemsize
        self._list = address_of(self._reads) + steps
        self._events = np.zeros(READS_AT_ONCE, _EVENT)
        self._list_at, self._events_at = address_of(self._list), address_of(self._events)
        try:  # nothing yet: a sandbox may allow one call and forbid another
            _call("io_submit", self._id, ctypes.c_long(0), ctypes.c_void_p(self._list_at))
            self._found(least=0, most=1)
        except OSError:
            self.end()
            raise

    def end(self) -> None:
        """Wait until all reads have ended, and give the queue back to the kernel."""
        _call("io_destroy", self._id)

    def read(self, fds: Sequence[int], starts: Sequence[int], vectors: Vectors) -> Ints:
        reads = self._reads[: len(fds)]
        reads["fd"], reads["start"], reads["count"] = fds, starts, vectors.shape[1]
        reads["vectors"] = address_of(vectors) + np.arange(len(fds)) * vectors.strides[0]
        came = np.zeros(len(fds), np.int64)
        first = begun = 0
        while first < len(fds):
            where = ctypes.c_void_p(self._list_at + first * self._list.itemsize)
            try:
                count = _call("io_submit", self._id, ctypes.c_long(len(fds) - first), where)
                begun += count
            except OSError:  # one that cannot begin is left out
                count = 1
            first += count
        least = 0  # as a rule all is there by now
        while begun:
            events = self._found(least=least, most=begun)
            came[events["data"]] = events["result"]
            begun -= len(events)
            least = 1
        return came

    def _found(self, *, least: int, most: int) -> NDArray[Any]:
        where = ctypes.c_void_p(self._events_at)
        counts = ctypes.c_long(least), ctypes.c_long(most)
        while True:
            try:
                count = _call("io_getevents", self._id, *counts, where, None, waits=least > 0)
            except InterruptedError:
                continue
            return self._events[:count]


def _call(name: str, *words: Any, waits: bool = True) -> int:
    numbers = SYSCALLS.get((sys.platform, platform.machine()))
    if numbers is None or sys.maxsize < 2**32:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    library = _libc if waits else _libc_at_once
    result: int = library.syscall(ctypes.c_long(numbers[name]), *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


spare_queues: list[_Queue] = []  # of no thread now: making one and ending it takes long
os.register_at_fork(after_in_child=lambda: spare_queues.clear())  # they are the parent's


def _one_by_one(fds: Sequence[int], starts: Sequence[int], vectors: Vectors) -> list[int]:
    count = vectors.shape[1]
    places = [ctypes.c_void_p(address_of(parts)) for parts in vectors]
    return [
        _libc.preadv(fd, where, count, ctypes.c_longlong(start))
        for fd, where, start in zip(fds, places, starts, strict=True)
    ]
