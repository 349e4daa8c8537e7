"""Tables of any kind, as rows (`open_table`), and those that are text (`TextTable`).

Tables of text are CSV and TSV with a header, JSON lines, and lists of URLs; each may be gzipped.

A part of such a table is a range of bytes between two records, found in one pass over the file, so
that any part can be read alone. A record of a CSV table may hold newlines between quotes. A gzipped
file has no place to begin in the middle, and is read through up to the part.
"""

import contextlib
import csv
import gzip
import io
import sys
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from wdsprep.dataset.chunks import Chunks
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.samples import parse_json
from wdsprep.errors import SourceError
from wdsprep.sources.parsing import check_columns
from wdsprep.sources.patterns import table_kind
from wdsprep.sources.tables import TableRow
from wdsprep.store import shared_store
from wdsprep.store.base import Store

if TYPE_CHECKING:
    from wdsprep.sources.tables.parquet import ParquetTable

DELIMITERS = {"csv": ",", "tsv": "\t"}
URL = "url"
"""The name of the one column of a list of URLs."""
MAX_LINE_NBYTES = 16 << 20
TOO_LONG = b"x" * (csv.field_size_limit() + 1)
"""Read in place of a line of more bytes: a row that no kind of table can have, so a reject."""
BLOCK_NBYTES = 1 << 20
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class TextTable:
    store: Store
    name: str

    @property
    def has_schema(self) -> bool:
        """Return whether each row has every column."""
        return self._kind != "jsonl"

    @property
    def _kind(self) -> str:
        return table_kind(self.name)

    def columns(self) -> list[str]:
        with self._lines() as lines:
            return self._header(lines)

    texts = columns  # any of which may hold URLs

    def parts(self, rows: int, *, cuts_groups: bool = True) -> Iterator[tuple[str, int]]:
        """Cut the table into parts of up to `rows` rows. Yield each one's place and number of rows.

        The place is what the method `rows` takes. There are no groups of rows.
        """
        del cuts_groups
        with self._lines() as lines:
            records: Iterator[object] = (line for line in lines if line.strip())
            if self._kind in DELIMITERS:
                self._header(lines)
                records = self._csv_records(lines)
            first, start, count = 0, lines.at, 0
            for _ in records:
                count += 1
                if count == rows:
                    yield f"{start}:{lines.at}:{first}", count
                    first, start, count = first + count, lines.at, 0
            if count:
                yield f"{start}:{lines.at}:{first}", count

    def rows(self, where: str, only: Collection[str] = ()) -> Iterator[tuple[int, TableRow]]:
        """Yield the rows of a part, each after its number in the table, which counts from 0.

        `where` is the place of the part. A row that cannot be read is a RejectedError. All
        columns are read, whatever `only` says.
        """
        del only  # a line is read whole
        start, end, first = map(int, where.split(":"))
        header = self.columns() if self._kind in DELIMITERS else []
        with self._lines(start, end) as lines:
            yield from enumerate(self._rows(lines, header), first)

    def values(self, columns: Sequence[str], rows: int) -> Iterator[list[list[Any]]]:
        """Yield all values of some columns, `rows` rows at a time: a list for each column.

        A value that cannot be read is replaced by the error.
        """
        every = self.all_rows()
        while some := list(islice(every, rows)):
            yield [
                [row if isinstance(row, RejectedError) else row.get(name) for row in some]
                for name in columns
            ]

    def all_rows(self) -> Iterator[TableRow]:
        for where, _ in self.parts(sys.maxsize):
            yield from (row for _, row in self.rows(where))

    def _header(self, lines: "_Lines") -> list[str]:
        if self._kind == "txt":
            return [URL]
        if self._kind == "jsonl":
            first = next(_json_rows(lines), {})
            return list(first) if isinstance(first, dict) else []
        what = f"{self.store.url}/{self.name}"
        try:
            found = next(csv.reader(_decode_lines(lines), delimiter=DELIMITERS[self._kind]), [])
        except csv.Error as error:
            raise SourceError(
                f"{what} does not begin with the names of its columns ({error}): mend its first "
                "line"
            ) from error
        if len(found) == 1 and ";" in found[0] and "://" not in found[0]:
            raise SourceError(f"{what} separates its columns by a semicolon: write it with commas")
        check_columns(what, found)
        return found

    def _csv_records(self, lines: "_Lines") -> Iterator[None]:
        """Find the end of each record of a CSV file, and yield None there.

        `lines` then stands where the next record begins. A line without a quote is a record, unless
        it is empty. Only the csv module knows where other records end. Raise SourceError if a quote
        swallows further lines because it is never closed, or in the middle of a later cell.
        """
        first, record = b"", list[bytes]()

        def record_lines() -> Iterator[bytes]:
            """Yield the line that begins a record, then as many more as the reader asks for."""
            nonlocal first
            while line := first or next(iter(lines), b""):
                first = b""
                record.append(line)
                yield line

        delimiter = DELIMITERS[self._kind]
        cells = csv.reader(_decode_lines(record_lines()), delimiter=delimiter)
        for line in lines:
            if b'"' in line:
                first, number = line, lines.number
                record.clear()
                try:
                    next(cells)
                    if len(record) > 1:
                        next(csv.reader(_decode_lines(record), delimiter=delimiter, strict=True))
                except csv.Error as error:  # a row of one line is refused when it is read
                    if len(record) > 1:
                        raise SourceError(
                            f"{self.store.url}/{self.name}: a quote opened in line {number:,} is "
                            "not closed where its cell ends: mend the line"
                        ) from error
            elif not line.strip(b"\r\n"):
                continue
            yield

    def _rows(self, lines: "_Lines", header: list[str]) -> Iterator[TableRow]:
        if self._kind == "txt":
            return (
                {URL: text} for line in lines if (text := line.decode(errors="replace").strip())
            )
        if self._kind == "jsonl":
            return _json_rows(lines)
        return _csv_rows(lines, header, DELIMITERS[self._kind])

    @contextlib.contextmanager
    def _lines(self, start: int = 0, end: int | None = None) -> Iterator["_Lines"]:
        what = f"{self.store.url}/{self.name}"
        # A slice ends soon, and what lies beyond it is another's.
        open_file = partial(Chunks, self.store, self.name, chunk_nbytes=BLOCK_NBYTES, ahead=0)
        try:
            if self.name.lower().endswith(".gz"):
                with gzip.open(open_file().as_stream()) as packed:
                    packed.seek(start)
                    yield _Lines(cast("io.BufferedIOBase", packed), start, end)
            else:
                with open_file(start=start).as_stream() as plain:
                    yield _Lines(plain, start, end)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise SourceError(
                f"{what} is not a valid gzip file ({error}): fetch it again, or move it away"
            ) from error


class _Lines:
    """The lines of a file from one byte to another.

    `at` is where the next line begins, and `number` that of the last line, from 1 on.
    """

    def __init__(self, file: io.BufferedIOBase, start: int, end: int | None) -> None:
        self._file = file
        self._left = sys.maxsize if end is None else end - start
        self.at, self.number = start, 0
        self._lines = self._split()

    def __iter__(self) -> Iterator[bytes]:
        return self._lines

    def _split(self) -> Iterator[bytes]:
        rest, dropped = b"", 0
        begins_file = not self.at
        while block := self._file.read(min(BLOCK_NBYTES, self._left)):
            self._left -= len(block)
            lines = (rest + block).splitlines(keepends=True)
            rest = lines.pop()  # it may be cut, even where it ends in \r
            for line in lines:
                self.at, self.number = self.at + dropped + len(line), self.number + 1
                yield _plain(line, dropped, begins_file)
                begins_file, dropped = False, 0
            if dropped + len(rest) > MAX_LINE_NBYTES:
                end = b"\r" if rest.endswith(b"\r") else b""
                dropped, rest = dropped + len(rest) - len(end), end
        self.at, self.number = self.at + dropped + len(rest), self.number + 1
        if rest or dropped:
            yield _plain(rest, dropped, begins_file)


def _plain(line: bytes, dropped: int, begins_file: bool) -> bytes:
    if dropped + len(line) > MAX_LINE_NBYTES:
        return TOO_LONG
    return line.removeprefix(BOM) if begins_file else line


def _decode_lines(lines: Iterable[bytes]) -> Iterator[str]:
    return (line.decode("utf-8", "surrogateescape") for line in lines)


def _json_rows(lines: Iterable[bytes]) -> Iterator[TableRow]:
    for line in lines:
        if not line.strip():
            continue
        try:
            row = parse_json(line.strip())
        except (ValueError, RecursionError) as error:
            yield RejectedError(Code.BAD_JSON, str(error))
            continue
        is_object = isinstance(row, dict)
        yield row if is_object else RejectedError(Code.BAD_JSON, "not an object")


def _csv_rows(lines: Iterable[bytes], header: list[str], delimiter: str) -> Iterator[TableRow]:
    """Yield the rows of a CSV file, without their empty cells.

    A row that cannot be read, or that has text beyond the header, is a RejectedError.
    """
    cells = csv.reader(_decode_lines(lines), delimiter=delimiter)
    while True:
        try:
            found = next(cells)
            "".join(found).encode()
        except StopIteration:
            return
        except csv.Error as error:
            yield RejectedError(Code.UNREADABLE, str(error))
        except UnicodeEncodeError:
            yield RejectedError(Code.BAD_CAPTION, "the row is not UTF-8: save it as UTF-8")
        else:
            if any(found[len(header) :]):  # a caption with a comma would lose its end
                why = f"it has {len(found)} cells, and the header {len(header)}: quote its text"
                yield RejectedError(Code.UNREADABLE, why)
            elif found:
                pairs = zip(header, found, strict=False)
                yield {name: value for name, value in pairs if value}


BY = ("key", "source", "url", "sha256")
"""The columns that may identify samples in a table: the first that it has is used, by default."""


Table: TypeAlias = "TextTable | ParquetTable"
"""A table that is read as rows. If it `has_schema`, each row has every column."""


def open_table(url: str, name: str) -> Table:
    """Open the table of that name in the store at `url`."""
    if table_kind(name) == "parquet":
        from wdsprep.sources.tables.parquet import ParquetTable

        return ParquetTable(shared_store(url), name)
    return TextTable(shared_store(url), name)
