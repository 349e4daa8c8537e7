"""Tables of URLs: Parquet, CSV, TSV, JSON lines and plain lists.

Rows come without their images, which `pack` fetches.

An item is a part of one table with as many rows as a slice takes. It may name a few rows of that
part alone, which are to be tried once more.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.samples import RoleImage, Sample
from wdsprep.errors import SourceError
from wdsprep.sources.base import (
    Item,
    Tables,
    Told,
    check_names,
    field_texts,
    ignore_left_out,
    name_images,
)
from wdsprep.sources.captions import captions_of, plain_facts
from wdsprep.sources.patterns import TEXT_TABLES, table_files
from wdsprep.sources.tables import TableRow
from wdsprep.sources.tables.text import Table, open_table
from wdsprep.store.base import Entry
from wdsprep.text import list_columns, shown

URL_NAMES = ("url", "image_url", "img_url", "urls", "top_url", "image_link", "img", "src", "link")
CHOSEN = "|"


@dataclass(frozen=True, kw_only=True, slots=True)
class UrlSource(Tables):
    """The tables of URLs below `url` that match `pattern`, or all of `kinds` if it is empty."""

    pattern: str
    rows_per_item: int
    kinds: frozenset[str] = TEXT_TABLES
    kind: str = "urls"

    @property
    def is_list(self) -> bool:
        """Return whether the tables are plain lists of URLs, whose one column has no name."""
        return self.kinds == {"txt"}

    def files(self, left_out: Told = ignore_left_out) -> Iterator[Entry]:
        return table_files(self.url, self.pattern, self.kinds, left_out)

    def items(self, left_out: Told = ignore_left_out) -> Iterator[Item]:
        for entry in self.files(left_out):
            table = open_table(self.url, entry.name)
            self._url_column(table, entry.name)
            first = 0
            for where, rows in table.parts(self.rows_per_item):
                yield Item(
                    name=f"{entry.name}[{first}:{first + rows}]",
                    parts=((entry.name, entry.nbytes, entry.stamp),),
                    extra=where,
                    samples=rows,
                )
                first += rows

    def first_columns(self) -> tuple[str, Sequence[str]]:
        first = next(self.files())
        table = open_table(self.url, first.name)
        return self._url_column(table, first.name), table.columns()

    def makers(self, item: Item) -> Iterator[tuple[str, Callable[[], Sample]]]:
        column, rows = self._rows(item)
        for number, row in rows:
            source = source_name(item.parts[0][0], number)
            yield source, partial(self._sample, row, column, source)

    def urls(self, item: Item, /) -> Iterator[str]:
        """Yield the URLs of each row of an item, be they valid or not: of its image, then by role.

        Rows that cannot be read, or have no text in the column of URLs, are skipped.
        """
        column, rows = self._rows(item, urls_alone=True)
        for _, row in rows:
            if isinstance(row, dict) and isinstance(url := row.get(column), str):
                yield url.strip()
                for role in self.columns.roles:
                    yield from filter(None, field_texts(role, row))

    def _rows(
        self, item: Item, *, urls_alone: bool = False
    ) -> tuple[str, Iterator[tuple[int, TableRow]]]:
        """Return the column of URLs, and the rows of an item, each after its number in the table.

        With `urls_alone`, no other columns are read where that is possible.
        """
        table = open_table(self.url, item.parts[0][0])
        column = self._url_column(table, table.name)
        only = (column, *self.columns.in_roles(table.columns())) if urls_alone else ()
        where, numbers = _place(item)
        rows = table.rows(where, only)
        return column, (row for row in rows if numbers is None or row[0] in numbers)

    def _url_column(self, table: Table, name: str) -> str:
        """Return the name of the column of URLs in a table.

        Raise SourceError if there is none. Raise UsageError if the table has a schema and lacks a
        column that the user named.
        """
        there = table.columns()
        if table.has_schema:
            self.columns.check(there, name)
        column = self.columns.url or url_column(table.texts())
        if column:
            return column
        if any("://" in title for title in there):
            hint = "its first line is not a header: write the columns' names above it"
        elif not all(title.isprintable() for title in there):
            hint = "it does not begin with text: give another source"
        else:
            hint = (
                f"it has {list_columns(there)}: give --url-col; if it names files, call it "
                "metadata.jsonl or metadata.csv, and pack their folder"
            )
        raise SourceError(f"{self.url}/{name} has no column of URLs: {hint}")

    def _sample(self, row: dict[str, Any] | RejectedError, column: str, source: str) -> Sample:
        if isinstance(row, RejectedError):
            raise row
        value = row.get(column)
        url = value.strip() if isinstance(value, str) else ""
        if not url:
            raise RejectedError(Code.BAD_URL, f"column {column} has none")
        facts = plain_facts(row)
        captions = captions_of(facts, self.columns.caption)
        images: list[RoleImage] = []
        for role in self.columns.roles:
            named = name_images(role, field_texts(role, row))
            images += (RoleImage(name, b"", link) for name, link in named)
            for name in role.columns(facts):
                del facts[name]
        check_names(image.name for image in images)
        return Sample(
            source=source, image=b"", captions=captions, facts=facts, url=url, images=tuple(images)
        )


def some_rows(item: Item, numbers: Sequence[int], *, name: str) -> Item:
    """Return an item that has a few rows of another item, under a name of its own.

    `numbers` are those of the rows in the table.
    """
    extra = f"{item.extra.partition(CHOSEN)[0]}{CHOSEN}{','.join(map(str, numbers))}"
    return Item(name=name, parts=item.parts, extra=extra, samples=len(numbers))


def sources_of(item: Item) -> Iterator[str]:
    """Yield the names of the rows of an item that `some_rows` made."""
    _, numbers = _place(item)
    return (source_name(item.parts[0][0], number) for number in sorted(numbers or ()))


def _place(item: Item) -> tuple[str, frozenset[int] | None]:
    where, _, chosen = item.extra.partition(CHOSEN)
    return where, frozenset(map(int, chosen.split(","))) if chosen else None


def source_name(table: str, number: int) -> str:
    """Return the name of a row in shards and rejects."""
    return f"{shown(table)}#{number}"


def url_column(names: Sequence[str]) -> str:
    """Return the column that most likely holds URLs, or "" if there is none."""
    by_name = {name.lower(): name for name in reversed(names)}
    return next((by_name[name] for name in URL_NAMES if name in by_name), "")
