"""The files of a model: a folder, or a repository of the Hugging Face hub, and their digest.

The hub's client is imported when it is needed. Its errors become one line that says what to do
next, and they come within seconds, before anything else has begun.

The digest, over the names and bytes of the files, tells two models apart: a worker checks with it
that it has the driver's model. All workers of a machine would read the same 20 GB for it, so the
digests of large files are cached (`kept_file`) by their sizes, times and inodes, and a worker that
comes while another computes waits for it. If they cannot be cached, this only costs time.
"""

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np
from blake3 import blake3

from wdsprep.dataset.kept_file import KeptWriter, open_or_make
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.thread_map import read_each
from wdsprep.errors import StoreError, UsageError, WdsprepError, WorkError
from wdsprep.runners.stuck_workers import awaiting

TIMEOUT_S = 10.0
BRANCH = "main"
TOLD_NBYTES = 1_000_000  # a download of fewer is not worth a line
COMMIT = re.compile(r"[0-9a-f]{40}")
BLOCK_NBYTES = 8 << 20
FILES_AT_ONCE = 4
LARGE_NBYTES = 1_000_000_000
"""The size from which digests are kept: below it, computing takes a second."""
HEAD_NBYTES = 1 << 24
"""The largest header that is read, which is enough for 100,000 tensors."""
NUMPY_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
SETTLED_S = 2.0
"""The age below which a file may be written again without getting another time."""


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

    def weights_in(self, folder: str) -> list[Path]:
        """Return the files of weights in one of the model's folders."""
        files = [name for name in self.files if name.rpartition("/")[0] == folder]
        return [Path(self.folder, name) for name in files if name.endswith(".safetensors")]


Local = TypeVar("Local", bound=LocalModel)


class UnreachableError(WorkError):
    """The hub cannot be reached, so only files in its cache can be used."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder on this machine with files of a model, perhaps in the hub's cache."""

    path: Path
    what: str
    """the model's name for messages"""
    revision: str = ""
    """the commit, or "" for a folder without one"""

    def names(self) -> frozenset[str]:
        """Return the paths of the files in the folder and directly in its subfolders.

        All files of a pipeline are there.
        """
        found = (*self.path.glob("*"), *self.path.glob("*/*"))
        return frozenset(str(path.relative_to(self.path)) for path in found if path.is_file())

    def fetch(self, names: Sequence[str]) -> Path:  # noqa: ARG002  they are there
        return self.path


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository of the hub at one commit, with the sizes of its files."""

    what: str
    revision: str
    repo: str
    branch: str
    sizes: dict[str, int]
    tell: Callable[[str], None]

    def names(self) -> frozenset[str]:
        return frozenset(self.sizes)

    def fetch(self, names: Sequence[str]) -> Path:
        """Download the files that the cache lacks, or has in another size, and return their folder.

        Others may do the same at the same time: the hub's client locks each file that it downloads.
        The branch is asked for, not the commit, so that the cache knows the branch later, without a
        network. Raise WorkError if the hub cannot be reached, or if the branch has moved meanwhile.
        """
        from huggingface_hub import constants, hf_hub_download, snapshot_download

        cached = find_cached(self.what, self.repo, self.revision)
        wanted = {name: self.sizes[name] for name in names}
        missing = find_missing(cached.path, wanted) if cached else list(names)
        if cached and not missing:
            return cached.path
        nbytes = sum(self.sizes[name] for name in missing)
        if nbytes > TOLD_NBYTES:
            self.tell(f"fetching {nbytes / 1e6:,.0f} MB of {self.repo} at {self.revision[:10]}")
        arriving = Path(constants.HF_HUB_CACHE, f"models--{self.repo.replace('/', '--')}", "blobs")
        try:
            with _explain_hub_errors(self.what, self.repo, self.branch), awaiting(arriving):
                for name in missing:
                    if cached and (cached.path / name).is_file():  # of another size
                        hf_hub_download(self.repo, name, revision=self.branch, force_download=True)
                path = snapshot_download(
                    self.repo, revision=self.branch, allow_patterns=list(names)
                )
        except UnreachableError as error:
            raise WorkError(
                f"{self.what} was not fetched completely ({error}): run the same command again; "
                "what has arrived is kept"
            ) from None
        if Path(path).name != self.revision:
            raise WorkError(f"{self.repo} changed while it was fetched: run the same command again")
        return Path(path)


ModelFiles = Folder | Repository
"""The files of a model, in a folder or on the hub."""


def fetch_files(place: ModelFiles, names: Sequence[str]) -> dict[str, Any]:
    """Download files if they are not here, and return them as the fields of a `LocalModel`."""
    folder = place.fetch(names)
    return {
        "folder": str(folder),
        "revision": place.revision,
        "files": tuple(names),
        "sizes": tuple((folder / name).stat().st_size for name in names),
        "weights": weights_digest(folder, names),
    }


def check_there(what: str, missing: Sequence[str], pickled: Sequence[str]) -> None:
    """Raise UsageError if a model lacks files, or has only pickled weights in place of them."""
    if missing and pickled:
        raise UsageError(
            f"{what} has only pickled weights ({pickled[0]}), which can run code when they are "
            "opened: convert it to safetensors, or pass another --model"
        )
    if missing:
        raise UsageError(f"{what} lacks {', '.join(missing)}: choose another --model")


def find_missing(folder: Path, sizes: Mapping[str, int]) -> list[str]:
    """Return the files that a folder lacks, or has in another size; the size 0 is not compared."""

    def is_whole(path: Path, nbytes: int) -> bool:
        return path.is_file() and nbytes in (0, path.stat().st_size)

    return [name for name, nbytes in sizes.items() if not is_whole(folder / name, nbytes)]


def find_on_node(model: Local, repo: str) -> Local:
    """Return the driver's model as it lies on this node.

    A model of the hub is looked up in the cache of the node, and downloaded if it is missing; one
    without a commit is only looked for in its folder. Raise WorkError if the node has no such
    model, or one with other weights.
    """
    folder, sizes = Path(model.folder), dict(zip(model.files, model.sizes, strict=True))
    commit = model.revision
    if commit and find_missing(folder, sizes):
        try:
            place = Repository(model.name, commit, repo, commit, sizes, lambda _line: None)
            folder = place.fetch(model.files)
        except UsageError as error:  # the driver has it: here is no token, or an older library
            raise WorkError(f"{model.name} cannot be found on this node: {error}") from error
    try:
        digest = weights_digest(folder, model.files)
    except OSError as error:
        raise WorkError(f"{model.name} cannot be read on this node: {error}") from None
    if digest != model.weights:
        raise WorkError(
            f"{folder} holds other weights of {model.name} than the driver has: copy the driver's "
            "files there"
        )
    return replace(model, folder=str(folder))


def find_cached(what: str, repo: str, revision: str) -> Folder | None:
    """Return the folder of a repository in the cache, which may lack files, or None.

    The network is not used.
    """
    from huggingface_hub import snapshot_download

    try:  # with no pattern nothing is missing, so a folder that lacks files is found as well
        found = snapshot_download(
            repo, revision=revision or None, local_files_only=True, allow_patterns=[]
        )
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UsageError(
            f"{what} cannot be a repository on the hub: {_first_line(error)}"
        ) from None
    path = Path(found)
    return Folder(path, what, path.name) if path.is_dir() else None


def ask_hub_or_keep(
    what: str, repo: str, revision: str, tell: Callable[[str], None], kept: Folder | None
) -> ModelFiles:
    """Return a repository as the hub lists it, or the folder `kept` if the hub does not give it.

    The hub may be out of reach; a repository may have been withdrawn or gated since it was fetched.
    """
    from huggingface_hub import HfApi

    try:
        with _explain_hub_errors(what, repo, revision):
            info = HfApi().model_info(
                repo, revision=revision or None, files_metadata=True, timeout=TIMEOUT_S
            )
    except WdsprepError:
        if kept is None:
            raise
        return kept
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return Repository(what, info.sha or "", repo, revision or BRANCH, sizes, tell)


@contextlib.contextmanager
def _explain_hub_errors(what: str, repo: str, revision: str) -> Iterator[None]:
    """Turn errors of the hub's client in the context into errors of wdsprep.

    The client has used two HTTP libraries, so the base error of either is found through its
    subclass.
    """
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise WorkError(
            f"{what} is gated: accept its terms at https://huggingface.co/{repo}, then run "
            "`hf auth login` (or set HF_TOKEN) and the same command again"
        ) from None
    except errors.RevisionNotFoundError:
        raise UsageError(
            f"{repo} has no revision {revision!r}: see the branches and commits at "
            f"https://huggingface.co/{repo}/commits/main"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UsageError(
            f"{what} is not on the hub, or it is private: check the name, or run "
            "`hf auth login` (or set HF_TOKEN) and the same command again"
        ) from None
    except Exception as error:
        bases = errors.HfHubHTTPError.__mro__
        of_network = tuple(base for base in bases if base.__name__ == "HTTPError")
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code < 500:
            raise WorkError(_first_line(error)) from None
        if isinstance(error, (OSError, *of_network)):
            raise UnreachableError(_first_line(error)) from None
        raise


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def is_local(name: str) -> bool:
    """Return whether a name can only mean a folder."""
    return name.startswith((".", "~", os.sep)) or name.count("/") != 1


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


class TensorEntry(NamedTuple):
    """A tensor as the header of a safetensors file describes it."""

    dtype: str
    numel: int
    begin: int
    end: int
    """the end of its bytes, counted from the end of the header"""
    shape: tuple[int, ...] = ()

    def numbers(self, data: bytes) -> np.ndarray[Any, Any]:
        """Return its numbers, given its bytes; those of bf16 as fp32, whose upper half they are.

        The safetensors library gives bf16 to torch alone. Raise KeyError if they are no floats.
        """
        values = np.frombuffer(data, NUMPY_DTYPES[self.dtype])
        if self.dtype == "BF16":
            values = (values.astype("<u4") << 16).view("<f4")
        return values.reshape(self.shape)


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
