"""The digest that tells two models apart, over the names and bytes of their files.

A worker checks with it that it has the driver's model. Those of a machine would all read the same
20 GB for it, so what was computed of large files is kept in the user's cache folder, by their
sizes, times and inodes, and who comes while another computes waits for that. A folder that cannot
be written to costs the time alone.
"""

import contextlib
import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from wdsprep.dataset.digests import DigestKind

BLOCK_NBYTES = 8 << 20
LARGE_NBYTES = 1_000_000_000
"""Below this, computing takes a second."""
SETTLED_S = 2.0
"""What was written less long ago may be written again without another time."""


def weights_digest(folder: Path, files: Sequence[str], kind: DigestKind) -> str:
    """What `b3sum FILES | b3sum` says."""
    record = _record_of(folder, kind)
    if record and sum((folder / file).stat().st_size for file in files) >= LARGE_NBYTES:
        sums = _kept_sums(record, folder, files, kind)
    else:
        sums = _sums(folder, files, kind)
    return kind.hex("".join(f"{sums[file]}  {file}\n" for file in files).encode())


def read_head(file: IO[bytes]) -> tuple[dict[str, Any], int]:
    """The tensors of a safetensors file by name, as its header has them, and where their bytes
    begin; read by hand, without torch."""
    (nbytes,) = struct.unpack("<Q", file.read(8))
    if nbytes > os.fstat(file.fileno()).st_size:
        raise ValueError("its header is longer than it")
    head = json.loads(file.read(nbytes))
    return {name: entry for name, entry in head.items() if name != "__metadata__"}, 8 + nbytes


def _sums(folder: Path, files: Sequence[str], kind: DigestKind) -> dict[str, str]:
    """Hashing leaves the GIL, so files go side by side."""
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda file: _sum(folder / file, kind), files)
        return dict(zip(files, found, strict=True))


def _sum(path: Path, kind: DigestKind) -> str:
    found = kind.new()
    buffer = memoryview(bytearray(BLOCK_NBYTES))
    with path.open("rb", buffering=0) as file:
        while nbytes := file.readinto(buffer):
            found.update(buffer[:nbytes])
    return found.hexdigest()


def _kept_sums(path: Path, folder: Path, files: Sequence[str], kind: DigestKind) -> dict[str, str]:
    """Reads what is kept, and computes and keeps what is not, one process at a time."""
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
    return known | computed


def _mark(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def _record_of(folder: Path, kind: DigestKind) -> Path | None:
    """Of this folder as this machine sees it: another may have other files there. None for who has
    no home."""
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
    lines = record.items() if isinstance(record, dict) else ()
    return {file: line for file, line in lines if isinstance(line, dict)}


def _write(path: Path, record: dict[str, Any]) -> None:
    draft = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        draft.write_text(json.dumps(record, indent=1))
        draft.replace(path)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """As the one process here that computes this; all of them at once where files cannot be
    locked."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
