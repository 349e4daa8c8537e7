"""Google Cloud Storage and Azure Blob Storage, through the obstore library.

Credentials and endpoints are the library's own.

A file becomes visible by one request, or by the end of an upload in parts that go out while the
next ones are still being written. Exclusive is a request on condition that there is no such object.
A failure aborts the upload. What a killed writer leaves of an upload nobody sees: Azure drops it
after a week, and GCS where the bucket has a rule for that.

obstore says what went wrong in the class of its error, or else in the error's text, of which the
status is taken and what the server gave as its code. The text itself is not shown: it has URLs, and
is many lines long.

The runtime of obstore has threads and an epoll instance. A forked child has none of the threads, so
a call hangs there; and the epoll instance is its parent's, where what the child registers has
crashed the parent. So a process uses only what it has loaded itself (`own_library`). Where somebody
else may have used the library before, be it this process's parent, the extension module is loaded a
second time from a copy, which has a runtime of its own: 40 ms, 15 MB. A DataLoader that forks its
workers is the case that matters. `_obstore` and its `_store` are private names of obstore; its
public modules only pass them on.
"""

import contextlib
import datetime
import importlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from queue import Full, Queue
from types import ModuleType
from typing import Any, TypeVar

from wdsprep.errors import (
    AccessError,
    ExistsError,
    FullError,
    NotFoundError,
    ShortReadError,
    StoreError,
    UsageError,
)
from wdsprep.store.base import Entry, check_name, check_prefix
from wdsprep.store.object_locks import Mark, MarkedStore
from wdsprep.store.remote import (
    ATTEMPTS,
    BEYOND,
    LONGEST_PAUSE_S,
    PARTS_IN_FLIGHT,
    PartSink,
    PerProcess,
    is_busy,
)
from wdsprep.store.schemes import place_scheme

NAME = "obstore._obstore"
WRITER = "wdsprepwriter"  # Azure takes no dashes there, and Ceph gives no underscores back
STORES = {"gs": "GCSStore", "az": "AzureStore"}
HTTP = {"allow_http": True, "connect_timeout": "10s", "timeout": "300s", "read_timeout": "60s"}
"""Settings of the HTTP client. An endpoint without TLS is one that the user has set."""
PAST_ITS_END = "Wanted range starting at"
FULL = ("QuotaExceeded", "InsufficientStorage", "AccountBeingCreated")
OF_CREDENTIALS = re.compile(
    r"credential|token request|metadata (request|server)|oauth|InstanceMetadata|service.?account"
    r"|private key|account name|Account must be",
    re.IGNORECASE,
)
SETTINGS = {
    "gs": "check GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT",
    "az": "check AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
T = TypeVar("T")


# --- which failures are tried again, and what the others mean for the user
def is_transient(error: Exception) -> bool:
    if isinstance(error, ShortReadError):
        return True
    if kind_of(error) != "GenericError":
        return False
    status = status_of(error)
    if not status:
        return not (is_of_credentials(error) or PAST_ITS_END in str(error))
    return is_busy(status)


def kind_of(error: BaseException) -> str:
    """Return the name of an error's class: each copy of the library has classes of its own."""
    return type(error).__name__


def status_of(error: BaseException) -> int:
    match = re.search(r"status code: (\d{3})|status: (\d{3}),", str(error))
    return int(match[1] or match[2]) if match else 0


def code_of(error: BaseException) -> str:
    match = re.search(r"<Code>(\w+)</Code>", str(error))
    return match[1] if match else ""


def is_of_credentials(error: BaseException) -> bool:
    return bool(OF_CREDENTIALS.search(str(error).partition("\n\nDebug source")[0]))


def is_beyond(error: BaseException) -> bool:
    """Return whether an error may say that a file ends before the range asked for."""
    is_said = status_of(error) == BEYOND or code_of(error) == "InvalidRange"
    return is_said or PAST_ITS_END in str(error)


def explain(error: Exception, what: str, place: str) -> StoreError | UsageError | None:
    beginnings = {FileNotFoundError: "Object at location", ValueError: "Could not parse path"}
    is_plain = str(error).startswith(beginnings.get(type(error), "\0"))  # of a class of Python's
    if type(error).__module__.partition(".")[0] != "obstore" and not is_plain:
        return None
    kind, code, status = kind_of(error), code_of(error), status_of(error)
    settings, said = SETTINGS[place.partition(":")[0]], f"{status} {code}".rstrip()
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return NotFoundError(f"{place}: no such bucket or container: create it, or check the name")
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"{what}: no such object")
    if kind in ("AlreadyExistsError", "PreconditionError"):
        return ExistsError(f"{what}: exists already")
    if code in FULL or status == 507:
        return FullError(f"{what}: no space left there ({code}): make room and run the same again")
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return AccessError(f"{what}: access denied{f' ({code})' if code else ''}: {settings}")
    if kind in ("InvalidPathError", "ValueError"):
        return UsageError(f"{what}: such a name cannot be used there")
    if status and is_transient(error):
        return StoreError(f"{what}: the server answered {said} again and again: try later")
    if status:
        return StoreError(f"{what}: the server answered {said}: {settings}")
    if is_of_credentials(error):
        return AccessError(f"{place}: no credentials that work: {settings}")
    line = str(error).partition("\n")[0]
    last_reason = re.split(r", source: ?| - |: ", line)[-1]
    cause = re.sub(r"\S+://\S+", "", last_reason).strip(" .()") or "no answer"
    return StoreError(f"{what}: {cause}: check the network, or {settings}")


# --- the library, as each process may use it
def _load() -> Any:
    """Load the extension module, or where it has been loaded before a copy of it.

    The system loads a file once in a process, so the copy is a file in memory: the folder for
    temporary files may forbid programs. Names that it sets in `sys.modules` are given back to their
    modules.
    """
    if NAME not in sys.modules:
        return importlib.import_module(NAME)
    before = _modules()
    with os.fdopen(os.memfd_create("obstore"), "wb") as file:
        file.write(Path(str(before[NAME].__file__)).read_bytes())
        file.flush()
        path = f"/proc/self/fd/{file.fileno()}"
        loader = ExtensionFileLoader(NAME, path)
        try:
            module = module_from_spec(ModuleSpec(NAME, loader, origin=path))
            loader.exec_module(module)
        finally:
            for name in _modules():
                del sys.modules[name]
            sys.modules.update(before)
    return module


def _modules() -> Mapping[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.startswith("obstore")}


own_library = PerProcess(_load).get
"""Returns the extension module of obstore, loaded for this process alone."""


# --- the store


class ObjectStore(MarkedStore):
    """A store in a bucket of GCS or a container of Azure, below a prefix."""

    is_transient = staticmethod(is_transient)
    status_of = staticmethod(status_of)
    explain = staticmethod(explain)

    def new_clients(self) -> tuple[Any, Any, Any]:
        """Return the library and the clients for this process.

        The last one leaves attempts to the library, which alone can repeat a part of an upload or a
        page of a listing.
        """
        loaded = own_library()
        make = partial(getattr(loaded._store, STORES[place_scheme(self.place)]), self.bucket)
        pause, most = (datetime.timedelta(seconds=s) for s in (self.first_pause_s, LONGEST_PAUSE_S))
        backoff = {"init_backoff": pause, "max_backoff": most, "base": 2}
        patience = {"max_retries": ATTEMPTS - 1, "backoff": backoff}
        with self.store_errors():
            client = make(client_options=HTTP, retry_config={"max_retries": 0})
            return loaded, client, make(client_options=HTTP, retry_config=patience)

    def _ask(self, name: str, act: Callable[[Any, Any], T]) -> T:
        """Return the result of `act`, called with the library and a client, about a file.

        It is called again after a transient error. Before each attempt, the locks of this thread
        are renewed and checked.
        """
        library, client, _ = self.clients.get()

        def attempt() -> T:
            self.refresh_locks()
            self.check_locks()
            return act(library, client)

        with self.store_errors(name):
            return self.retrying(attempt)

    def list(self, prefix: str = "", /) -> Iterator[Entry]:
        """List the files in the order of their names.

        They are sorted here, as Azure has another order if a container has real folders.
        """
        with self.store_errors(prefix):
            entries = [*self._entries(self.prefix + check_prefix(prefix))]
        yield from sorted(entries, key=lambda entry: entry.name.encode())

    def _entries(self, prefix: str) -> Iterator[Entry]:
        """Yield the objects whose keys begin with `prefix`.

        Keys that end in a slash are left out. The library lists whole folders only, so a listing
        begins near the prefix and is cut behind it.
        """
        folder, _, rest = prefix.rpartition("/")
        begin = {"offset": prefix[:-1]} if len(rest) > 1 else {}
        (library, _, patient), is_found = self.clients.get(), False
        for page in library.list(patient, folder or None, chunk_size=1_000, **begin):
            for meta in page:
                key = meta["path"]
                if key.startswith(prefix):
                    is_found = True
                    if not key.endswith("/"):
                        name, written_s = key[len(self.prefix) :], meta["last_modified"].timestamp()
                        yield Entry(name, meta["size"], _tag(meta), written_s)
                elif is_found or (not folder and key > prefix):
                    return

    def read(self, name: str, /, *, start: int = 0, nbytes: int | None = None) -> bytes:
        return bytes(self._read(name, start, nbytes))

    def read_into(self, name: str, buffer: memoryview, /, *, start: int) -> int:
        data = self._read(name, start, len(buffer))  # which is copied once
        buffer[: len(data)] = data
        return len(data)

    def _read(self, name: str, start: int, nbytes: int | None) -> memoryview:
        key = self.key(name)

        def act(loaded: Any, client: Any) -> memoryview:
            if nbytes == 0:
                loaded.head(client, key)
                return memoryview(b"")
            try:
                return _read_range(loaded, client, key, start, nbytes, f"{self.url}/{name}")
            except Exception as error:
                if not is_beyond(error) or loaded.head(client, key)["size"] > start:
                    raise
                return memoryview(b"")

        return self._ask(name, act)

    def stamp(self, name: str, /) -> str:
        """Return a text that changes whenever the object is written."""
        key = self.key(name)
        head = self._ask(name, lambda loaded, client: loaded.head(client, key))
        return f"{head['e_tag']} {head['version']} {head['last_modified'].isoformat()}"

    def new_sink(self, name: str, *, exclusive: bool) -> "ObjectSink":
        return ObjectSink(self, check_name(name), exclusive=exclusive)

    def put_whole(self, name: str, facts: Mapping[str, str], data: bytes, mode: str) -> None:
        """Make an object with one request. With the mode `create`, there must be none."""
        key, options = self.key(name), {"attributes": facts, "mode": mode, "use_multipart": False}
        self._ask(name, lambda loaded, client: loaded.put(client, key, data, **options))

    def put_parts(self, name: str, facts: Mapping[str, str], parts: Iterator[bytes]) -> None:
        """Make an object of parts, as they come."""
        (library, _, patient), key = self.clients.get(), self.key(name)
        options = {"chunk_size": self.part_nbytes, "max_concurrency": PARTS_IN_FLIGHT}
        with self.store_errors(name):
            library.put(patient, key, parts, attributes=facts, use_multipart=True, **options)

    def writer_of(self, name: str, /) -> str:
        key, head = self.key(name), {"head": True}
        answer = self._ask(name, lambda loaded, client: loaded.get(client, key, options=head))
        return str(answer.attributes.get(WRITER, ""))

    def read_mark(self, name: str, /) -> Mark:
        key = self.key(name)

        def act(loaded: Any, client: Any) -> Mark:
            answer = loaded.get(client, key)
            data, written = bytes(answer.bytes()), answer.meta["last_modified"]
            age = datetime.datetime.now(datetime.timezone.utc) - written
            return data, _tag(answer.meta), age.total_seconds()

        return self._ask(name, act)

    def make_mark(self, name: str, data: bytes, /) -> str:
        key, create = self.key(name), {"mode": "create", "use_multipart": False}
        return self._ask(name, lambda loaded, client: _tag(loaded.put(client, key, data, **create)))

    def delete(self, name: str, /) -> None:
        key = self.key(name)

        def act(loaded: Any, client: Any) -> None:
            with contextlib.suppress(FileNotFoundError):
                loaded.delete(client, key)

        self._ask(name, act)


def _read_range(
    loaded: Any, client: Any, key: str, start: int, nbytes: int | None, what: str
) -> memoryview:
    """Read a range of an object, and check that it is as long as it should be."""
    wanted = {"offset": start} if nbytes is None else (start, start + nbytes)
    options = {"range": wanted} if start or nbytes is not None else None
    answer = loaded.get(client, key, options=options)
    first, stop = answer.range
    size = answer.meta["size"]
    data = memoryview(answer.bytes())
    expected = size if nbytes is None else min(size, start + nbytes)
    if (first, stop, len(data)) != (start, expected, expected - start):
        raise ShortReadError(f"{what}: {len(data):,} of {expected - start:,} bytes read")
    return data


def _tag(meta: Mapping[str, Any]) -> str:
    return str(meta["e_tag"]).strip('"')


# --- how a file goes up
class ObjectSink(PartSink):
    """A file that is uploaded with one request, or in parts by the library, in a thread.

    The library takes parts from a generator, and ends or aborts the upload as the generator does.
    Nobody sees what the server has of it until the last part is there, when the block of the
    file ends well.
    """

    def __init__(self, store: "ObjectStore", name: str, *, exclusive: bool) -> None:
        super().__init__(name)
        self._store, self._name, self._is_exclusive = store, name, exclusive
        self._facts = {WRITER: self.writer, **({"Content-Type": self.kind} if self.kind else {})}
        self._parts: Queue[bytes | BaseException | None] = Queue(1)
        self._thread: threading.Thread | None = None
        self._upload_failure: BaseException | None = None

    def part_nbytes(self) -> int:
        # The library has no condition for an upload in parts.
        return 1 << 62 if self._is_exclusive else self._store.part_nbytes

    def send_part(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._upload, name="wdsprep-upload", daemon=True)
            self._thread.start()
        self._send(self.take_pending())

    def _upload(self) -> None:
        try:
            self._store.put_parts(self._name, self._facts, self._sent_parts())
        except BaseException as error:  # noqa: BLE001 (told to who writes)
            self._upload_failure = error
            while not self._parts.empty():  # for which `end` and `_send` would wait
                self._parts.get()
                self._parts.task_done()

    def _sent_parts(self) -> Iterator[bytes]:
        while True:
            part = self._parts.get()
            try:
                if part is None:
                    return
                if isinstance(part, BaseException):
                    raise part
                yield part
            finally:
                self._parts.task_done()

    def _send(self, part: bytes | BaseException | None) -> None:
        """Give the library a part, None after the last, or an error that aborts the upload."""
        while True:
            if self._upload_failure is not None:
                raise self._upload_failure
            with contextlib.suppress(Full):
                self._parts.put(part, timeout=0.1)
                return

    def end(self, *, waits: bool = False) -> None:
        if self.pending and (waits or self._thread):
            self.send_part()
        while self._thread and self._parts.unfinished_tasks and self._upload_failure is None:
            self._thread.join(0.01)

    def finish(self) -> None:
        if self._thread is None:
            mode = "create" if self._is_exclusive else "overwrite"
            self._store.put_whole(self._name, self._facts, self.take_pending(), mode)
            return
        self.end()
        self._send(None)
        self._thread.join()
        if self._upload_failure is not None:
            raise self._upload_failure

    def abort(self) -> None:
        if self._thread is not None:
            with contextlib.suppress(BaseException):  # the first failure is the news
                self._send(RuntimeError("the file is given up"))
            self._thread.join()
