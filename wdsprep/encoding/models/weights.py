"""The digest that tells two models apart, over the names and bytes of their files.

A worker checks with it that it has the driver's model. All workers of a machine would read the same
20 GB for it, so the digests of large files are cached (`kept_file`) by their sizes, times and
inodes, and a worker that comes while another computes waits for it. If they cannot be cached, this
only costs time.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

from blake3 import blake3

from wdsprep.dataset.kept_file import KeptWriter, open_or_make
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.thread_map import read_each
from wdsprep.errors import StoreError, UsageError, WorkError

BLOCK_NBYTES = 8 << 20
FILES_AT_ONCE = 4
LARGE_NBYTES = 1_000_000_000
"""The size from which digests are kept: below it, computing takes a second."""
HEAD_NBYTES = 1 << 24
"""The largest header that is read, which is enough for 100,000 tensors."""
SETTLED_S = 2.0
"""The age below which a file may be written again without getting another time."""


def weights_digest(folder: Path, files: Sequence[str]) -> str:
    """Return one digest of a model's files, the same that `b3sum FILES | b3sum` prints.

    Another machine may have other files in that folder, so its name is a part of what is cached.
    """
    statuses = [(folder / file).stat() for file in files]
    sums: dict[str, str] = {}

    def compute(writer: KeptWriter, _path: Path) -> None:
        writer.facts = sums
        sums.update(_digest_files(folder, files))

    newest = max((status.st_mtime for status in statuses), default=0.0)
    is_settled = newest < time.time() - SETTLED_S
    if is_settled and sum(status.st_size for status in statuses) >= LARGE_NBYTES:
        marks = [f"{each.st_size} {each.st_mtime_ns} {each.st_ino}" for each in statuses]
        with contextlib.suppress(StoreError, UsageError):
            what = (socket.gethostname(), str(folder), *files, *marks)
            sums |= open_or_make(None, what, compute).facts
    sums = sums or _digest_files(folder, files)
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


def read_tensor_header(file: IO[bytes]) -> tuple[dict[str, TensorEntry], int, dict[str, str]]:
    """Return the tensors of a safetensors file by name, the offset of their bytes, and its facts.

    The facts are the texts in its metadata. Raise ValueError if the header is invalid or claims
    more than the file has. It is parsed here, without torch.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(8)
    nbytes = int.from_bytes(head, "little")
    if len(head) < 8 or nbytes > min(size - 8, HEAD_NBYTES):
        raise ValueError("its header is longer than the file")
    try:
        listed = json.loads(file.read(nbytes))
        facts = listed.pop("__metadata__", None) or {}
        left = size - 8 - nbytes
        entries = {name: _check_entry(entry, left) for name, entry in listed.items()}
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"its header is invalid: {error}") from None
    if not isinstance(facts, dict) or not all(isinstance(fact, str) for fact in facts.values()):
        raise ValueError("its metadata has other values than texts")
    if sum(entry.end - entry.begin for entry in entries.values()) > left:
        raise ValueError("tensors overlap")
    return entries, 8 + nbytes, facts


def tensors_in(path: Path) -> list[TensorEntry]:
    try:
        with path.open("rb") as file:
            return list(read_tensor_header(file)[0].values())
    except ValueError as error:
        raise WorkError(f"{path} is not a safetensors file ({error})") from None


def _check_entry(listed: Mapping[str, Any], nbytes: int) -> TensorEntry:
    dtype, shape, (begin, end) = listed["dtype"], listed["shape"], listed["data_offsets"]
    if not all(isinstance(number, int) and number >= 0 for number in (begin, end, *shape)):
        raise ValueError("a tensor has an offset or a shape that is not a whole number")
    if not begin <= end <= nbytes or (numel := prod(shape)) > 8 * (end - begin):
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
