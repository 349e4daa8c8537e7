"""`index`: give tars that something else made the index that a loader needs."""

from collections.abc import Iterator
from pathlib import Path

from wdsprep.errors import SourceError
from wdsprep.store import Store, open_store, stream, write_bytes
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
            yield tar.name, write_index(store, tar.name)


def write_index(store: Store, tar: str) -> int:
    """Write the index of one tar, whether it has one or not; how many samples that has."""
    offsets = _index(store, tar)
    write_bytes(store, f"{tar}.idx", offsets)
    return len(offsets) // 8 - 1


def _index(store: Store, tar: str) -> bytes:
    what = f"{store.url}/{tar}"
    if isinstance(store, LocalStore):
        with file_tape(Path(store.root, tar)) as tape:
            return index_tar(tape, what)
    with stream(store, tar) as file:
        return index_tar(stream_tape(file), what)
