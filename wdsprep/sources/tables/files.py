"""Tables of any kind, as rows: which files are meant, and what reads each."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from wdsprep.dataset.rejects import RejectedError
from wdsprep.sources.patterns import table_files, table_kind
from wdsprep.sources.tables.text import TextTable
from wdsprep.store import shared_store
from wdsprep.store.base import Entry

BY = ("key", "source", "url", "sha256")
"""The columns that may identify samples in a table: the first that it has is used, by default."""


class Table(Protocol):
    """A table that is read as rows. If it `has_schema`, each row has every column."""

    @property
    def has_schema(self) -> bool: ...

    def columns(self) -> list[str]: ...

    def texts(self) -> list[str]:
        """Return the columns that may hold URLs."""

    def parts(self, rows: int, /) -> Iterator[tuple[str, int]]:
        """Cut the table into parts of up to `rows` rows. Yield each one's place and number of rows.

        The place is what the method `rows` takes.
        """

    def rows(
        self, where: str, /, only: Collection[str] = ()
    ) -> Iterator[tuple[int, dict[str, Any] | RejectedError]]:
        """Yield the rows of a part, each after its number in the table, which counts from 0.

        `where` is the place of the part. A row that cannot be read is a RejectedError. If `only`
        names columns, the others may be left out.
        """

    def values(self, columns: Sequence[str], rows: int, /) -> Iterator[list[list[Any]]]:
        """Yield all values of some columns, `rows` rows at a time: a list for each column.

        A value that cannot be read is replaced by the error.
        """


def open_table(url: str, name: str) -> Table:
    """Open the table of that name in the store at `url`."""
    if table_kind(name) == "parquet":
        from wdsprep.sources.tables.parquet import ParquetTable

        return ParquetTable(shared_store(url), name)
    return TextTable(shared_store(url), name)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableFiles:
    """The tables below `url` that match `pattern`, or all of `kinds` if that is empty."""

    url: str
    pattern: str
    kinds: frozenset[str]

    def entries(self) -> list[Entry]:
        return list(table_files(self.url, self.pattern, self.kinds))

    def open(self, name: str) -> Table:
        return open_table(self.url, name)
