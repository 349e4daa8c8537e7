"""The digest that tells two models apart, over the names and bytes of their files.

A worker checks with it that it has the driver's model. All workers of a machine would read the same
20 GB for it, so the digests of large files are kept in the user's cache folder, by their sizes,
times and inodes, and a worker that comes while another computes waits for it. If the folder cannot
be written, this only costs time. Records of models that nobody has used for half a year are deleted
when another record is written.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

from blake3 import blake3

from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.thread_map import read_each
from wdsprep.errors import WorkError

BLOCK_NBYTES = 8 << 20
FILES_AT_ONCE = 4
LARGE_NBYTES = 1_000_000_000
"""The size from which digests are kept: below it, computing takes a second."""
HEAD_NBYTES = 1 << 24
"""The largest header that is read, which is enough for 100,000 tensors."""
SETTLED_S = 2.0
"""The age below which a file may be written again without getting another time."""

UNUSED_S = 180 * 24 * 3600


def weights_digest(folder: Path, files: Sequence[str]) -> str:
    """Return one digest of a model's files, the same that `b3sum FILES | b3sum` prints."""
    record = _record_path(folder)
    if record and sum((folder / file).stat().st_size for file in files) >= LARGE_NBYTES:
        sums = _cached_digests(record, folder, files)
    else:
        sums = _digest_files(folder, files)
    return hex_digest("".join(f"{sums[file]}  {file}\n" for file in files).encode())


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalModel:
    """A model on this machine: its files, and the digest by which it is known."""

    name: str
    """the name as the user gave it"""
    folder: str
    revision: str
    """the commit; empty for a folder"""
    files: tuple[str, ...]
    sizes: tuple[int, ...]
    """the bytes of each of them"""
    weights: str
    """a digest over the names and bytes of `files`"""


def check_digest(model: LocalModel, folder: Path) -> None:
    """Raise WorkError if the files in a folder of this node are not those of the driver's model."""
    try:
        digest = weights_digest(folder, model.files)
    except OSError as error:
        raise WorkError(f"{model.name} cannot be read on this node: {error}") from None
    if digest != model.weights:
        raise WorkError(
            f"{folder} holds other weights of {model.name} than the driver has: copy the driver's "
            "files there"
        )


class TensorEntry(NamedTuple):
    """A tensor as the header of a safetensors file describes it."""

    dtype: str
    numel: int
    begin: int
    end: int
    """the end of its bytes, counted from the end of the header"""
    shape: tuple[int, ...] = ()


def read_tensor_header(file: IO[bytes]) -> tuple[dict[str, TensorEntry], int]:
    """Return the tensors of a safetensors file by name, and the offset of their bytes.

    Raise ValueError if the header is invalid or claims more than the file has. It is parsed here,
    without torch.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(8)
    nbytes = int.from_bytes(head, "little")
    if len(head) < 8 or nbytes > min(size - 8, HEAD_NBYTES):
        raise ValueError("its header is longer than the file")
    try:
        listed = json.loads(file.read(nbytes))
        entries = {
            name: _check_entry(one, size - 8 - nbytes)
            for name, one in listed.items()
            if name != "__metadata__"
        }
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"its header is invalid: {error}") from None
    return entries, 8 + nbytes


def tensors_in(path: Path) -> list[TensorEntry]:
    try:
        with path.open("rb") as file:
            return list(read_tensor_header(file)[0].values())
    except ValueError as error:
        raise WorkError(f"{path} is not a safetensors file ({error})") from None


def _check_entry(listed: Mapping[str, Any], nbytes: int) -> TensorEntry:
    dtype, shape, (begin, end) = listed["dtype"], listed["shape"], listed["data_offsets"]
    if not all(isinstance(number, int) for number in (begin, end, *shape)):
        raise ValueError("a tensor has an offset or a shape that is not a whole number")
    if not 0 <= begin <= end <= nbytes or not 0 <= (numel := prod(shape)) <= 8 * (end - begin):
        raise ValueError("a tensor is larger than its bytes")
    return TensorEntry(str(dtype), numel, begin, end, tuple(shape))


def _digest_files(folder: Path, files: Sequence[str]) -> dict[str, str]:
    """Return the digest of each file, computed in threads, since hashing releases the GIL."""
    found = read_each(lambda file: _digest_file(folder / file), files, FILES_AT_ONCE)
    return dict(zip(files, found, strict=True))


def _digest_file(path: Path) -> str:
    found = blake3()
    buffer = memoryview(bytearray(BLOCK_NBYTES))
    with path.open("rb", buffering=0) as file:
        while nbytes := file.readinto(buffer):
            found.update(buffer[:nbytes])
    return found.hexdigest()


def _cached_digests(path: Path, folder: Path, files: Sequence[str]) -> dict[str, str]:
    """Return the digest of each file, from the record at `path` if it has it.

    Missing digests are computed and written to the record, by one process at a time.
    """
    with _one_process(path):
        record = _read_record(path)
        marks = {file: _file_mark(folder / file) for file in files}
        known = {
            file: digest
            for file, mark in marks.items()
            if (noted := record.get(file, {})).get("mark") == mark
            and (digest := noted.get("digest"))
        }
        computed = _digest_files(folder, [file for file in files if file not in known])
        settled = time.time_ns() - SETTLED_S * 1e9
        kept = {
            file: {"mark": marks[file], "digest": digest}
            for file, digest in computed.items()
            if marks[file] == _file_mark(folder / file) and marks[file][1] < settled
        }
        if kept:
            _write_record(path, record | kept)
            _delete_unused(path.parent)
    return known | computed


def _file_mark(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def _record_path(folder: Path) -> Path | None:
    """Return the path of the record with the digests of a folder on this machine.

    Another machine may have other files in that folder. Return None for a user without a home.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        return None
    name = hex_digest(f"{socket.gethostname()} {folder}".encode())
    return cache / "wdsprep" / "weights" / f"{name[:32]}.json"


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    with contextlib.suppress(OSError):
        os.utime(path)
    lines = record.items() if isinstance(record, dict) else ()
    return {file: line for file, line in lines if isinstance(line, dict)}


def _write_record(path: Path, record: dict[str, Any]) -> None:
    draft = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        draft.write_text(json.dumps(record, indent=1))
        draft.replace(path)


def _delete_unused(folder: Path) -> None:
    """Delete records of digests, and their lock files, that nobody has used for half a year."""
    oldest = time.time() - UNUSED_S
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.stat().st_mtime < oldest:
                path.unlink()


@contextlib.contextmanager
def _one_process(path: Path) -> Iterator[None]:
    """Let one process of this machine at a time into the context, if files can be locked."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
