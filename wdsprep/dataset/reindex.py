"""`index`: give tars that something else made the index that a loader needs."""

from pathlib import Path

from wdsprep.dataset.names import index_name, is_index
from wdsprep.dataset.tar.members import BadSampleError
from wdsprep.dataset.tar.read import file_tape, index_tar, stream_tape
from wdsprep.errors import SourceError, TarError
from wdsprep.store import open_store
from wdsprep.store.base import Entry, Store, stream, write_bytes
from wdsprep.store.local import LocalStore
from wdsprep.text import Counting, unheard


def index(folder: str, heard: Counting = unheard) -> dict[str, int]:
    """Write the index of each tar below `folder` that has none, or a cut or an older one.
    Returns how many samples each of those has; `heard` is told how many are done, of how many."""
    store = open_store(folder)
    there = {
        entry.name: entry
        for entry in store.list()
        if entry.name.endswith(".tar") or is_index(entry.name)
    }
    tars = sorted(name for name in there if name.endswith(".tar"))
    if not tars:
        raise SourceError(f"{folder} holds no .tar to index: name the folder that the tars are in")
    indexes = {name: there.get(index_name(name)) for name in tars}
    missing = [n for n in tars if not is_whole(indexes[n]) or is_older(indexes[n], there[n])]
    done: dict[str, int] = {}
    for name in missing:
        heard(len(done), len(missing))
        done[name] = write_index(store, name)
    return done


def is_whole(idx: Entry | None) -> bool:
    """Whether there is an index, of 8 bytes for each sample and 8 for the end."""
    return idx is not None and idx.nbytes >= 8 and idx.nbytes % 8 == 0


def is_older(idx: Entry | None, tar: Entry) -> bool:
    """Whether the tar was written later, and may hold others."""
    return idx is not None and idx.written_s < tar.written_s


def write_index(store: Store, tar: str) -> int:
    """Write the index of one tar, whether it has one or not; how many samples that has."""
    try:
        offsets = _index(store, tar)
    except BadSampleError as error:
        if error.code == "scattered":
            next_step = "make the tar again with its names in order (tar --sort=name)"
        else:
            next_step = "fetch or make the tar again"
        raise TarError(f"{error}: {next_step}, then index again") from error
    write_bytes(store, index_name(tar), offsets)
    return len(offsets) // 8 - 1


def _index(store: Store, tar: str) -> bytes:
    what = f"{store.url}/{tar}"
    if isinstance(store, LocalStore):
        with file_tape(Path(store.root, tar)) as tape:
            return index_tar(tape, what)
    with stream(store, tar) as file:
        return index_tar(stream_tape(file), what)
