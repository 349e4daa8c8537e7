"""`metadata.jsonl` and `metadata.csv` as Hugging Face's imagefolder uses them: a row for each file.

A row may stand anywhere in its table, so rows wait in a temporary SQLite file, not in memory, for
the image they belong to. What no image takes is a caption without its image.
"""

import contextlib
import csv
import io
import json
import posixpath
import sqlite3
from collections.abc import Iterable, Iterator

from wdsprep.errors import SourceError
from wdsprep.store.base import Store, stream
from wdsprep.text import list_columns, shown


def is_metadata(name: str) -> bool:
    return name.rpartition("/")[2] in ("metadata.jsonl", "metadata.csv")


class Metadata:
    """The rows of all metadata tables of a folder, by the image they name."""

    def __init__(self, rows: sqlite3.Connection | None) -> None:
        self._rows = rows

    def take(self, name: str) -> str:
        """Remove the row of an image, and return it as JSON, or "" if there is none."""
        if self._rows is None:
            return ""
        key = shown(name)
        found = self._rows.execute("SELECT row FROM rows WHERE name = ?", (key,)).fetchone()
        if found is None:
            return ""
        self._rows.execute("DELETE FROM rows WHERE name = ?", (key,))
        return str(found[0])

    def left(self) -> Iterator[tuple[str, str]]:
        """Yield the rows that nothing has taken, in the order of their names."""
        if self._rows is not None:
            yield from self._rows.execute("SELECT name, row FROM rows ORDER BY name")


@contextlib.contextmanager
def open_metadata(store: Store, tables: tuple[str, ...]) -> Iterator[Metadata]:
    """Read metadata tables into a temporary database, which lasts as long as the block."""
    if not tables:
        yield Metadata(None)
        return
    with contextlib.closing(sqlite3.connect("")) as rows:  # a file that SQLite removes itself
        rows.execute("PRAGMA journal_mode = OFF")
        rows.execute("CREATE TABLE rows (name TEXT PRIMARY KEY, row TEXT) WITHOUT ROWID")
        for table in tables:
            rows.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?)", _read(store, table))
        yield Metadata(rows)


def _read(store: Store, table: str) -> Iterator[tuple[str, str]]:
    folder, what = posixpath.dirname(table), f"{store.url}/{table}"
    with io.TextIOWrapper(stream(store, table), encoding="utf-8-sig", newline="") as text:
        is_csv = table.endswith(".csv")
        rows = _csv_rows(text) if is_csv else _json_rows(text, what)
        try:
            for row, as_json in rows:
                name = row.get("file_name")
                if not isinstance(name, str):
                    there = list_columns([name for name in row if name])
                    raise SourceError(
                        f"{what} has a row without file_name (it has {there}): rename the column "
                        "of the files, or move the table away"
                    )
                yield shown(posixpath.normpath(posixpath.join(folder, name))), as_json
        except (UnicodeDecodeError, csv.Error) as error:
            raise SourceError(
                f"{what} cannot be read ({error}): mend it or move it away"
            ) from error


def _csv_rows(lines: Iterable[str]) -> Iterator[tuple[dict[str, object], str]]:
    return ((row, json.dumps(row)) for row in csv.DictReader(lines, restkey=""))


def _json_rows(lines: Iterable[str], what: str) -> Iterator[tuple[dict[str, object], str]]:
    """Yield each row of a table of JSON lines, with the text that it was parsed from.

    Rows keep that text, as JSON nested very deep can be parsed but not written again. Raise
    SourceError for a line that is not a JSON object. The error calls the table `what`.
    """
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise SourceError(f"{what}, line {number}: not JSON ({error}): mend it") from error
            if not isinstance(row, dict):
                raise SourceError(f"{what}, line {number}: not a JSON object: mend it")
            yield row, line.strip()
