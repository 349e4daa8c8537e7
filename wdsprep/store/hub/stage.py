"""What a run has made for a dataset on the hub, and nobody there sees yet.

It lies in a folder of this machine until the run has ended well, one for each revision of a
dataset: `files` has what is new, by its name, and `gone` an empty file for each that is to be
deleted. `base-...` is the commit that what waits below one folder of it was begun on, and
`published` the latest one that was made here, by which other processes notice that the commit they
read is not the latest any more.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from wdsprep.errors import ExistsError, NotFoundError
from wdsprep.store.base import HELD, Entry, write_bytes
from wdsprep.store.local import LocalStore

PUBLISHED, TURN = "published", f"publishing{HELD}"


class HubStage:
    """The folder of this machine where files wait until they are published on the hub."""

    def __init__(self, endpoint: str, repository: str, revision: str, prefix: str) -> None:
        key = _short(f"{endpoint}\n{repository}\n{revision}")
        self._prefix, self._base = prefix, f"base-{_short(prefix)}"
        folder = _home() / "wdsprep" / f"{repository.replace('/', '--')}-{key}"
        self.folder = folder
        self.notes = LocalStore(folder)
        self.files, self._gone = LocalStore(folder / "files"), LocalStore(folder / "gone")

    def begin(self, commit: str) -> None:
        """Note the commit that changes are based on, unless one is noted already."""
        if not (self.folder / self._base).exists():
            with contextlib.suppress(ExistsError):
                write_bytes(self.notes, self._base, commit.encode(), exclusive=True)

    @property
    def base(self) -> str:
        return self._note(self._base)

    @property
    def published(self) -> str:
        return self._note(PUBLISHED)

    def _note(self, name: str) -> str:
        try:
            return self.notes.read(name).decode()
        except NotFoundError:
            return ""

    def list(self, prefix: str) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.files.list(prefix)}

    def has(self, name: str) -> bool:
        return (self.files.root / name).is_file()

    def gone(self, prefix: str) -> Iterator[str]:
        for entry in self._gone.list(prefix):
            yield entry.name

    def is_gone(self, name: str) -> bool:
        return (self._gone.root / name).is_file()

    def mark_gone(self, name: str) -> None:
        write_bytes(self._gone, name, b"")

    def bring_back(self, name: str) -> None:
        if self.is_gone(name):
            self._gone.delete(name)

    def settle(self, commit: str, added: dict[str, Entry], deleted: Sequence[str]) -> None:
        """Note a commit as published, and remove the local copies of the files that are in it now.

        A file that somebody has written again meanwhile stays. `deleted` are the files that the
        commit has deleted, whose marks go too.
        """
        write_bytes(self.notes, PUBLISHED, commit.encode())
        now = self.list("")
        for name, entry in added.items():
            if now.get(name) == entry:
                self.files.delete(name)
        for name in deleted:
            self._gone.delete(name)
        write_bytes(self.notes, self._base, commit.encode())
        if not any(self.list(self._prefix)) and not any(self.gone(self._prefix)):
            self.notes.delete(self._base)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _home() -> Path:
    """Return the folder in which the hub's library keeps its files."""
    from huggingface_hub import constants

    return Path(os.environ.get("HF_HOME") or constants.HF_HOME).expanduser()
