"""Arrow files as `datasets` saves them.

Each split is a folder with `state.json`, which names its files. A file is a stream of batches, and
is read from its start to its end.
"""

import json
import posixpath
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import BinaryIO

import pyarrow as pa

from wdsprep.dataset.chunks import CHUNK_NBYTES, Chunks
from wdsprep.errors import SourceError
from wdsprep.sources.base import Told, ignore_left_out
from wdsprep.sources.parsing import check_columns, check_rows, check_unpacked, parsing_file
from wdsprep.sources.patterns import ABOUT_ARROW, ARROW, ARROW_STATE, kind_of
from wdsprep.store import shared_store
from wdsprep.store.base import Entry, is_hidden
from wdsprep.text import shortened

COUNTED_ROWS = 1 << 20


def arrow_files(url: str, left_out: Told = ignore_left_out) -> Iterator[Entry]:
    """Yield the Arrow files of all splits below a place.

    If a `state.json` names some files of a folder, the others there are caches of `datasets`, and
    no part of the dataset. `left_out` gets the kinds of files in other folders that are not
    Arrow. Raise SourceError if a file that is named does not exist, or if there are no Arrow
    files.
    """
    store = shared_store(url)
    there = {entry.name: entry for entry in store.list() if not is_hidden(entry.name)}
    named: dict[str, set[str]] = {}
    fault = "does not name its Arrow files, as save_to_disk writes it"
    for state in [name for name in there if posixpath.basename(name) == ARROW_STATE]:
        data, folder = store.read(state), posixpath.dirname(state)
        with parsing_file(f"{store.url}/{state}", fault, "save the dataset again"):
            files = json.loads(data)["_data_files"]
            named[folder] = {posixpath.join(folder, file["filename"]) for file in files}
        if gone := sorted(named[folder] - there.keys()):
            name = shortened(gone[0])
            raise SourceError(f"{url}/{state} lists {name}, which does not exist: bring it back")
    found = False
    for name, entry in there.items():
        folder = posixpath.dirname(name)
        if name.endswith(ARROW) and name in named.get(folder, {name}):
            found = True
            yield entry
        elif posixpath.basename(name) not in ABOUT_ARROW and folder not in named:
            left_out(kind_of(name))
    if not found:
        raise SourceError(f"no Arrow file is in {url}: give another source")


def arrow_schema(url: str, name: str) -> pa.Schema:
    with _open_arrow(url, name) as (schema, _):
        return schema


def arrow_batches(url: str, name: str, rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file, up to `rows` at a time."""
    with _open_arrow(url, name) as (_, batches):
        for batch in batches:
            for at in range(0, batch.num_rows, rows):
                yield batch.slice(at, rows)


def count_arrow_rows(url: str, name: str) -> int:
    return sum(batch.num_rows for batch in arrow_batches(url, name, COUNTED_ROWS))


@contextmanager
def _open_arrow(url: str, name: str) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """Open a stream, and yield its schema, and its batches with their rows checked.

    Batches may be compressed, which `datasets` never does: what they unpack to is not known before
    they have been.
    """
    what, advice = f"{url}/{name}", "save the dataset again, or move it away"
    parsing = partial(parsing_file, what, "is not a valid Arrow stream", advice)
    with closing(Chunks(shared_store(url), name).as_stream()) as file:
        stream = _ReadInChunks(file)
        with parsing():
            reader = pa.ipc.open_stream(pa.PythonFile(stream, "r"))
            schema: pa.Schema = reader.schema
            names = list(schema.names)
        check_columns(what, names)

        def batches() -> Iterator[pa.RecordBatch]:
            rows = 0
            with parsing():
                for batch in reader:
                    batch.validate()
                    rows += batch.num_rows
                    check_rows(what, rows, stream.nbytes)
                    check_unpacked(what, batch.nbytes, stream.nbytes)
                    yield batch

        yield schema, batches()


class _ReadInChunks:
    """A stream that reads no more than a chunk at once, because a file may claim more than it has.

    `nbytes` is how many bytes have been read.
    """

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.nbytes = file, 0

    def read(self, size: int) -> bytes:
        chunks = []
        while chunk := self._file.read(min(size, CHUNK_NBYTES)):
            chunks.append(chunk)
            size -= len(chunk)
            self.nbytes += len(chunk)
        return b"".join(chunks)
