"""Datasets on the Hugging Face hub, through its own library, whose settings and token they take.

What is read is one commit: the one that the revision named when the store was opened. So a dataset
stays as it was found, whatever is pushed meanwhile.

What is written waits in a folder of this machine (`stage`), where the runs of this machine see it
as if it were in the commit that they read. `publish` sends it when a run has ended well: in one
commit, whose parent is the latest. So others see all that a run has made, or nothing. Runs on this
machine take turns by locks in that folder. Where others have made commits meanwhile, the files that
changed there and those that changed here must be different ones, or the same; otherwise nothing is
published, and an error names one.
"""

import contextlib
import hashlib
import logging
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from wdsprep.errors import ExistsError, NotFoundError, StoreError, UsageError
from wdsprep.store.base import (
    HELD,
    Entry,
    FileSink,
    Ours,
    OverNetwork,
    Swept,
    check_name,
    check_prefix,
    none_of_ours,
    root_prefix,
)
from wdsprep.store.byte_range import Range
from wdsprep.store.hub.failures import retrying, status_of, store_errors
from wdsprep.store.hub.fork_safety import spare_sessions
from wdsprep.store.hub.reads import HubReads
from wdsprep.store.hub.stage import TURN, HubStage
from wdsprep.store.retry import FIRST_PAUSE_S

URL = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?", re.IGNORECASE)
COMMIT = re.compile(r"[0-9a-f]{40}")
DEFAULT = "main"
LISTINGS = 64  # so many folders' listings are kept: what is in a commit never changes
TURNS = 5  # attempts at a commit, where others make some at the same time
CHANGED = 412
_log = logging.getLogger("wdsprep")
spare_sessions()


class HubStore(OverNetwork):
    """A store in a dataset of the Hugging Face hub, or in a folder of it."""

    def __init__(self, url: str, *, commit: str = "", first_pause_s: float = FIRST_PAUSE_S) -> None:
        match = URL.fullmatch(url.rstrip("/"))
        if match is None:
            raise UsageError(
                f"{url}: only datasets of the hub are taken: give hf://datasets/OWNER/NAME[@REVISION]"
            )
        self._repository, given, prefix = match[1], match[2] or "", match[3] or ""
        self._shown = f"hf://datasets/{self._repository}{f'@{given}' if given else ''}"
        self._revision = given.replace("%2F", "/") or DEFAULT
        self._prefix = root_prefix(prefix)
        self._first_pause_s, self._commit = first_pause_s, commit
        self._locks: dict[int, threading.RLock] = {}
        self._apis: dict[int, Any] = {}
        self._listings: dict[str, dict[str, Entry]] = {}
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        self._endpoint = endpoint
        self._stage = HubStage(endpoint, self._repository, self._revision, self._prefix)
        self._seen = self._stage.published
        self._reads = HubReads(endpoint, self._repository, _headers())

    @property
    def url(self) -> str:
        return f"{self._shown}/{self._prefix}".rstrip("/")

    def __reduce__(self) -> tuple[Callable[..., "HubStore"], tuple[str]]:
        """Pickle the store so that another process reads the same commit."""
        make = partial(HubStore, commit=self._commit, first_pause_s=self._first_pause_s)
        return make, (self.url,)

    @property
    def _lock(self) -> "threading.RLock":
        """Return the lock of this process.

        A fork must not use its parent's, which may be taken for ever.
        """
        return self._locks.setdefault(os.getpid(), threading.RLock())

    @property
    def _api(self) -> Any:
        from huggingface_hub import HfApi

        process = os.getpid()
        if process not in self._apis:
            self._apis[process] = HfApi(endpoint=self._endpoint)
        return self._apis[process]

    def _retrying(self, act: Callable[[], Any]) -> Any:
        return retrying(act, pause_s=self._first_pause_s)

    # --- what is there

    @property
    def _current_commit(self) -> str:
        """Return the commit that is read: the one given, or the latest when it was first needed.

        Once a run on this machine has published another commit, return that one.
        """
        published = self._stage.published
        if self._commit and published == self._seen:
            return self._commit
        with self._lock:
            if published != self._seen:
                self._seen, self._commit = published, published
            if not self._commit:
                self._commit = self._latest_commit()
            return self._commit

    def _latest_commit(self) -> str:
        def ask() -> Any:
            return self._api.repo_info(
                self._repository, repo_type="dataset", revision=self._revision
            )

        return str(self._retrying(ask).sha)

    def _files_below(self, folder: str, commit: str) -> Mapping[str, Entry]:
        """Return all files below a folder in a commit. The folder may be the whole dataset."""
        key = f"{commit}/{folder}"
        if (known := self._listings.get(key)) is not None:
            return known
        with self._lock:
            if key not in self._listings:
                found = self._retrying(partial(self._list_tree, folder, commit))
                if len(self._listings) >= LISTINGS:
                    self._listings.clear()
                self._listings[key] = found
            return self._listings[key]

    def _list_tree(self, folder: str, commit: str) -> dict[str, Entry]:
        from huggingface_hub.errors import EntryNotFoundError

        files = self._api.list_repo_tree(
            self._repository, folder or None, recursive=True, revision=commit, repo_type="dataset"
        )
        try:
            return {
                file.path: Entry(name=file.path, nbytes=file.size, stamp=file.blob_id)
                for file in files
                if hasattr(file, "blob_id")
            }
        except EntryNotFoundError:
            return {}

    def _entry(self, path: str, commit: str) -> Entry | None:
        return self._files_below(path.rpartition("/")[0], commit).get(path)

    def list(self, prefix: str = "", /) -> Iterator[Entry]:
        check_prefix(prefix)
        path = self._prefix + prefix
        with self._store_errors(prefix):
            there = dict(self._files_below(path.rpartition("/")[0], self._current_commit))
        for name in self._stage.gone(path):
            there.pop(name, None)
        there |= self._stage.list(path)
        start = len(self._prefix)
        for name in sorted((name for name in there if name.startswith(path)), key=str.encode):
            entry = there[name]
            yield Entry(
                name=name[start:],
                nbytes=entry.nbytes,
                stamp=entry.stamp,
                written_s=entry.written_s,
            )

    def read(self, name: str, /, *, start: int = 0, nbytes: int | None = None) -> bytes:
        path, what = self._path(name), f"{self.url}/{name}"
        if self._stage.has(path):
            with contextlib.suppress(NotFoundError):  # it has just been published
                return self._stage.files.read(path, start=start, nbytes=nbytes)
        if self._stage.is_gone(path):
            raise NotFoundError(f"{what}: no such file")
        wanted = Range(start=start, nbytes=nbytes)
        with self._store_errors(name):
            commit = self._current_commit
            data: bytes = self._retrying(
                lambda: self._reads.get(commit, path, wanted, what)[:nbytes]
            )
        return data

    def read_into(self, name: str, buffer: memoryview, /, *, start: int) -> int:
        """Fill a buffer with the bytes of a file from `start` on, and return how many came.

        Fewer come only if the file ends before.
        """
        data = self.read(name, start=start, nbytes=len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def stamp(self, name: str, /) -> str:
        """Return a text that changes whenever the file does."""
        found = next((entry for entry in self.list(name) if entry.name == name), None)
        if found is None:
            raise NotFoundError(f"{self.url}/{name}: no such file")
        return found.stamp

    # --- what changes

    @contextlib.contextmanager
    def write(self, name: str, /, *, exclusive: bool = False) -> Iterator[FileSink]:
        path = self._begin(name)
        with self._hub_names(name), self._stage.files.write(path, exclusive=exclusive) as sink:
            yield sink
            if exclusive and self._is_on_hub(path):
                raise ExistsError(f"{self.url}/{name}: exists already")
        self._stage.bring_back(path)

    def delete(self, name: str, /) -> None:
        path = self._begin(name)
        if self._is_on_hub(path):
            self._stage.mark_gone(path)
        self._stage.files.delete(path)

    def _is_on_hub(self, path: str) -> bool:
        with self._store_errors(path[len(self._prefix) :]):
            return self._entry(path, self._current_commit) is not None and not self._stage.is_gone(
                path
            )

    def _begin(self, name: str) -> str:
        if COMMIT.fullmatch(self._revision):
            raise UsageError(f"{self._shown}: a commit is only read: give a branch behind the @")
        path = self._path(name)
        with self._store_errors(name):
            self._stage.begin(self._current_commit)
        return path

    def hold(
        self, name: str, /, *, giving: Sequence[FileSink] = ()
    ) -> contextlib.AbstractContextManager[None]:
        return self._stage.files.hold(self._begin(name), giving=giving)

    def let_go(self, name: str, /) -> None:
        self._stage.files.let_go(self._path(name))

    def sweep(self, ours: Ours = none_of_ours) -> Swept:
        return self._stage.files.sweep(ours)

    def publish(self, names: Collection[str] | None = None) -> None:
        """Make one commit of all changes that wait below this folder, or of those to `names`.

        Make none if nothing waits. Raise StoreError if somebody else has changed one of the files
        since the run began, or if others make one commit after another.
        """
        wanted = None if names is None else {*map(self._path, names)}
        if not any(self._waiting(wanted)):
            return
        with self._stage.notes.hold(TURN), self._store_errors(""):
            for _ in range(TURNS):
                added, deleted = self._waiting(wanted)
                head = self._latest_commit()
                commit = self._make_commit(head, self._changed_files(head, added, deleted), deleted)
                if commit:
                    self._check_there(commit, added)
                    self._stage.settle(commit, added, deleted)
                    return
        raise StoreError(
            f"{self.url}: others make one commit after another: run the same again later"
        )

    def _waiting(self, wanted: Collection[str] | None) -> tuple[dict[str, Entry], Sequence[str]]:
        staged = self._stage.list(self._prefix)
        added = {
            name: entry
            for name, entry in staged.items()
            if not name.endswith(HELD) and (wanted is None or name in wanted)
        }
        gone = [name for name in self._stage.gone(self._prefix) if name not in staged]
        return added, [name for name in gone if wanted is None or name in wanted]

    def _changed_files(
        self, head: str, added: Mapping[str, Entry], deleted: Sequence[str]
    ) -> Collection[str]:
        """Return the waiting files that the latest commit lacks, or has with other bytes.

        Raise StoreError if somebody else has changed one of them since this run was begun.
        """
        trees = (self._stage.base or head, head)
        before, now = (self._files_below(self._prefix.rstrip("/"), commit) for commit in trees)
        changed = [name for name in added if not self._is_same(name, now.get(name))]
        for name in (*changed, *(name for name in deleted if name in now)):
            if _stamp(before.get(name)) != _stamp(now.get(name)):
                raise StoreError(
                    f"{self._shown}/{name}: somebody has changed it on the hub since this run was "
                    f"begun: delete {self._stage.folder}, and run the same again"
                )
        return changed

    def _is_same(self, name: str, there: Entry | None) -> bool:
        """Return whether the hub has the bytes of a waiting file, in git or as a large file."""
        path = self._stage.files.root / name
        if there is None or there.nbytes != path.stat().st_size:
            return False
        whole, blob = hashlib.sha256(), _git_hash(there.nbytes)
        with path.open("rb") as file:
            while data := file.read(1 << 20):
                whole.update(data)
                blob.update(data)
        lines = ["version https://git-lfs.github.com/spec/v1", f"oid sha256:{whole.hexdigest()}"]
        pointer = "\n".join([*lines, f"size {there.nbytes}", ""]).encode()
        large = _git_hash(len(pointer))
        large.update(pointer)
        return there.stamp in (blob.hexdigest(), large.hexdigest())

    def _make_commit(self, head: str, added: Collection[str], deleted: Sequence[str]) -> str:
        """Make a commit and return its id, or "" if somebody else has made one meanwhile.

        Files in `deleted` that the commit `head` lacks are passed over. If nothing is left to
        change, return `head`.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        known = self._files_below(self._prefix.rstrip("/"), head)
        root, gone = self._stage.files.root, [name for name in deleted if name in known]
        if not added and not gone:
            return head

        def commit() -> Any:
            operations: list[Any] = [
                CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(root / name))
                for name in added
            ]
            operations += [CommitOperationDelete(name) for name in gone]
            return self._api.create_commit(
                self._repository,
                operations,
                commit_message=f"Write {self._prefix or 'the dataset'} with wdsprep",
                repo_type="dataset",
                revision=self._revision,
                parent_commit=head,
            )

        _log.info("%s: %d files go up in one commit", self.url, len(added))
        try:
            return str(self._retrying(commit).oid)
        except Exception as error:
            if status_of(error) == CHANGED:
                return ""
            raise

    def _check_there(self, commit: str, added: Mapping[str, Entry]) -> None:
        """Check that a commit has all files that were added to it.

        Raise StoreError if it lacks one. The hub leaves out those that a .gitignore there names.
        """
        there = self._files_below(self._prefix.rstrip("/"), commit)
        lacking = next((name for name in added if name not in there), "")
        if lacking:
            raise StoreError(
                f"{self._shown}/{lacking} is missing from the commit that adds it: see whether a "
                ".gitignore there names it, and run the same again"
            )

    def _path(self, name: str) -> str:
        return self._prefix + check_name(name)

    @contextlib.contextmanager
    def _hub_names(self, name: str) -> Iterator[None]:
        """Turn an ExistsError about a file to be committed into one that names its URL."""
        try:
            yield
        except ExistsError:
            raise ExistsError(f"{self.url}/{name}: exists already") from None

    def _store_errors(self, name: str) -> contextlib.AbstractContextManager[None]:
        return store_errors(f"{self.url}/{name}" if name else self.url, self._shown)


def _stamp(entry: Entry | None) -> str:
    return entry.stamp if entry else ""


def _git_hash(nbytes: int) -> Any:
    """Begin the hash by which git knows a file of this length. The bytes are added later."""
    return hashlib.sha1(b"blob %d\0" % nbytes, usedforsecurity=False)


def _headers() -> dict[str, str]:
    """Return the headers of a request, with the user's token if there is one."""
    from huggingface_hub import get_token

    token = get_token()
    return {"Authorization": f"Bearer {token}"} if token else {}
