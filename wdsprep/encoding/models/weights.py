"""The digest that tells two models apart, over the names and bytes of their files.

A worker checks with it that it has the driver's model. Those of a machine would all read the same
20 GB for it, so what was computed of large files is kept in the user's cache folder, by their
sizes, times and inodes, and who comes while another computes waits for that. A folder that cannot
be written to costs the time alone. What was kept of models that nobody has used for half a year is
deleted by whoever keeps something of another.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

from wdsprep.dataset.digests import DigestKind
from wdsprep.dataset.read_ahead import read_each
from wdsprep.errors import WorkError

BLOCK_NBYTES = 8 << 20
FILES_AT_ONCE = 4
LARGE_NBYTES = 1_000_000_000
"""Below this, computing takes a second."""
HEAD_NBYTES = 1 << 24
"""The largest header that is read: 100,000 tensors have as much."""
SETTLED_S = 2.0
"""A file that is younger may be written again without getting another time."""

UNUSED_S = 180 * 24 * 3600


def weights_digest(folder: Path, files: Sequence[str], kind: DigestKind) -> str:
    """Return the digest of files that `b3sum FILES | b3sum` prints."""
    record = _record_of(folder, kind)
    if record and sum((folder / file).stat().st_size for file in files) >= LARGE_NBYTES:
        sums = _kept_sums(record, folder, files, kind)
    else:
        sums = _sums(folder, files, kind)
    return kind.hex("".join(f"{sums[file]}  {file}\n" for file in files).encode())


class TensorEntry(NamedTuple):
    """A tensor as the header of a safetensors file describes it."""

    dtype: str
    numel: int
    begin: int
    end: int
    """the end of its bytes, counted from the end of the header"""
    shape: tuple[int, ...] = ()


def read_head(file: IO[bytes]) -> tuple[dict[str, TensorEntry], int]:
    """Return the tensors of a safetensors file by name, and where their bytes begin.

    Raise ValueError for what is no header, or claims more than the file has. It is read by
    hand, without torch.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(8)
    nbytes = int.from_bytes(head, "little")
    if len(head) < 8 or nbytes > min(size - 8, HEAD_NBYTES):
        raise ValueError("its header is longer than it")
    try:
        listed = json.loads(file.read(nbytes))
        entries = {
            name: _entry(one, size - 8 - nbytes)
            for name, one in listed.items()
            if name != "__metadata__"
        }
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"its header is not one: {error}") from None
    return entries, 8 + nbytes


def tensors_in(path: Path) -> list[TensorEntry]:
    try:
        with path.open("rb") as file:
            return list(read_head(file)[0].values())
    except ValueError as error:
        raise WorkError(f"{path} is no safetensors file ({error})") from None


def _entry(listed: Mapping[str, Any], nbytes: int) -> TensorEntry:
    dtype, shape, (begin, end) = listed["dtype"], listed["shape"], listed["data_offsets"]
    if not all(isinstance(number, int) for number in (begin, end, *shape)):
        raise ValueError("a tensor has a place or a shape that is no whole number")
    if not 0 <= begin <= end <= nbytes or not 0 <= (numel := prod(shape)) <= 8 * (end - begin):
        raise ValueError("a tensor is larger than its bytes")
    return TensorEntry(str(dtype), numel, begin, end, tuple(shape))


def _sums(folder: Path, files: Sequence[str], kind: DigestKind) -> dict[str, str]:
    """Hash files side by side, since hashing leaves the GIL."""
    found = read_each(lambda file: _sum(folder / file, kind), files, FILES_AT_ONCE)
    return dict(zip(files, found, strict=True))


def _sum(path: Path, kind: DigestKind) -> str:
    found = kind.new()
    buffer = memoryview(bytearray(BLOCK_NBYTES))
    with path.open("rb", buffering=0) as file:
        while nbytes := file.readinto(buffer):
            found.update(buffer[:nbytes])
    return found.hexdigest()


def _kept_sums(path: Path, folder: Path, files: Sequence[str], kind: DigestKind) -> dict[str, str]:
    """Return the digests, of which those that are kept need not be computed.

    Missing ones are computed and kept, by one process at a time.
    """
    with _alone(path):
        record = _read(path)
        marks = {file: _mark(folder / file) for file in files}
        known = {
            file: record[file]["digest"]
            for file, mark in marks.items()
            if record.get(file, {}).get("mark") == mark
        }
        computed = _sums(folder, [file for file in files if file not in known], kind)
        settled = time.time_ns() - SETTLED_S * 1e9
        kept = {
            file: {"mark": marks[file], "digest": digest}
            for file, digest in computed.items()
            if marks[file] == _mark(folder / file) and marks[file][1] < settled
        }
        if kept:
            _write(path, record | kept)
            _delete_unused(path.parent)
    return known | computed


def _mark(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def _record_of(folder: Path, kind: DigestKind) -> Path | None:
    """Return the file that keeps digests of this folder, as this machine sees it.

    Another machine may have other files there. Return None for a user without a home.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        return None
    name = DigestKind.BLAKE3.hex(f"{kind.value} {socket.gethostname()} {folder}".encode())
    return cache / "wdsprep" / "weights" / f"{name[:32]}.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    with contextlib.suppress(OSError):
        os.utime(path)
    lines = record.items() if isinstance(record, dict) else ()
    return {file: line for file, line in lines if isinstance(line, dict)}


def _write(path: Path, record: dict[str, Any]) -> None:
    draft = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        draft.write_text(json.dumps(record, indent=1))
        draft.replace(path)


def _delete_unused(folder: Path) -> None:
    """Delete records, and the files of their locks, that nobody has used for long."""
    oldest = time.time() - UNUSED_S
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.stat().st_mtime < oldest:
                path.unlink()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let one process of this machine compute at a time, where files can be locked."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
