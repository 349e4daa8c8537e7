"""A table's captions by name, in a file that any number of workers read: a *lookup*.

SQLite writes it from rows that are sorted by name (`sorted_pairs`), in bounded memory. A worker
then finds 50,000 captions a second by their names, in 70 MB of memory.

Names and captions alone decide the digest of a lookup: it does not depend on the order of a table's
rows and columns, or on the number of its files. If a table has a name twice, the first row counts.
"""

import errno
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from wdsprep.dataset.damage import DELETE_STEP
from wdsprep.dataset.json_records import Hex, Nbytes, Text
from wdsprep.errors import AccessError, DamageError, FormatError, FullError, NotFoundError
from wdsprep.limits import MAX_TABLE_ROWS, MAX_TEXT_NBYTES
from wdsprep.store import open_store
from wdsprep.store.base import CHUNK_NBYTES, Store, stream
from wdsprep.store.local import LocalStore
from wdsprep.store.spool import spool_folder

if TYPE_CHECKING:
    from wdsprep.encoding.captions.sorted_pairs import Pairs

FORM = 1
"""The format of lookups; another format gives another digest."""
PAGE_NBYTES = 16_384  # a row of up to a quarter of that lies in one page
CACHE = "pragma cache_size=-32768"  # kB
UNSAFE = "pragma journal_mode=off", "pragma synchronous=off"
"""Settings of SQLite for a file that is lost with its process, and so needs no journal."""
TABLE = "CREATE TABLE captions (name text primary key, caption text, number integer) without rowid"
"""The schema, as SQLite returns it. A file with another one, such as a view without an end, is
refused before it is searched."""
STEPS = 1_000_000
"""The most steps of SQLite; to find a caption takes some hundred."""
UNUSED_S = 7 * 24 * 3600
"""The age at which an unused copy of a lookup is deleted, when another copy is made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookup:
    """The description of a lookup, a file of captions by name: its digests, size and names.

    `digest` is that of the names and captions, and `file_digest` that of the file, whose bytes
    depend on the version of SQLite. `names` is the number of different names, `twice` the number of
    names that a table had more than once, and `examples` are some of the latter.
    """

    digest: Hex
    file_digest: Hex
    nbytes: Nbytes
    names: Nbytes
    twice: Nbytes
    examples: tuple[Text, ...]


class LookupFile:
    """A new lookup of captions, in a temporary file without a name, which a crash cannot leave."""

    def __init__(self, pairs: "Iterable[Pairs]") -> None:
        """Sort names and captions, and write them into a new file."""
        folder = spool_folder()
        fd, path = tempfile.mkstemp(prefix="wdsprep-", dir=folder)
        self._file = os.fdopen(fd, "rb")
        try:
            with _report_full_disk(folder), closing(_open_for_writing(path)) as out:
                Path(path).unlink()
                self.lookup = self._fill(out, pairs)
        except BaseException:
            Path(path).unlink(missing_ok=True)
            self._file.close()
            raise

    def _fill(self, out: sqlite3.Connection, pairs: "Iterable[Pairs]") -> Lookup:
        from wdsprep.encoding.captions.sorted_pairs import (
            SortedPairs,  # pyarrow, which no worker needs
        )

        out.execute(f"pragma page_size={PAGE_NBYTES}")
        out.execute(TABLE)
        found = SortedPairs(pairs=pairs, digest=blake3(f"captions {FORM}".encode()))
        numbers = count()
        with _transaction(out):
            for names, captions in found:
                rows = zip(names, captions, numbers, strict=False)
                out.executemany("insert into captions values (?, ?, ?)", rows)
        return Lookup(
            digest=found.digest.hexdigest(),
            file_digest=self._file_digest(),
            nbytes=os.fstat(self._file.fileno()).st_size,
            names=found.names,
            twice=found.twice,
            examples=tuple(found.examples),
        )

    def _file_digest(self) -> str:
        digest = blake3()
        for data in self._chunks():
            digest.update(data)
        return digest.hexdigest()

    def _chunks(self) -> Iterator[bytes]:
        self._file.seek(0)
        while data := self._file.read(CHUNK_NBYTES):
            yield data

    def copy_to(self, store: Store, name: str) -> None:
        with store.write(name) as sink:
            for data in self._chunks():
                sink.write(data)

    def close(self) -> None:
        self._file.close()


class OpenLookup:
    """An open file of captions by name, in which any number of threads search."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, Lock()
        _check_opens(path)
        uri = f"{path.as_uri()}?mode=ro&immutable=1"  # no locks, which NFS may lack
        with self._report_damage():
            self._file = sqlite3.connect(uri, uri=True, check_same_thread=False)
            self._file.execute("pragma trusted_schema=off")
            if limit := getattr(self._file, "setlimit", None):  # Python 3.11
                limit(0, 2 * MAX_TEXT_NBYTES)  # bytes of a value: SQLITE_LIMIT_LENGTH
            with self._limit_steps():
                found = self._file.execute("select sql from sqlite_master limit 2").fetchall()
        if found != [(TABLE,)]:
            self._file.close()
            raise _damage_error(str(path), "it holds something else than captions")

    def find(self, name: str) -> tuple[str, int] | None:
        """Return the caption of a name and the number of its row, or None if there is none."""
        with self._lock, self._report_damage(), self._limit_steps():
            found: tuple[Any, Any] | None = self._file.execute(
                "select caption, number from captions where name = ?", (name,)
            ).fetchone()
        if found is not None:
            caption, number = found
            is_row = isinstance(number, int) and 0 <= number < MAX_TABLE_ROWS
            if not isinstance(caption, str) or not is_row:
                raise _damage_error(str(self._path), "a row of it has no caption and number")
        return found

    def names(self, numbers: Iterable[int]) -> list[str]:
        """Return the names in the rows with these numbers, which have to be in ascending order."""
        wanted = iter(numbers)
        number, found = next(wanted, -1), []
        with self._lock, self._report_damage():
            for at, (name,) in enumerate(self._file.execute("select name from captions")):
                if at == number:
                    found.append(str(name))
                    if (number := next(wanted, -1)) < 0:
                        break
        return found

    @contextmanager
    def _limit_steps(self) -> Iterator[None]:
        """Abort a query in this context if it takes far more steps than a search for a name."""
        self._file.set_progress_handler(lambda: 1, STEPS)
        try:
            yield
        finally:
            self._file.set_progress_handler(None, 0)

    @contextmanager
    def _report_damage(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise _damage_error(str(self._path), str(error)) from error

    def close(self) -> None:
        self._file.close()


def _check_opens(path: Path) -> None:
    """Raise NotFoundError or AccessError if a file cannot be opened, as SQLite does not say why."""
    try:
        path.open("rb").close()
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} is not there: run the same command again") from error
    except OSError as error:
        raise AccessError(f"{path} cannot be opened: {error.strerror}") from error


def _damage_error(what: str, cause: str) -> DamageError:
    return DamageError(what, cause).with_next_step(DELETE_STEP)


def open_lookup(url: str, name: str, file_digest: str) -> OpenLookup:
    """Open a lookup, a file of captions by name, of the store at `url`.

    If the store is remote, the lookup is first copied to TMPDIR, once for all workers of a machine.
    """
    store = open_store(url)
    folder = store.root or _cache_lookup(store, name, file_digest).root
    return OpenLookup(folder / name)


def digest_of_file(store: Store, name: str) -> str:
    """Return the digest of a lookup's file, or "" if there is no such file."""
    digest = blake3()
    try:
        with stream(store, name, watch=digest.update) as data:
            while data.read(CHUNK_NBYTES):
                pass
    except NotFoundError:
        return ""
    return digest.hexdigest()


def _cache_lookup(store: Store, name: str, file_digest: str) -> LocalStore:
    """Copy a lookup to a folder in TMPDIR, unless it is there, and return the folder as a store.

    When a lookup is copied, other copies that no worker has opened for a week are deleted. Raise
    FormatError if the folder belongs to another user, or if the copy is damaged.
    """
    folder = Path(tempfile.gettempdir()) / f"wdsprep-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.is_symlink():
        raise FormatError(f"{folder} belongs to another user: set TMPDIR to another folder")
    local = LocalStore(str(folder))
    with local.hold(f"{name}.hold"):
        if digest_of_file(local, name) == file_digest:
            os.utime(folder / name)  # it is of use still
        else:
            _copy(store, local, name, file_digest)
            _drop_unused(local, name)
    return local


def _drop_unused(local: LocalStore, name: str) -> None:
    """Delete the copies of lookups, except `name`, that no worker has opened for a week."""
    for entry in local.list(f"{name.rpartition('/')[0]}/"):
        if entry.name != name and time.time() - entry.written_s > UNUSED_S:
            local.delete(entry.name)


def _copy(store: Store, local: LocalStore, name: str, file_digest: str) -> None:
    digest = blake3()
    with stream(store, name) as data, local.write(name) as sink:
        while some := data.read(CHUNK_NBYTES):
            digest.update(some)
            sink.write(some)
        if digest.hexdigest() != file_digest:
            raise _damage_error(f"{store.url}/{name}", "another BLAKE3")


def _open_for_writing(path: str) -> sqlite3.Connection:
    """Open a database file for writing, with settings for a file that no other process sees."""
    file = sqlite3.connect(path, isolation_level=None)
    for pragma in (*UNSAFE, CACHE):
        file.execute(pragma)
    return file


@contextmanager
def _transaction(file: sqlite3.Connection) -> Iterator[None]:
    file.execute("begin")
    yield
    file.execute("commit")


@contextmanager
def _report_full_disk(folder: str) -> Iterator[None]:
    try:
        yield
    except (sqlite3.OperationalError, OSError) as error:
        if "full" not in str(error) and getattr(error, "errno", None) != errno.ENOSPC:
            raise
        raise FullError(
            f"{folder} is full, where captions are sorted, which takes three times their size: "
            "make room there, or set TMPDIR to another folder"
        ) from error
