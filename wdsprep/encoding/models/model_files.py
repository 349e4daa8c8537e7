"""The files of a model: a folder, or a repository of the Hugging Face hub, and their digest.

`find_files` searches for the model that a user named, and `find_on_node` for the driver's.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from wdsprep.store import did_you_mean_place
from wdsprep.store.base import expand_home
from wdsprep.text import did_you_mean

TIMEOUT_S = 10.0
BRANCH = "main"
TOLD_NBYTES = 1_000_000  # a download of fewer is not worth a line
COMMIT = re.compile(r"[0-9a-f]{40}")
HALVES = (".fp16", ".bf16")
"""What the names of files of weights in half precision have before their end."""
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
    files: Mapping[str, int]
    """by name, with the bytes of each"""
    weights: str
    """a digest over the names and bytes of `files`"""

    def weights_in(self, folder: str) -> list[Path]:
        """Return the files of weights in one of the model's folders."""
        files = [name for name in self.files if name.rpartition("/")[0] == folder]
        return [Path(self.folder, name) for name in files if name.endswith(".safetensors")]


Local = TypeVar("Local", bound=LocalModel)


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

    def fetch(self, names: Collection[str]) -> Path:  # noqa: ARG002  they are there
        return self.path


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository of the hub at one commit, with the sizes of its files."""

    what: str
    revision: str
    repo: str
    branch: str
    sizes: Mapping[str, int]
    tell: Callable[[str], None]

    def names(self) -> frozenset[str]:
        return frozenset(self.sizes)

    def fetch(self, names: Collection[str]) -> Path:
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

        def unreachable(why: str) -> str:
            return (
                f"{self.what} was not fetched completely ({why}): run the same command again; what "
                "has arrived is kept"
            )

        explained = _explain_hub_errors(self.what, self.repo, self.branch, unreachable)
        with explained, awaiting(arriving):
            for name in missing:
                if cached and (cached.path / name).is_file():  # of another size
                    hf_hub_download(self.repo, name, revision=self.branch, force_download=True)
            path = snapshot_download(self.repo, revision=self.branch, allow_patterns=list(names))
        if Path(path).name != self.revision:
            raise WorkError(f"{self.repo} changed while it was fetched: run the same command again")
        return Path(path)


ModelFiles = Folder | Repository
"""The files of a model, in a folder or on the hub."""


def variant_of(files: Iterable[str]) -> str | None:
    """Return the variant of weights in half precision, such as fp16, or None for whole ones."""
    halves = (half for file in files for half in HALVES if f"{half}." in file or f"{half}-" in file)
    return next(halves, "").lstrip(".") or None


def weight_files(names: frozenset[str], stem: str) -> list[str]:
    """Return the files of a network's weights: one file, or an index and numbered files.

    Half precision is chosen only if there is nothing else, as fp32 is computed from the same files.
    The names that are there tell how many numbered files there should be. If some are missing, the
    list may end early, but it has at least one of the missing names.
    """
    for half in ("", *HALVES):
        if (whole := f"{stem}{half}.safetensors") in names:
            return [whole]
        if (index := f"{stem}.safetensors.index{half}.json") in names:
            numbered = re.compile(rf"{re.escape(stem + half)}-\d+-of-(\d+)\.safetensors")
            counts = [match[1] for name in names if (match := numbered.fullmatch(name))]
            most = max(counts, default="00001")
            # Of more than are there, one is enough to be missed.
            numbers = range(1, min(int(most), len(counts) + 1) + 1)
            return [index, *(f"{stem}{half}-{n:05d}-of-{most}.safetensors" for n in numbers)]
    return [f"{stem}.safetensors"]


def find_files(
    name: str,
    repos: Mapping[str, str],
    needs: Callable[[Folder], Sequence[str]],
    *,
    others: str,
    patterns: Sequence[str],
    tell: Callable[[str], None],
    is_offline: bool = False,
) -> ModelFiles:
    """Return the folder of the model that a user named, its repository, or that in the hub's cache.

    `repos` has the repositories of models with a name of their own, and `others` says in a message
    what these are. `needs` returns the files that a model needs of a folder; `patterns` match them
    on the hub.

    A commit never changes, so the hub is not asked if the cache has it; a branch may have moved. If
    the hub does not give the model, a complete copy in the cache is used.
    """
    folder = expand_home(name)
    if name not in repos and folder.is_dir():
        return Folder(folder.absolute(), name)
    model, _, revision = name.partition("@")
    repo = repos.get(model, model)
    meant = "" if model in repos else did_you_mean(model, repos) or did_you_mean_place(name)
    if repo.startswith((".", "~", os.sep)) or repo.count("/") != 1:
        raise UsageError(
            f"{name} is not a folder here{meant}: give one, a repository of the hub as OWNER/NAME "
            f"or OWNER/NAME@REVISION, or {others}"
        )
    what = repo if repo == model else f"{name} ({repo})"
    cached = find_cached(what, repo, revision)
    if is_offline:
        if cached is None:
            raise WorkError(f"{name} is not on this machine")
        return cached
    files = needs(cached) if cached else ()
    missing = find_missing(cached.path, dict.fromkeys(files, 0)) if cached else []
    kept = None if missing else cached
    if kept and variant_of(files) is None and COMMIT.fullmatch(revision):
        return kept

    def unreachable(why: str) -> str:
        toy = ", or try with --model tiny" if "tiny" in repos else ""
        state = f"lacks {missing[0]}" if missing else "is not"
        download = " ".join([f"hf download {repo}", *(f'--include "{name}"' for name in patterns)])
        return (
            f"{what} {state} on this machine{meant} and the hub cannot be reached ({why}): run "
            f"`{download}` on a machine with a network and copy its cache here, or give --model "
            f"FOLDER{toy}"
        )

    try:
        with _explain_hub_errors(what, repo, revision, unreachable, meant):
            return _ask_hub(what, repo, revision, tell)
    except WdsprepError:  # withdrawn or gated since it was fetched, or out of reach
        if kept is None:
            raise
        return kept


def fetch_files(place: ModelFiles, names: Sequence[str]) -> dict[str, Any]:
    """Download files if they are not here, and return them as the fields of a `LocalModel`."""
    folder = place.fetch(names)
    return {
        "folder": str(folder),
        "revision": place.revision,
        "files": {name: (folder / name).stat().st_size for name in names},
        "weights": weights_digest(folder, names),
    }


def find_missing(folder: Path, sizes: Mapping[str, int]) -> list[str]:
    """Return the files that a folder lacks, or has in another size; the size 0 is not compared."""
    return [
        name
        for name, nbytes in sizes.items()
        if not (path := folder / name).is_file() or nbytes not in (0, path.stat().st_size)
    ]


def find_on_node(model: Local, repos: Mapping[str, str]) -> Local:
    """Return the driver's model as it lies on this node.

    `repos` has the repositories of models with a name of their own.

    A model of the hub is looked up in the cache of the node, and downloaded if it is missing; one
    without a commit is only looked for in its folder. Raise WorkError if the node has no such
    model, or one with other weights.
    """
    folder, commit, place = Path(model.folder), model.revision, model.name.partition("@")[0]
    if commit and find_missing(folder, model.files):
        repo = repos.get(place, place)
        try:
            there = Repository(model.name, commit, repo, commit, model.files, lambda _line: None)
            folder = there.fetch(model.files)
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
        raise UsageError(f"{what} cannot be a repository on the hub: {cause_of(error)}") from None
    return Folder(Path(found), what, Path(found).name)


def _ask_hub(what: str, repo: str, revision: str, tell: Callable[[str], None]) -> Repository:
    """Return a repository as the hub lists it."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(
        repo, revision=revision or None, files_metadata=True, timeout=TIMEOUT_S
    )
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return Repository(what, info.sha or "", repo, revision or BRANCH, sizes, tell)


@contextlib.contextmanager
def _explain_hub_errors(
    what: str, repo: str, revision: str, unreachable: Callable[[str], str], meant: str = ""
) -> Iterator[None]:
    """Turn errors of the hub's client in the context into errors of wdsprep.

    `unreachable` returns what is said if the hub cannot be reached, for a reason. `meant` are names
    that the user may have meant, if there is no such repository. The client has used two HTTP
    libraries, so the base error of either is found through its subclass.
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
            f"`hf auth login` (or set HF_TOKEN) and the same command again{meant}"
        ) from None
    except Exception as error:
        bases = errors.HfHubHTTPError.__mro__
        of_network = tuple(base for base in bases if base.__name__ == "HTTPError")
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code < 500:
            raise WorkError(cause_of(error)) from None
        if isinstance(error, (OSError, *of_network)):
            raise WorkError(unreachable(cause_of(error))) from None
        raise


def cause_of(error: BaseException) -> str:
    """Return the first line of an error, with its class if the text alone says little."""
    line = str(error).strip().partition("\n")[0]
    plain = isinstance(error, OSError | ValueError | RuntimeError) and line
    return line if plain else f"{type(error).__name__}: {line}".removesuffix(": ")


def weights_digest(folder: Path, files: Collection[str]) -> str:
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
        entries = {}
        for name, entry in listed.items():
            shape, (begin, end) = entry["shape"], entry["data_offsets"]
            if not all(isinstance(number, int) and number >= 0 for number in (begin, end, *shape)):
                raise ValueError("a tensor has an offset or a shape that is not a whole number")
            if not begin <= end <= left or (numel := prod(shape)) > 8 * (end - begin):
                raise ValueError("a tensor is larger than its bytes")
            entries[name] = TensorEntry(str(entry["dtype"]), numel, begin, end, tuple(shape))
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


def _digest_files(folder: Path, files: Collection[str]) -> dict[str, str]:
    """Return the digest of each file, computed in threads, since hashing releases the GIL."""

    def compute(name: str) -> str:
        digest, buffer = blake3(), memoryview(bytearray(BLOCK_NBYTES))
        with (folder / name).open("rb", buffering=0) as file:
            while nbytes := file.readinto(buffer):
                digest.update(buffer[:nbytes])
        return digest.hexdigest()

    return dict(zip(files, read_each(compute, files, FILES_AT_ONCE), strict=True))
