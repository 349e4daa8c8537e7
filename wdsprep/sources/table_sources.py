"""Tables with the images' bytes or their URLs in a column, as sources of `pack`.

Parquet with bytes is as Ray and Hugging Face write it, Arrow is what `datasets` saves, and MDS is
that of MosaicML streaming. An item is a run of row groups of a Parquet file, or one of the other
files as a whole.

URLs are in Parquet, CSV, TSV, JSON lines and plain lists. Rows come without their images, which
`pack` fetches. An item is a part of one table with as many rows as a slice takes. It may name a few
rows of that part alone, which are to be tried once more.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import pyarrow as pa

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.samples import RoleImage, Sample
from wdsprep.errors import SourceError, UsageError
from wdsprep.images.formats import png_of_pixels
from wdsprep.sources.base import (
    Item,
    Role,
    Source,
    Told,
    check_names,
    field_texts,
    ignore_left_out,
    item_of,
    name_images,
    naming_role,
)
from wdsprep.sources.captions import captions_of, first_of, plain_facts
from wdsprep.sources.patterns import PARQUET, TEXT_TABLES, table_files
from wdsprep.sources.tables import TableRow
from wdsprep.sources.tables.arrow import arrow_batches, arrow_files, arrow_schema, count_arrow_rows
from wdsprep.sources.tables.mds import IMAGES as MDS_IMAGES
from wdsprep.sources.tables.mds import (
    SCALARS,
    TEXTS,
    MdsShard,
    fields_in,
    read_index,
    read_samples,
    shards_there,
    value_of,
)
from wdsprep.sources.tables.parquet import BYTES, ParquetTable, rows_in
from wdsprep.sources.tables.text import Table, open_table
from wdsprep.text import list_columns, shown

BATCH_ROWS = 32
IMAGE_NAMES = ("image", "jpg", "jpeg", "png", "webp", "bytes", "image_bytes", "data", "content")
URL_NAMES = ("url", "image_url", "img_url", "urls", "top_url", "image_link", "img", "src", "link")
CHOSEN = "|"


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSource(Source):
    """The tables of some kinds below `url` that match `pattern`, or all if it is empty.

    Those of Parquet with the bytes of images are read here, and those of other forms, or with
    URLs, by the subclasses.
    """

    kind = "table"
    form: ClassVar[str] = "Parquet"
    pattern: str = ""
    rows_per_item: int = 1
    kinds: frozenset[str] = PARQUET

    def items(self, left_out: Told = ignore_left_out, /) -> Iterator[Item]:
        for entry in table_files(self.url, self.pattern, self.kinds, left_out):
            table = open_table(self.url, entry.name)
            self.find_column(table)
            first = 0
            for where, rows in table.parts(self.rows_per_item, cuts_groups=self.kind == "urls"):
                name = f"{entry.name}[{first}:{first + rows}]"
                yield item_of(entry, name=name, extra=where, samples=rows)
                first += rows

    def find_column(self, table: Table) -> str:
        """Return the column of images, or of their URLs. Raise an error if there is none."""
        return image_of_schema(self, cast("ParquetTable", table).schema, table.name)

    def columns_of(self, item: Item) -> tuple[str, Sequence[str]]:
        """Return the column of images, or of their URLs, and all columns of the file of an item."""
        table = open_table(self.url, item.parts[0][0])
        return self.find_column(table), table.columns()

    def rows(
        self, item: Item, *, urls_alone: bool = False
    ) -> tuple[str, Iterator[tuple[int, TableRow]]]:
        """Return the column of images, or of their URLs, and the rows of an item by their numbers.

        A row has the same number in whatever item of its file it is. With `urls_alone`, no other
        columns are read where that is possible.
        """
        table = open_table(self.url, item.parts[0][0])
        column = self.find_column(table)
        only = (column, *self.columns.in_roles(table.columns())) if urls_alone else ()
        where, numbers = _place(item)
        rows = table.rows(where, only)
        return column, (row for row in rows if numbers is None or row[0] in numbers)

    def sample(self, row: TableRow, column: str, source: str) -> Sample:
        """Make a Sample named `source` from a row. Its images are taken out of the row.

        Raise RejectedError if an image is missing, or if the row is such an error itself.
        """
        if isinstance(row, RejectedError):
            raise row
        data, url = self.target(row, column)
        images: list[RoleImage] = []
        for role in self.columns.roles:
            with naming_role(role.name):
                images += self.in_role(row, role)
            for name in role.columns(row):
                del row[name]
        check_names(image.name for image in images)
        facts = plain_facts(row)
        captions = captions_of(facts, self.columns.caption)
        further = tuple(images)
        return Sample(
            source=source, image=data, captions=captions, facts=facts, url=url, images=further
        )

    def target(self, row: dict[str, Any], column: str) -> tuple[bytes, str]:
        """Return the bytes of the image of a row, and the URL that they are to be fetched from."""
        data = _bytes_of(column, row.pop(column))
        if data is None:
            raise RejectedError(Code.NO_IMAGE, f"column {column} is null")
        return data, ""

    def in_role(self, row: dict[str, Any], role: Role) -> list[RoleImage]:
        images = [_bytes_of(role.where, value) for value in role.values(row)]
        return [RoleImage(*named) for named in name_images(role, images)]

    def makers(self, item: Item) -> Iterator[tuple[str, Callable[[], Sample]]]:
        column, rows = self.rows(item)
        for number, row in rows:
            source = source_name(item.parts[0][0], number)
            yield source, partial(self.sample, row, column, source)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrowSource(TableSource):
    """The Arrow files that `datasets` has saved below `url`: all splits, by name."""

    form: ClassVar[str] = "Arrow"

    def items(self, left_out: Told = ignore_left_out, /) -> Iterator[Item]:
        for item in map(item_of, arrow_files(self.url, left_out)):
            self.columns_of(item)
            yield item

    def columns_of(self, item: Item) -> tuple[str, Sequence[str]]:
        schema = arrow_schema(self.url, item.name)
        return image_of_schema(self, schema, item.name), schema.names

    def count(self, item: Item, /) -> int:
        return count_arrow_rows(self.url, item.name)

    def rows(
        self, item: Item, *, urls_alone: bool = False
    ) -> tuple[str, Iterator[tuple[int, TableRow]]]:
        del urls_alone  # these files have none
        batches = arrow_batches(self.url, item.name, BATCH_ROWS)
        return self.columns_of(item)[0], enumerate(row for b in batches for row in rows_in(b))


@dataclass(frozen=True, kw_only=True, slots=True)
class MdsSource(TableSource):
    """The MDS shards of images that indexes below `url` name."""

    form: ClassVar[str] = "MDS"

    def items(self, _left_out: Told = ignore_left_out, /) -> Iterator[Item]:
        for shard, entry in shards_there(self.url):
            self._image(shard)
            name, samples = shard.raw.name, shard.samples
            yield item_of(entry, name=name, extra=shard.index, samples=samples)

    def columns_of(self, item: Item) -> tuple[str, Sequence[str]]:
        shard = read_index(self.url, item.extra)[item.name]
        return self._image(shard), [*shard.encodings]

    def _image(self, shard: MdsShard) -> str:
        there = shard.encodings
        held = {name for name, encoding in there.items() if encoding in MDS_IMAGES}
        likely = [n for n in there if n in held and (there[n] != "bytes" or n in IMAGE_NAMES)]
        hint = "import latents with wdsprep import"
        return _find_image(self, shard.index, there, likely=likely, held=held, hint=hint)

    def makers(self, item: Item) -> Iterator[tuple[str, Callable[[], Sample]]]:
        shard = read_index(self.url, item.extra)[item.name]
        image = self._image(shard)
        for number, data in enumerate(read_samples(self.url, shard, item.parts[0][0])):
            source = source_name(item.name, number)
            yield source, partial(self._sample, shard, data, image, source)

    def _sample(self, shard: MdsShard, sample: bytes, image: str, source: str) -> Sample:
        """Make a Sample from the bytes of a sample of an MDS shard.

        `image` is the column of images, and `source` the sample's name. Texts, numbers and JSON
        of other columns become facts; values of other types are dropped. An empty value stands for
        no image in a role, as MDS has no nulls.
        """
        said, fields = shard.encodings, fields_in(shard, sample)
        facts = {*TEXTS, *SCALARS, "json"}
        row = {n: value_of(said[n], data, n) for n, data in fields.items() if said[n] in facts}
        for name in (image, *self.columns.in_roles(said)):
            data = fields[name]
            row[name] = png_of_pixels(data) if said[name] == "pil" and data else data
            if not data and name != image:
                row[name] = None
        return self.sample(row, image, source)


def _bytes_of(column: str, value: Any) -> bytes | None:
    """Return the bytes in a value of a column of images, or None if the value is null.

    Raise RejectedError for a path without bytes.
    """
    if not isinstance(value, Mapping):
        return cast("bytes | None", value)
    if value.get("bytes") is None and (path := value.get("path")):
        where = f"column {column} has the path {shown(str(path))} and no bytes"
        raise RejectedError(Code.NO_IMAGE, where)
    return cast("bytes | None", value.get("bytes"))


def image_of_schema(tables: Source, schema: pa.Schema, name: str) -> str:
    """Return the name of the column of images: the one the user named, or one found in `schema`.

    Errors call the file `name`.
    """
    in_roles = tables.columns.in_roles(schema.names)
    kinds = {field.name: field.type for field in schema}
    for role in in_roles:
        if isinstance(kinds[role], pa.ListType | pa.LargeListType):
            kinds[role] = kinds[role].value_type
    held = [name for name, kind in kinds.items() if holds_bytes(kind)]
    encodings = {field.name: str(field.type) for field in schema}
    hint = "--url-col where a column holds the images' URLs"
    return _find_image(tables, name, encodings, likely=held, held={*held}, hint=hint)


def _find_image(
    tables: Source,
    name: str,
    encodings: Mapping[str, str],
    *,
    likely: Sequence[str],
    held: Collection[str],
    hint: str,
) -> str:
    """Return the column of images: the one that the user named, or else the first that is likely.

    `held` are the columns with bytes of images. Raise an error that lists the columns if there is
    none, if one that the user named is missing or no such column, or if several are as likely.
    """
    columns = tables.columns
    columns.check([*encodings], name)
    in_roles = columns.in_roles(encodings)
    likely = [name for name in likely if name not in in_roles]
    image = columns.image or first_of(IMAGE_NAMES, likely) or next(iter(likely), "")
    wrong = next((name for name in (image, *in_roles) if name and name not in held), "")
    is_clear = columns.image or image in IMAGE_NAMES or len(likely) == 1
    if image and not wrong and is_clear:
        return image
    listed = list_columns([f"{name} ({encoding})" for name, encoding in encodings.items()])
    what, there = f"{tables.url}/{name}", f"it has {listed}"
    if image and not wrong:
        raise UsageError(
            f"{what} has images in {list_columns(likely)}: give the one to train on by "
            "--image-col, and further ones by --role NAME=COLUMN"
        )
    if wrong:
        raise UsageError(f"{what}: column {wrong!r} holds no image bytes: {there}")
    raise SourceError(f"{what} has no column of image bytes: {there}; give --image-col, or {hint}")


def holds_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return "bytes" in [field.name for field in kind] and holds_bytes(kind.field("bytes").type)
    return kind in BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class UrlSource(TableSource):
    """The tables of URLs below `url` that match `pattern`, or all of `kinds` if it is empty."""

    kind = "urls"
    kinds: frozenset[str] = TEXT_TABLES

    def urls(self, item: Item, /) -> Iterator[str]:
        """Yield the URLs of each row of an item, be they valid or not: of its image, then by role.

        Rows that cannot be read, or have no text in the column of URLs, are skipped.
        """
        column, rows = self.rows(item, urls_alone=True)
        for _, row in rows:
            if isinstance(row, dict) and isinstance(url := row.get(column), str):
                yield url.strip()
                for role in self.columns.roles:
                    yield from filter(None, field_texts(role, row))

    def find_column(self, table: Table) -> str:
        """Return the name of the column of URLs in a table.

        Raise SourceError if there is none. Raise UsageError if the table has a schema and lacks a
        column that the user named.
        """
        there = table.columns()
        if table.has_schema:
            self.columns.check(there, table.name)
        column = self.columns.url or url_column(table.texts())
        if column:
            return column
        hint = "its first row cannot be read: mend it"
        if there:
            hint = (
                f"it has {list_columns(there)}: give --url-col, or write the columns' names above "
                "its first line; if it names files, call it metadata.jsonl or metadata.csv, and "
                "pack their folder"
            )
        elif not any(table.parts(1)):
            hint = "it is empty: give another, or move it away"
        raise SourceError(f"{self.url}/{table.name} has no column of URLs: {hint}")

    def target(self, row: dict[str, Any], column: str) -> tuple[bytes, str]:
        value = row.get(column)
        url = value.strip() if isinstance(value, str) else ""
        if not url:
            raise RejectedError(Code.BAD_URL, f"column {column} has none")
        return b"", url

    def in_role(self, row: dict[str, Any], role: Role) -> list[RoleImage]:
        links = name_images(role, field_texts(role, row))
        return [RoleImage(name, b"", link) for name, link in links]


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
