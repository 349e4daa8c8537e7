"""The places of a model's files: a folder, or a repository of the Hugging Face hub.

The hub's client is imported when it is needed. Its errors become one line that says what to do
next, and they come within seconds, before anything else has begun.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wdsprep.encoding.models.weights import LocalModel, weights_digest
from wdsprep.errors import UsageError, WdsprepError, WorkError
from wdsprep.runners.stuck_workers import awaiting

TIMEOUT_S = 10.0
BRANCH = "main"
LARGE_NBYTES = 1_000_000
COMMIT = re.compile(r"[0-9a-f]{40}")


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
        if nbytes > LARGE_NBYTES:
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


def find_on_node(model: LocalModel, repo: str) -> Path:
    """Return the folder of the driver's model on this node, after downloading what is missing.

    A model that has no commit of the hub is only looked for in its folder. Raise WorkError if its
    repository does not give it to this node.
    """
    folder, sizes = Path(model.folder), dict(zip(model.files, model.sizes, strict=True))
    if not model.revision or not find_missing(folder, sizes):
        return folder
    commit = model.revision
    try:
        place = Repository(model.name, commit, repo, commit, sizes, lambda _line: None)
        return place.fetch(model.files)
    except UsageError as error:  # the driver has it: here is no token, or an older library
        raise WorkError(f"{model.name} cannot be found on this node: {error}") from error


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


@contextmanager
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
