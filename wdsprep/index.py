"""`index`: give tars that something else made the index that a loader needs."""

from collections.abc import Iterator
from pathlib import Path

from wdsprep.errors import SourceError
from wdsprep.store import Entry, Store, open_store, stream, write_bytes
from wdsprep.store.local import LocalStore
from wdsprep.tar.read import file_tape, index_tar, stream_tape


def index(folder: str) -> Iterator[tuple[str, int]]:
    """Write the missing index of each tar below `folder`; its name and samples as each is done."""
    store = open_store(folder)
    there = {entry.name: entry for entry in store.list() if entry.name.endswith((".tar", ".idx"))}
    tars = [entry for name, entry in there.items() if name.endswith(".tar")]
    if not tars:
        raise SourceError(f"{folder} is no folder that holds tars to index")
    for tar in tars:
        if f"{tar.name}.idx" not in there:
            offsets = _index(store, tar)
            write_bytes(store, f"{tar.name}.idx", offsets)
            yield tar.name, len(offsets) // 8 - 1


def _index(store: Store, tar: Entry) -> bytes:
    what = f"{store.url}/{tar.name}"
    if isinstance(store, LocalStore):
        with file_tape(Path(store.root, tar.name)) as tape:
            return index_tar(tape, what)
    with stream(store, tar.name) as file:
        return index_tar(stream_tape(file), what)
