"""`index`: give tars that something else made the index that a loader needs."""

from pathlib import Path

from wdsprep.errors import SourceError
from wdsprep.progress import Counting, unheard
from wdsprep.store import Entry, Store, open_store, stream, write_bytes
from wdsprep.store.local import LocalStore
from wdsprep.tar.read import file_tape, index_tar, stream_tape


def index(folder: str, heard: Counting = unheard) -> dict[str, int]:
    """Write the index of each tar below `folder` that has none, or an empty or an older one.
    Returns how many samples each of those has; `heard` is told how many are done, of how many."""
    store = open_store(folder)
    there = {entry.name: entry for entry in store.list() if entry.name.endswith((".tar", ".idx"))}
    tars = sorted(name for name in there if name.endswith(".tar"))
    if not tars:
        raise SourceError(f"{folder} is no folder that holds tars to index")
    missing = [n for n in tars if not is_indexed(there[n], there.get(f"{n}.idx"))]
    done: dict[str, int] = {}
    for name in missing:
        heard(len(done), len(missing))
        done[name] = write_index(store, name)
    return done


def is_indexed(tar: Entry, index: Entry | None) -> bool:
    """Whether the index may be that of this tar: one that was written later may hold others."""
    return index is not None and index.nbytes >= 8 and tar.written_s <= index.written_s


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
