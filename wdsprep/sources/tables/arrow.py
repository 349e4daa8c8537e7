"""Arrow files as `datasets` saves them: a folder with `state.json`, which names its files, for each
split. A file is a stream of batches, and is read from its start to its end.
"""

import json
import posixpath
from collections.abc import Iterator
from contextlib import closing

import pyarrow as pa

from wdsprep.errors import SourceError
from wdsprep.sources import Told, untold
from wdsprep.sources.patterns import ABOUT_ARROW, ARROW, ARROW_STATE, kind_of
from wdsprep.store import opened
from wdsprep.store.base import Entry, Store, is_hidden, stream


def arrow_files(url: str, left_out: Told = untold) -> Iterator[Entry]:
    """The files of all splits below a place. Where a `state.json` names some of a folder, the
    others there are what `datasets` has cached, and none of it."""
    store = opened(url)
    there = {entry.name: entry for entry in store.list() if not is_hidden(entry.name)}
    named = {
        name: set(_named(store, name)) for name in there if posixpath.basename(name) == ARROW_STATE
    }
    folders = {posixpath.dirname(name): wanted for name, wanted in named.items()}
    for state, wanted in named.items():
        if gone := sorted(wanted - there.keys()):
            raise SourceError(f"{url}/{state} names {gone[0]}, which is not there: bring it back")
    found = False
    for name, entry in there.items():
        folder = posixpath.dirname(name)
        if name.endswith(ARROW) and name in folders.get(folder, {name}):
            found = True
            yield entry
        elif posixpath.basename(name) not in ABOUT_ARROW and folder not in folders:
            left_out(kind_of(name))
    if not found:
        raise SourceError(f"no Arrow file is in {url}: name another source")


def _named(store: Store, state: str) -> Iterator[str]:
    try:
        files = json.loads(store.read(state))["_data_files"]
        for file in files:
            yield posixpath.join(posixpath.dirname(state), file["filename"])
    except (ValueError, KeyError, TypeError):
        raise SourceError(
            f"{store.url}/{state} does not name its Arrow files, as save_to_disk writes it: save "
            "the dataset again"
        ) from None


def arrow_schema(url: str, name: str) -> pa.Schema:
    with closing(stream(opened(url), name)) as file:
        return _opened(url, name, file).schema


def arrow_batches(url: str, name: str, rows: int) -> Iterator[pa.RecordBatch]:
    """The rows of a file, up to so many at a time."""
    with closing(stream(opened(url), name)) as file:
        batches = _opened(url, name, file)
        try:
            for batch in batches:
                for at in range(0, batch.num_rows, rows):
                    yield batch.slice(at, rows)
        except (pa.ArrowInvalid, OSError) as error:
            raise _damaged(url, name, error) from error


def _opened(url: str, name: str, file: object) -> pa.RecordBatchReader:
    try:
        return pa.ipc.open_stream(pa.PythonFile(file, "r"))
    except (pa.ArrowInvalid, OSError) as error:
        raise _damaged(url, name, error) from error


def _damaged(url: str, name: str, error: Exception) -> SourceError:
    why = str(error).partition(". ")[0].rstrip(".")
    return SourceError(
        f"{url}/{name} is no sound Arrow stream ({why}): save the dataset again, or move it away"
    )
