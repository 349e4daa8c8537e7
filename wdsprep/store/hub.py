"""Datasets on the Hugging Face hub, through its own library, whose settings and token they take.

They are only read: a finished folder is published by the tools of the hub, as `wdsprep card` says.
What is read is one commit: the one that the revision named when the store was opened. So a dataset
stays as it was found, whatever is pushed meanwhile.

The hub answers a request for a large file with the address of a server that has it, which holds for
an hour. It is asked for once in a few minutes and not once for each range: a loader
asks for hundreds a second, and the hub allows a few thousand requests in five minutes.
"""

import importlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from wdsprep.errors import AccessError, NotFoundError, ShortReadError, StoreError, UsageError
from wdsprep.store.base import Entry, check_prefix
from wdsprep.store.remote import (
    BEYOND,
    FIRST_PAUSE_S,
    AnswerError,
    OverNetwork,
    PerProcess,
    Range,
    ReadOnly,
    is_busy,
    length_of,
)

URL = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?", re.IGNORECASE)
LISTINGS = 64  # so many folders' listings are kept: what is in a commit never changes
TIMEOUT_S = 60.0
KEPT_S = 300.0  # an address is valid for an hour
MOST_KEPT = 100_000
MOVED = (301, 302, 303, 307, 308)
MOST_HOPS = 5
WHOLE_NBYTES = 64 << 20  # what the hub keeps in git may come whole; it is 10 MB at most there


# --- failures
def is_transient(error: Exception) -> bool:
    return isinstance(error, (ShortReadError, _no_answer_error())) or is_busy(status_of(error))


def _no_answer_error() -> type[Exception]:
    """Return the error class that the hub's library raises if no answer comes.

    It is that of the HTTP library under it, which differs between versions.
    """
    from huggingface_hub import get_session

    client = importlib.import_module(type(get_session()).__module__.partition(".")[0])
    error: type[Exception] = client.TransportError
    return error


def status_of(error: BaseException) -> int:
    if isinstance(error, AnswerError):
        return error.status
    return int(getattr(getattr(error, "response", None), "status_code", 0))


def explain(error: Any, what: str, repository: str) -> StoreError | UsageError | None:
    from huggingface_hub import errors

    status, kind = status_of(error), type(error).__name__
    if isinstance(error, errors.OfflineModeIsEnabled):
        return AccessError(f"{what}: HF_HUB_OFFLINE is set, which forbids it: unset it")
    if isinstance(error, errors.GatedRepoError):
        return AccessError(f"{repository}: the dataset is gated: ask for access on its page")
    if isinstance(error, errors.RevisionNotFoundError):
        return NotFoundError(f"{repository}: no such revision: check what is behind the @")
    if isinstance(error, errors.RepositoryNotFoundError):
        return NotFoundError(
            f"{repository}: no such dataset, or none that you may see: check the name, or set "
            "HF_TOKEN"
        )
    if isinstance(error, errors.EntryNotFoundError) or status in (404, 410):
        return NotFoundError(f"{what}: no such file")
    if status in (401, 403):
        return AccessError(f"{what}: the hub refuses ({status}): set HF_TOKEN or run hf auth login")
    if isinstance(error, errors.HFValidationError):
        return UsageError(f"{repository}: not a name of a dataset: give hf://datasets/OWNER/NAME")
    if status and is_transient(error):
        return StoreError(f"{what}: the hub answered {status} again and again: try later")
    if status:
        said = str(getattr(error, "server_message", "") or kind)
        return StoreError(f"{what}: the hub answered {status}: {' '.join(said.split())}")
    if isinstance(error, _no_answer_error()):
        return StoreError(f"{what}: {kind}: check the network or HF_ENDPOINT")
    return None


# --- the store
class HubStore(ReadOnly, OverNetwork):
    """A store in a dataset of the Hugging Face hub, or in a folder of it, which is only read."""

    is_transient = staticmethod(is_transient)
    status_of = staticmethod(status_of)
    explain = staticmethod(explain)

    def __init__(self, url: str, *, commit: str = "", first_pause_s: float = FIRST_PAUSE_S) -> None:
        from huggingface_hub import HfApi, get_token

        match = URL.fullmatch(url.rstrip("/"))
        if match is None:
            raise UsageError(
                f"{url}: only datasets of the hub are taken: give hf://datasets/OWNER/NAME[@REVISION]"
            )
        self._repository, revision, folder = match[1], match[2] or "", match[3] or ""
        place = f"hf://datasets/{self._repository}{f'@{revision}' if revision else ''}"
        super().__init__(place, folder, first_pause_s)
        self._revision, self._commit = revision.replace("%2F", "/") or "main", commit
        self._endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        self._api: Any = HfApi(endpoint=self._endpoint)
        self._locks = PerProcess(threading.RLock)
        token = get_token()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}  # for the hub alone
        self._addresses: dict[str, tuple[str, float]] = {}
        self._listings: dict[str, dict[str, Entry]] = {}

    def __reduce__(self) -> tuple[Callable[..., "HubStore"], tuple[str]]:
        """Pickle the store so that another process reads the same commit."""
        make = partial(HubStore, commit=self._commit, first_pause_s=self.first_pause_s)
        return make, (self.url,)

    def _current_commit(self) -> str:
        """Return the commit that is read: the one given, or the latest when it was first needed."""
        ask = partial(self._api.dataset_info, self._repository, revision=self._revision)
        with self._locks.get():
            if not self._commit:
                self._commit = str(self.retrying(ask).sha)
        return self._commit

    def _files_below(self, folder: str) -> Mapping[str, Entry]:
        """Return all files below a folder in the commit. The folder may be the whole dataset."""
        from huggingface_hub.errors import EntryNotFoundError

        def list_tree() -> dict[str, Entry]:
            what = {"recursive": True, "revision": commit, "repo_type": "dataset"}
            try:
                return {
                    file.path: Entry(name=file.path, nbytes=file.size, stamp=file.blob_id)
                    for file in self._api.list_repo_tree(self._repository, folder or None, **what)
                    if hasattr(file, "blob_id")
                }
            except EntryNotFoundError:
                return {}

        with self._locks.get():
            if folder not in self._listings:
                commit = self._current_commit()
                files = self.retrying(list_tree)
                if len(self._listings) >= LISTINGS:
                    self._listings.clear()
                self._listings[folder] = files
            return self._listings[folder]

    def list(self, prefix: str = "", /) -> Iterator[Entry]:
        path = self.prefix + check_prefix(prefix)
        with self.store_errors(prefix):
            files = self._files_below(path.rpartition("/")[0])
        for name in sorted((name for name in files if name.startswith(path)), key=str.encode):
            yield files[name]._replace(name=name[len(self.prefix) :])

    def read(self, name: str, /, *, start: int = 0, nbytes: int | None = None) -> bytes:
        path, what = self.key(name), f"{self.url}/{name}"
        wanted = Range(start=start, nbytes=nbytes)
        with self.store_errors(name):
            commit = self._commit or self._current_commit()
            return self.retrying(lambda: self._read_range(commit, path, wanted, what)[:nbytes])

    def _read_range(self, commit: str, path: str, wanted: Range, what: str) -> bytes:
        """Return a range of a file, in one attempt. `what` names the file in messages.

        The address that the hub gave for the file is used for KEPT_S. If that address is refused,
        the hub is asked for another, but not if the server may answer otherwise later. Raise
        AnswerError if the last answer is an error.
        """
        key = f"{commit}/{path}"
        known, since = self._addresses.get(key, ("", 0.0))
        if known and time.monotonic() - since < KEPT_S:
            try:
                return self._get(key, known, wanted, what)
            except AnswerError as error:
                if is_busy(error.status):
                    raise
            self._addresses.pop(key, None)
        name = f"datasets/{self._repository}/resolve/{commit}/{quote(path)}"
        return self._get(key, f"{self._endpoint}/{name}", wanted, what)

    def _get(self, key: str, url: str, wanted: Range, what: str) -> bytes:
        from huggingface_hub import get_session

        for _ in range(MOST_HOPS):
            headers = {"Range": wanted.header, "Accept-Encoding": "identity"}
            if _origin(url) == _origin(self._endpoint):
                headers |= self._headers
            ask = get_session().stream(
                "GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=False
            )
            with ask as answer:
                if answer.status_code not in MOVED:
                    return _read_answer(answer, wanted, what)
                url = urljoin(url, answer.headers["location"])
            if _origin(url) != _origin(self._endpoint):
                if len(self._addresses) >= MOST_KEPT:
                    self._addresses.clear()
                self._addresses[key] = (url, time.monotonic())
        raise ShortReadError(f"{what}: the hub redirects without end")

    def stamp(self, name: str, /) -> str:
        """Return a text that changes whenever the file does."""
        if (entry := next(self.list(name), None)) and entry.name == name:  # the first of its names
            return entry.stamp
        raise NotFoundError(f"{self.url}/{name}: no such file")

    def write_error(self) -> UsageError:
        return UsageError(
            f"{self.url}: the hub is only read: write into a folder or a bucket, and publish the "
            f'finished folder with "hf upload {self._repository} FOLDER --repo-type dataset"'
        )


def _leave_session_to_parent() -> None:
    """Let the hub library's session be closed only by the process that opened it.

    The library closes its session in each forked child, such as a worker of a DataLoader. For that
    it takes a lock of the connections, which another thread of the parent may have held at that
    moment: nobody is left to give it back, and the child would wait for ever before it has done
    anything. A child makes a session of its own.
    """
    get_session = getattr(sys.modules.get("huggingface_hub.utils"), "get_session", None)
    if get_session is None:
        return
    session, process = get_session(), os.getpid()
    if "close" not in vars(session):
        close = session.close
        session.close = lambda: close() if os.getpid() == process else None


os.register_at_fork(before=_leave_session_to_parent)


# --- ranges of files


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _read_answer(answer: Any, wanted: Range, what: str) -> bytes:
    """Return the bytes of an answer, after checking that they are the range asked for.

    There are none if the file ends before the range. An answer may bring the whole file instead.
    Raise AnswerError for a status without bytes, and StoreError for a whole file of more than
    WHOLE_NBYTES of which only a range is wanted.
    """
    status, said = answer.status_code, answer.headers.get("content-range", "")
    if status == BEYOND and wanted.check_beyond(said, what) is not None:
        return b""
    if status not in (200, 206):
        raise AnswerError(status)
    if status == 206:
        nbytes, _ = wanted.check_answer(said, what)
        skipped = 0
    else:
        nbytes, skipped = length_of(answer.headers.get("content-length", "")), wanted.start
        if nbytes > WHOLE_NBYTES and not wanted.covers_file(nbytes):
            raise wanted.range_error("", what)
    data: bytes = answer.read()
    if nbytes not in (-1, len(data)):
        raise ShortReadError(f"{what}: {len(data):,} of {nbytes:,} bytes came")
    return data[skipped : None if wanted.nbytes is None else skipped + wanted.nbytes]
