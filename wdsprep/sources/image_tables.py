"""Tables with the images' bytes in a column: Parquet, Arrow and MDS.

Parquet is as Ray and Hugging Face write it, Arrow is what `datasets` saves, and MDS is that of
MosaicML streaming.

An item is a run of row groups of a Parquet file, or one of the other files as a whole.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pyarrow as pa

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Refusal, RejectedError
from wdsprep.dataset.samples import RoleImage, Sample
from wdsprep.errors import SourceError, UsageError
from wdsprep.images.formats import png_of_pixels
from wdsprep.sources.base import (
    Columns,
    Item,
    Role,
    Told,
    ignore_left_out,
    make_or_refuse,
    naming_role,
    role_images,
)
from wdsprep.sources.captions import NAMES, captions_of, first_of, plain_facts
from wdsprep.sources.patterns import table_files
from wdsprep.sources.tables import TableRow
from wdsprep.sources.tables.arrow import arrow_batches, arrow_files, arrow_schema
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
from wdsprep.sources.tables.parquet import open_parquet, rows_in
from wdsprep.store import shared_store
from wdsprep.store.base import Entry
from wdsprep.text import list_columns, shown

BATCH_ROWS = 32
COUNTED_ROWS = 1 << 20
LISTS = (pa.ListType, pa.LargeListType)
IMAGE_NAMES = ("image", "jpg", "jpeg", "png", "webp", "bytes", "image_bytes", "data", "content")


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSource:
    """The Parquet files with images below `url` that match `pattern`; all if it is empty."""

    url: str
    pattern: str
    columns: Columns
    rows_per_item: int
    kind: str = "table"
    form: str = "Parquet"

    def files(self, left_out: Told = ignore_left_out) -> Iterator[Entry]:
        return table_files(self.url, self.pattern, frozenset({"parquet"}), left_out)

    def items(self, left_out: Told = ignore_left_out) -> Iterator[Item]:
        for entry in self.files(left_out):
            with open_parquet(shared_store(self.url), entry.name) as file:
                self.check(file.schema, entry.name)
                for first, last, rows in file.runs(self.rows_per_item):
                    yield Item(
                        name=f"{entry.name}[{first}:{last}]",
                        parts=((entry.name, entry.nbytes, entry.stamp),),
                        extra=f"{first}:{last}",
                        samples=rows,
                    )

    def find_columns(self) -> tuple[str, str]:
        """Return the names of the columns of images and captions in the first file.

        The second name is "" if there are no captions. Raise an error if no column has images.
        """
        first = next(self.files())
        with open_parquet(shared_store(self.url), first.name) as file:
            image = self.check(file.schema, first.name)
            return image, self.columns.caption or first_of(NAMES, file.schema.names)

    def check(self, schema: pa.Schema, name: str) -> str:
        return checked_column(self.columns, schema, name, self.url)

    def count(self, item: Item, /) -> int:
        return item.samples

    def read(
        self,
        item: Item,
        /,
        left_out: Told = ignore_left_out,  # noqa: ARG002  the listing knows all
    ) -> Iterator[Sample | Refusal]:
        name = item.parts[0][0]
        first, last = map(int, item.extra.split(":"))
        with open_parquet(shared_store(self.url), name) as file:
            image = self.check(file.schema, name)
            batches = file.batches(BATCH_ROWS, groups=range(first, last))
            rows = (row for batch in batches for row in rows_in(batch))
            for number, row in enumerate(rows, sum(file.groups[:first])):
                source = f"{shown(name)}#{number}"
                yield make_or_refuse(source, partial(sample_of, row, image, self.columns, source))


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrowSource:
    """The Arrow files that `datasets` has saved below `url`: all splits, by name."""

    url: str
    columns: Columns
    kind: str = "table"
    form: str = "Arrow"

    def items(self, left_out: Told = ignore_left_out) -> Iterator[Item]:
        for entry in arrow_files(self.url, left_out):
            self._image(entry.name)
            parts = ((entry.name, entry.nbytes, entry.stamp),)
            yield Item(name=entry.name, parts=parts, samples=0)

    def find_columns(self) -> tuple[str, str]:
        """Return the names of the columns of images and captions in the first file.

        The second name is "" if there are no captions. Raise an error if no column has images.
        """
        first = next(arrow_files(self.url)).name
        there = arrow_schema(self.url, first).names
        return self._image(first), self.columns.caption or first_of(NAMES, there)

    def _image(self, name: str) -> str:
        schema = arrow_schema(self.url, name)
        return checked_column(self.columns, schema, name, self.url)

    def count(self, item: Item, /) -> int:
        return sum(batch.num_rows for batch in arrow_batches(self.url, item.name, COUNTED_ROWS))

    def read(
        self,
        item: Item,
        /,
        left_out: Told = ignore_left_out,  # noqa: ARG002  the listing knows all
    ) -> Iterator[Sample | Refusal]:
        image = self._image(item.name)
        batches = arrow_batches(self.url, item.name, BATCH_ROWS)
        rows = (row for batch in batches for row in rows_in(batch))
        for number, row in enumerate(rows):
            source = f"{shown(item.name)}#{number}"
            yield make_or_refuse(source, partial(sample_of, row, image, self.columns, source))


@dataclass(frozen=True, kw_only=True, slots=True)
class MdsSource:
    """The MDS shards of images that indexes below `url` name."""

    url: str
    columns: Columns
    kind: str = "table"
    form: str = "MDS"

    def items(self, left_out: Told = ignore_left_out) -> Iterator[Item]:  # noqa: ARG002  an index names all
        for shard, entry in shards_there(self.url):
            self._image(shard)
            yield Item(
                name=shard.raw.name,
                parts=((entry.name, entry.nbytes, entry.stamp),),
                extra=shard.index,
                samples=shard.samples,
            )

    def find_columns(self) -> tuple[str, str]:
        """Return the names of the columns of images and captions in the first shard.

        The second name is "" if there are no captions. Raise an error if no column has images.
        """
        first, _ = next(shards_there(self.url))
        return self._image(first), self.columns.caption or first_of(NAMES, [*first.encodings])

    def _image(self, shard: MdsShard) -> str:
        """Return the name of the column of images in a shard.

        Raise an error that lists the columns if there is none, or if one that the user named is
        missing.
        """
        there, what = shard.encodings, f"{self.url}/{shard.index}"
        self.columns.check([*there], shard.index)
        held = [n for n, encoding in there.items() if encoding in MDS_IMAGES]
        likely = [n for n in held if there[n] != "bytes" or n in IMAGE_NAMES]
        in_roles = self.columns.in_roles(there)
        image = self.columns.image or likely_image([n for n in likely if n not in in_roles])
        wrong = next((n for n in (image, *in_roles) if n and n not in held), "")
        if image and not wrong:
            return image
        shown_columns = list_columns([f"{name} ({encoding})" for name, encoding in there.items()])
        if wrong:
            raise UsageError(
                f"{what}: column {wrong!r} holds no image bytes: it has {shown_columns}"
            )
        raise SourceError(
            f"{what} has no column of image bytes: it has {shown_columns}; give --image-col, or "
            "import latents with wdsprep import"
        )

    def count(self, item: Item, /) -> int:
        return item.samples

    def read(
        self,
        item: Item,
        /,
        left_out: Told = ignore_left_out,  # noqa: ARG002  the listing knows all
    ) -> Iterator[Sample | Refusal]:
        shard = read_index(self.url, item.extra)[item.name]
        image = self._image(shard)
        for number, data in enumerate(read_samples(self.url, shard, item.parts[0][0])):
            source = f"{shown(item.name)}#{number}"
            yield make_or_refuse(source, partial(self._sample, shard, data, image, source))

    def _sample(self, shard: MdsShard, sample: bytes, image: str, source: str) -> Sample:
        """Make a Sample from the bytes of a sample of an MDS shard.

        `image` is the column of images, and `source` the sample's name. Texts, numbers and JSON
        of other columns become facts; values of other types are dropped.
        """
        said, fields = shard.encodings, fields_in(shard, sample)
        facts = {n: value_of(said[n], data, n) for n, data in fields.items() if _is_fact(said[n])}
        images = {name: fields[name] for name in (image, *self.columns.in_roles(said))}
        for name, data in images.items():
            images[name] = png_of_pixels(data) if said[name] == "pil" else data
        return sample_of({**facts, **images}, image, self.columns, source)


ImageTables = TableSource | ArrowSource | MdsSource


def _is_fact(encoding: str) -> bool:
    return encoding in TEXTS or encoding in SCALARS or encoding == "json"


def sample_of(row: TableRow, image: str, columns: Columns, source: str) -> Sample:
    """Make a Sample named `source` from a row, whose column `image` holds the image.

    The images are taken out of the row. Raise RejectedError if the row has no bytes of an image, or
    is such an error itself.
    """
    if isinstance(row, RejectedError):
        raise row
    data = _bytes_of(image, row.pop(image))
    if data is None:
        raise RejectedError(Code.NO_IMAGE, f"column {image} is null")
    images = [one for role in columns.roles for one in _in_role(role, row)] if columns.roles else ()
    facts = plain_facts(row)
    return Sample(
        source=source,
        image=data,
        captions=captions_of(facts, columns.caption),
        facts=facts,
        images=tuple(images),
    )


def _in_role(role: Role, row: dict[str, Any]) -> Iterator[RoleImage]:
    """Yield the images that a row has in a role. They are taken out of the row."""
    values: list[Any] = []
    for name in role.columns(row):
        value = row.pop(name)
        values += value if isinstance(value, list) else [value]
    with naming_role(role.name):
        found = [data for value in values if (data := _bytes_of(role.where, value)) is not None]
    return role_images(role, [(data, "") for data in found])


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


def checked_column(asked: Columns, schema: pa.Schema, name: str, url: str) -> str:
    """Return the name of the column of images in a table, which the user named or wdsprep finds.

    Raise an error that lists the columns if there is none, or if one of those `asked` is missing.
    `name` is the table's name below `url`.
    """
    asked.check(schema.names, name)
    in_roles = asked.in_roles(schema.names)
    image = asked.image or image_column(schema, apart_from=in_roles)
    kinds = {role: schema.field(role).type for role in in_roles}
    held = {n: k.value_type if isinstance(k, LISTS) else k for n, k in kinds.items()}
    if image:
        held[image] = schema.field(image).type
    wrong = next((name for name, kind in held.items() if not holds_bytes(kind)), "")
    if image and not wrong:
        return image
    raise _no_images(schema, f"{url}/{name}", wrong)


def holds_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return "bytes" in [field.name for field in kind] and holds_bytes(kind.field("bytes").type)
    return bool(
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    )


def image_column(schema: pa.Schema, apart_from: Collection[str] = ()) -> str:
    held = [field.name for field in schema if holds_bytes(field.type)]
    return likely_image([name for name in held if name not in apart_from])


def likely_image(held: Sequence[str]) -> str:
    """Return the column of bytes that most likely holds images, or "" if there is none."""
    return first_of(IMAGE_NAMES, held) or next(iter(held), "")


def _no_images(schema: pa.Schema, what: str, column: str) -> Exception:
    there = list_columns([f"{field.name} ({field.type})" for field in schema])
    if column:
        return UsageError(f"{what}: column {column!r} holds no image bytes: it has {there}")
    return SourceError(
        f"{what} has no column of image bytes: it has {there}; give --image-col, or --url-col "
        "where a column holds the images' URLs"
    )
